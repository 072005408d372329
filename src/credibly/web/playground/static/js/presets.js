// Data to start from. Each preset shows one difference between the methods.

// Mulberry32: the same points in every browser.
export function random(seed) {
  let a = seed >>> 0;
  const uniform = () => {
    a = (a + 0x6d2b79f5) >>> 0;
    let t = a;
    t = Math.imul(t ^ (t >>> 15), t | 1);
    t ^= t + Math.imul(t ^ (t >>> 7), t | 61);
    return ((t ^ (t >>> 14)) >>> 0) / 4294967296;
  };
  const normal = () => Math.sqrt(-2 * Math.log(1 - uniform())) * Math.cos(2 * Math.PI * uniform());
  return { uniform, normal };
}

const round = (value) => Math.round(value * 1000) / 1000;
const wave = (x) => Math.sin(2 * x) + 0.3 * x;

function along(count, seed, at, noise) {
  const { uniform, normal } = random(seed);
  return Array.from({ length: count }, (_, i) => {
    const x = at(uniform(), i);
    return [round(x), round(wave(x) + noise(x) * normal())];
  });
}

function clusters(count, seed, centres, scale) {
  const { normal } = random(seed);
  return Array.from({ length: count }, (_, i) => {
    const label = i % centres.length;
    const [x, y] = centres[label];
    return [round(x + scale * normal()), round(y + scale * normal()), label % 2];
  });
}

const sharpening = (count) => () => along(count, 5, (u) => -2 + 4 * u, () => 0.1);

export const PRESETS = {
  regression: {
    gap: {
      label: "Gap",
      say: "No data between −0.7 and 0.7: which methods are less confident there?",
      probe: [0],
      points: () => along(24, 1, (u, i) => (i % 2 ? 1 : -1) * (0.7 + 1.3 * u), () => 0.1),
    },
    far: {
      label: "Far from the data",
      say: "The dotted line is far from all data. The further away, the less confident a model should be.",
      probe: [3.5],
      points: () => along(20, 2, (u) => -2 + 2.4 * u, () => 0.1),
    },
    noise: {
      label: "Growing noise",
      say: "Noise that grows with x is aleatoric: more data would not remove it. Let the network predict it.",
      probe: [1.5],
      points: () => along(80, 3, (u) => -2 + 4 * u, (x) => 0.05 * 10 ** ((x + 2) / 4)),
      predicted: true,
    },
    clusters: {
      label: "Three clusters",
      say: "The clusters of the HMC paper: between them, a single function is not enough.",
      probe: [0.65],
      points: () => along(30, 4, (u, i) => [-1.8, -0.2, 1.5][i % 3] + 0.35 * (u - 0.5), () => 0.08),
    },
    n2: { label: "2 points", probe: [0], say: "With two points, many functions are possible.", points: sharpening(2) },
    n10: { label: "10 points", probe: [0], say: "With ten points, the functions begin to agree.", points: sharpening(10) },
    n100: { label: "100 points", probe: [0], say: "With a hundred points, epistemic uncertainty is almost gone; the noise remains.", points: sharpening(100) },
  },
  classification: {
    star: {
      label: "Far-away star",
      say: "Twenty points and a star far above them. A point estimate is almost certain of its class; an average over the posterior is not.",
      probe: [4, 9],
      points: () => clusters(20, 6, [[-1.5, 0], [1.5, 0]], 0.8),
      far: 3,
    },
    moons: {
      label: "Two moons",
      say: "Two interleaved arcs: models should be confident along them, uncertain between them and far away.",
      probe: [0, 0],
      points: () => {
        const { uniform, normal } = random(7);
        return Array.from({ length: 40 }, (_, i) => {
          const t = Math.PI * uniform();
          const [x, y] = i % 2 ? [1 - Math.cos(t), 0.4 - Math.sin(t)] : [Math.cos(t), Math.sin(t)];
          return [round(2 * (x - 0.5) + 0.15 * normal()), round(2 * (y - 0.2) + 0.15 * normal()), i % 2];
        });
      },
    },
    corners: {
      label: "Four corners",
      say: "XOR: no straight line separates these.",
      probe: [0, 0],
      points: () => clusters(32, 8, [[-1.5, -1.5], [-1.5, 1.5], [1.5, 1.5], [1.5, -1.5]], 0.45),
    },
    overlap: {
      label: "Overlap",
      say: "Classes that overlap: aleatoric uncertainty in the middle that no data would remove.",
      probe: [0, 0],
      points: () => clusters(60, 9, [[-0.6, 0], [0.6, 0]], 1.0),
    },
  },
};

export function preset(name) {
  const found = PRESETS.regression[name] ?? PRESETS.classification[name];
  return found.points();
}
