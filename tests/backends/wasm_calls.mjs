// Runs calls on the WebAssembly module: node wasm_calls.mjs SCRIPTS MODULE < calls.json > results.json
//
// A call is [name, arguments], where name is a function below. Non-finite numbers become strings.

import { readFileSync } from "node:fs";
import { pathToFileURL } from "node:url";

const [folder, module] = process.argv.slice(2);
const wasm = await import(pathToFileURL(`${folder}/core.js`));
const core = await wasm.Core.load(readFileSync(module));

function makeModel({ settings, x, y }) {
  const model = new wasm.Model(core, settings);
  model.setData(x, y);
  return model;
}

const functions = {
  density: (given) => makeModel(given).evaluate(given.theta),
  trajectory: (given) => makeModel(given).trajectory(given.theta, given.momentum, given.size, given.steps),
  training(given) {
    const training = new wasm.Training(makeModel(given), given.options);
    training.theta = Float32Array.from(given.theta);
    const fine = training.advance(given.options.steps);
    return { fine, theta: training.theta, loss: training.loss };
  },
  dropout(given) {
    const training = new wasm.Training(makeModel(given), given.options);
    training.theta = Float32Array.from(given.theta);
    const numbers = given.sizes.map(([step, layer, count]) => core.maskNumbers(given.options.seed, step, layer, count));
    training.advance(given.options.steps);
    return { theta: training.theta, numbers, passes: training.passes(given.draws) };
  },
  predictive(given) {
    const model = makeModel(given);
    const predictive = new wasm.Predictive(model, given.grid.flat(), given.grid.length);
    predictive.add(Float32Array.from(given.theta.flat()));
    const functions = given.theta.map((_, draw) => predictive.function(draw));
    const found = { ...predictive.summary, rhat: predictive.rhat(given.chains), functions };
    if (given.settings.likelihood === "bernoulli") return found;
    const density = predictive.density(0, given.targets);
    return { ...found, lower: predictive.quantile(0.05), upper: predictive.quantile(0.95), density };
  },
  sample(given) {
    const model = makeModel(given);
    const start = new wasm.Training(model, { members: given.options.chains, steps: 1, seed: 3 }).theta;
    const sampler = new wasm.Sampler(model, given.options, start);
    let fine = sampler.begin();
    while (fine && sampler.done < sampler.total) fine = sampler.advance();
    const found = { fine, ...sampler.report, draws: given.keep ? sampler.draws() : [] };
    if (!given.grid) return found;
    const predictive = new wasm.Predictive(model, given.grid.flat(), given.grid.length);
    predictive.add(sampler.draws());
    const values = Array.from({ length: predictive.draws }, (_, draw) => [...predictive.function(draw)]);
    return { ...found, functions: values };
  },
  convergence: ({ values, chains }) => core.convergence(values, chains),
  plane({ name, points }) {
    const plane = wasm.Plane.named(core, name);
    return points.map((point) => plane.evaluate(point));
  },
  surface: ({ name, x, y }) => wasm.Plane.named(core, name).surface(x, y),
  orbit({ name, start, momentum, stepSize, length }) {
    const orbit = new wasm.Orbit(wasm.Plane.named(core, name), { chains: 1, stepSize, length });
    orbit.start(0, start);
    return orbit.advanceFrom(0, momentum, 0.5);
  },
  slice(given) {
    const plane = wasm.Plane.through(makeModel(given), Float32Array.from(given.theta.flat()));
    return { corners: plane.corners(), values: plane.corners().map((corner) => plane.evaluate(corner)) };
  },
};

const plain = (_, value) => {
  if (value instanceof Float32Array || value instanceof Float64Array) return Array.from(value);
  return typeof value === "number" && !Number.isFinite(value) ? String(value) : value;
};
const calls = JSON.parse(readFileSync(0, "utf8"));
const results = calls.map(([name, given]) => functions[name](given));
process.stdout.write(JSON.stringify(results, plain));
