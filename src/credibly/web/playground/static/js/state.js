// The state of the page, and how it travels in the address: copy the link, get the same page.

import { allowed, COORDINATE, LABEL, LIMITS, PROBE, START, within } from "./limits.js";
import { preset } from "./presets.js";

const SCENES = ["regression", "classification", "hmc", "vi"];

export function defaults() {
  return {
    scene: "regression",
    regression: {
      preset: "gap",
      points: preset("gap"),
      panels: ["map", "dropout", "ensemble", "hmc"],
      probe: [0],
      functions: true,
    },
    classification: {
      preset: "star",
      points: preset("star"),
      panels: ["map", "hmc"],
      probe: [4, 9],
      map: "probability",
      far: 3,
    },
    model: {
      width: 16,
      depth: 2,
      activation: "tanh",
      prior: 3,
      noise: 0.1,
      predicted: false,
      likelihood: 1,
      posterior: 1,
      rate: 0.1,
      chains: 4,
      seed: 0,
    },
    hmc: { density: "banana", step: 0.25, length: 1.6, chains: 1, speed: 60, seed: 0 },
    vi: { family: "mean-field", noise: 0.3, prior: 1.5, points: 10, start: [3.5, 3], seed: 0 },
  };
}

// What differs from the defaults; the scenes that are not shown are left out.
function changes(state, base) {
  const found = {};
  for (const [key, value] of Object.entries(state)) {
    if (JSON.stringify(value) === JSON.stringify(base[key])) continue;
    const nested = typeof value === "object" && !Array.isArray(value);
    found[key] = nested ? changes(value, base[key]) : value;
  }
  return found;
}

export function encode(state) {
  const shown = { scene: state.scene, model: state.model, [state.scene]: state[state.scene] };
  const found = changes(shown, defaults());
  delete found.scene;
  const text = Object.keys(found).length ? `~${base64(JSON.stringify(found))}` : "";
  return `#${state.scene}${text}`;
}

export function decode(hash) {
  const state = defaults();
  const [scene, text] = hash.replace(/^#/, "").split("~");
  if (SCENES.includes(scene)) state.scene = scene;
  if (!text) return state;
  try {
    merge(state, JSON.parse(plain(text)));
  } catch {
    return defaults();
  }
  restrict(state, defaults());
  return state;
}

// Brings whatever a link holds within the limits of the controls.
function restrict(state, base) {
  if (!SCENES.includes(state.scene)) state.scene = base.scene;
  for (const [group, settings] of Object.entries(LIMITS)) {
    for (const [key, limits] of Object.entries(settings)) state[group][key] = allowed(state[group][key], limits, base[group][key]);
  }
  for (const [name, ranges] of [["regression", [COORDINATE, COORDINATE]], ["classification", [COORDINATE, COORDINATE, LABEL]]]) {
    const own = state[name];
    const inputs = ranges.length - 1;
    own.points = own.points.filter((point) => numbers(point, inputs + 1)).map((point) => point.map((v, i) => within(v, ranges[i])));
    own.probe = (numbers(own.probe, inputs) ? own.probe : base[name].probe).map((v) => within(v, PROBE));
  }
  state.vi.start = (numbers(state.vi.start, 2) ? state.vi.start : base.vi.start).map((v) => within(v, START));
}

function numbers(values, length) {
  return Array.isArray(values) && values.length === length && values.every((value) => Number.isFinite(value));
}

// Copies only known keys of the state, with the expected type.
function merge(into, from) {
  for (const [key, value] of Object.entries(from)) {
    if (!Object.hasOwn(into, key)) continue;
    const old = into[key];
    if (Array.isArray(old)) {
      if (Array.isArray(value)) into[key] = value;
    } else if (typeof old === "object") {
      if (value && typeof value === "object") merge(old, value);
    } else if (typeof old === typeof value) into[key] = value;
  }
}

function base64(text) {
  const bytes = String.fromCharCode(...new TextEncoder().encode(text));
  return btoa(bytes).replaceAll("+", "-").replaceAll("/", "_").replace(/=+$/, "");
}

function plain(text) {
  const bytes = atob(text.replaceAll("-", "+").replaceAll("_", "/"));
  return new TextDecoder().decode(Uint8Array.from(bytes, (c) => c.charCodeAt(0)));
}
