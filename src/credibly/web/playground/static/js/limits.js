// Ranges and choices of every setting: for its control, and for what a link may set it to.

const log = (low, high) => ({ low, high, log: true });
const by = (step, low, high) => ({ low, high, step });
const one = (options) => ({ options });

// One more than the largest seed.
const SEEDS = 2 ** 31;
const SEED = by(1, 0, SEEDS - 1);
export const nextSeed = (seed) => (seed + 1) % SEEDS;

export const LIMITS = {
  classification: {
    map: one({ probability: "Probability", epistemic: "Epistemic: mutual information", aleatoric: "Aleatoric" }),
    far: log(1, 30),
  },
  model: {
    width: by(1, 2, 64),
    depth: by(1, 1, 3),
    activation: one({ tanh: "tanh", silu: "SiLU", relu: "ReLU" }),
    prior: log(0.3, 10),
    noise: log(0.02, 1),
    likelihood: log(0.01, 100),
    posterior: log(0.01, 100),
    rate: by(0.01, 0.01, 0.6),
    chains: by(1, 2, 8),
    seed: SEED,
  },
  hmc: {
    density: one({ banana: "Banana", funnel: "Funnel", modes: "Two modes", network: "Network: plane of three modes" }),
    step: log(0.01, 2),
    length: log(0.05, 10),
    chains: by(1, 1, 4),
    speed: log(5, 1000),
    seed: SEED,
  },
  vi: {
    family: one({ "mean-field": "Mean field", "full-rank": "Full rank" }),
    points: by(1, 1, 60),
    noise: log(0.05, 2),
    prior: log(0.5, 3),
    seed: SEED,
  },
};

export const PANELS = by(1, 1, 4);
// Inputs and targets: the window around them stays within the values that the engines accept.
export const COORDINATE = { low: -1000, high: 1000 };
export const LABEL = by(1, 0, 1);
export const PROBE = { low: -1e4, high: 1e4 };
export const START = { low: -9, high: 9 };
// Most leapfrog steps of a trajectory in "Inside HMC": as in the engines.
export const LEAPS = 400;

// The nearest number that a range allows.
export function within(value, { low, high, step }) {
  const inside = Math.min(high, Math.max(low, value));
  return step ? Number((low + step * Math.round((inside - low) / step)).toPrecision(12)) : inside;
}

// A setting as its limits allow it: the nearest number, or the default in place of an unknown choice.
export function allowed(value, limits, base) {
  if (!limits.options) return within(value, limits);
  return Object.hasOwn(limits.options, value) ? value : base;
}
