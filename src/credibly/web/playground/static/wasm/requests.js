// Requests of the page, checked before any work. Errors say in words what is wrong.

const ACTIVATIONS = ["tanh", "silu", "relu"];
const DENSITIES = ["banana", "funnel", "modes", "network"];
const OPTIONS = {
  steps: [1, 5000], members: [1, 30], chains: [1, 16], draws: [4, 500], warmup: [20, 2000], trajectory_length: [0.01, 10],
  rate: [0, 0.9],
};
const FRACTIONS = ["rate", "trajectory_length"];
const LARGEST = 1e4;
const SERVER_METHODS = ["bbb", "laplace", "sghmc"];
const NEEDS_SERVER = "needs the local server: run `credibly playground`";

function number(name, value, low, high) {
  if (typeof value === "number" && value >= low && value <= high) return value;
  throw new Error(`${name} must be a number from ${low} to ${high}, got ${JSON.stringify(value)}`);
}

function integer(name, value, low, high) {
  if (Number.isInteger(value) && value >= low && value <= high) return value;
  throw new Error(`${name} must be an integer from ${low} to ${high}, got ${JSON.stringify(value)}`);
}

function choice(name, value, known) {
  if (known.includes(value)) return value;
  throw new Error(`${name} must be one of ${known.join(", ")}, got ${JSON.stringify(value)}`);
}

function list(name, value, least, most) {
  if (Array.isArray(value) && value.length >= least && value.length <= most) return value;
  throw new Error(`${name} must be a list of ${least} to ${most} entries`);
}

// Returns a request with every field present. `known`: methods and points that the engine has.
export function read(message, known) {
  if (message?.type === "vi") throw new Error(`this scene ${NEEDS_SERVER}`);
  const type = choice("type", message?.type, ["fit", "probe", "hmc", "cancel"]);
  if (type === "cancel") return { type };
  const id = integer("id", message.id, 0, 2 ** 31);
  if (type === "probe") {
    return { type, id, x: list("x", message.x, 1, 2).map((value) => number("x", value, -LARGEST, LARGEST)) };
  }
  const seed = integer("seed", message.seed ?? 0, 0, 2 ** 31);
  return type === "fit" ? { type, id, seed, ...fit(message, known) } : { type, id, seed, ...orbit(message, known) };
}

function fit(message, known) {
  const scene = choice("scene", message.scene, ["regression", "classification"]);
  const classes = scene === "classification";
  const axes = classes ? ["x", "y"] : ["x"];
  const grid = axes.map((name) => {
    const [low, high, count] = list(`grid.${name}`, message.grid?.[name], 3, 3);
    if (!(low < high)) throw new Error(`grid.${name} must run from a smaller to a larger value`);
    return [number(name, low, -LARGEST, LARGEST), number(name, high, -LARGEST, LARGEST), integer(name, count, 2, 401)];
  });
  const panels = list("panels", message.panels, 1, 4).map((panel) => {
    if (SERVER_METHODS.includes(panel?.method)) throw new Error(`the method ${panel.method} ${NEEDS_SERVER}`);
    const method = choice("method", panel?.method, known.methods);
    const options = {};
    for (const [name, value] of Object.entries(panel.options ?? {})) {
      if (!OPTIONS[name]) throw new Error(`${name} is not an option in this page; it has ${Object.keys(OPTIONS).join(", ")}`);
      options[name] = (FRACTIONS.includes(name) ? number : integer)(name, value, ...OPTIONS[name]);
    }
    return { method, options };
  });
  return { scene, classes, grid, panels, data: data(message.data, axes.length, classes, known.points), model: model(message.model) };
}

function orbit(message, known) {
  const density = choice("density", message.density, DENSITIES);
  const request = {
    density,
    stepSize: number("step_size", message.step_size, 0.005, 3),
    length: number("trajectory_length", message.trajectory_length, 0.01, 20),
    chains: integer("chains", message.chains ?? 1, 1, 4),
    trajectories: integer("trajectories", message.trajectories ?? 30, 1, 300),
  };
  if (density !== "network") return request;
  return { ...request, data: data(message.data, 1, false, known.points), model: model(message.model) };
}

function data(given, inputs, labels, points) {
  const x = list("data.x", given?.x, 1, points);
  const y = list("data.y", given?.y, 1, points);
  if (x.length !== y.length) throw new Error(`data must have as many x as y, got ${x.length} and ${y.length}`);
  x.forEach((row) => list("x", row, inputs, inputs).forEach((value) => number("x", value, -LARGEST, LARGEST)));
  y.forEach((value) => (labels ? integer("y", value, 0, 1) : number("y", value, -LARGEST, LARGEST)));
  return { x, y };
}

function model(given) {
  return {
    hidden: list("hidden", given?.hidden, 1, 3).map((units) => integer("hidden", units, 1, 64)),
    activation: choice("activation", given.activation ?? "tanh", ACTIVATIONS),
    priorScale: number("prior_scale", given.prior_scale, 0.05, 20),
    likelihoodTemperature: number("likelihood_temperature", given.likelihood_temperature ?? 1, 1e-4, 1e4),
    priorTemperature: number("prior_temperature", given.prior_temperature ?? 1, 1e-4, 1e4),
    noise: given.noise === "predicted" ? given.noise : number("noise", given.noise ?? 0.1, 0.01, 10),
  };
}
