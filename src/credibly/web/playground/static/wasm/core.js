// The WebAssembly module as JavaScript objects: arrays in, arrays out. All arithmetic is in C++ (backends/wasm, backends/cpp).

export const ACTIVATIONS = { relu: 1, tanh: 2, silu: 3, sigmoid: 4 };
export const LIKELIHOODS = { gaussian: 0, heteroscedastic: 1, bernoulli: 3 };
export const PLANES = { banana: 0, funnel: 1, modes: 2 };

export class Core {
  // Compiles the module: `bytes` are those of credibly.wasm.
  static async load(bytes) {
    const { instance } = await WebAssembly.instantiate(bytes, {});
    instance.exports._initialize();
    return new Core(instance.exports);
  }

  constructor(exports) {
    this.exports = exports;
  }

  // Copies of what lies at an address; a view would be lost when the memory grows.
  floats(address, count) {
    return new Float32Array(this.exports.memory.buffer, address, count).slice();
  }

  doubles(address, count) {
    return new Float64Array(this.exports.memory.buffer, address, count).slice();
  }

  // Calls `use` with the addresses of arrays in the module's memory: typed arrays are copied there, a number n is room
  // for n doubles. Returns what `use` returns.
  lend(arrays, use) {
    const addresses = arrays.map((array) => this.exports.allocate(Math.max(8, array.byteLength ?? 8 * array)));
    arrays.forEach((array, k) => {
      if (typeof array !== "number")
        new array.constructor(this.exports.memory.buffer, addresses[k], array.length).set(array);
    });
    try {
      return use(...addresses);
    } finally {
      addresses.forEach((address) => this.exports.release(address));
    }
  }

  // The uniform numbers behind the dropout masks of a layer in one step.
  maskNumbers(seed, step, layer, count) {
    return this.lend([new Float32Array(count)], (out) => {
      this.exports.training_masks(seed, step, layer, count, out);
      return this.floats(out, count);
    });
  }

  // R-hat and bulk effective sample size of values [chain][draw].
  convergence(values, chains) {
    return this.lend([Float64Array.from(values), 2], (at, out) => {
      this.exports.convergence(at, chains, values.length / chains, out);
      const [rhat, ess] = this.doubles(out, 2);
      return { rhat, ess };
    });
  }
}

class Owned {
  constructor(core, kind, address) {
    Object.assign(this, { core, kind, address });
  }

  delete() {
    this.core.exports[`${this.kind}_delete`](this.address);
    this.address = 0;
  }
}

export class Model extends Owned {
  // `settings`: inputs, hidden, outputs, activation, likelihood, noise, learned, priorScale, fanIn, likelihoodTemperature,
  // priorTemperature.
  constructor(core, settings) {
    const hidden = [0, 1, 2].map((layer) => settings.hidden[layer] ?? 0);
    const values = [
      settings.inputs, settings.hidden.length, ...hidden, settings.outputs, ACTIVATIONS[settings.activation],
      LIKELIHOODS[settings.likelihood], settings.noise, settings.learned ? 1 : 0, settings.priorScale,
      settings.fanIn ? 1 : 0, settings.likelihoodTemperature, settings.priorTemperature,
    ];
    super(core, "model", core.lend([Float64Array.from(values)], (at) => core.exports.model_new(at)));
    this.settings = settings;
    this.dim = core.exports.model_dim(this.address);
  }

  // Rows x [row][input] and targets y [row].
  setData(x, y) {
    const rows = y.length;
    this.core.lend([Float32Array.from(x.flat()), Float32Array.from(y)], (xs, ys) =>
      this.core.exports.model_data(this.address, xs, ys, rows));
  }

  // Log likelihood, log prior and the gradient of the tempered log density.
  evaluate(theta) {
    return this.core.lend([Float32Array.from(theta), 2, new Float32Array(this.dim)], (at, parts, gradient) => {
      this.core.exports.model_evaluate(this.address, at, parts, gradient);
      const [logLikelihood, logPrior] = this.core.doubles(parts, 2);
      return { logLikelihood, logPrior, gradient: this.core.floats(gradient, this.dim) };
    });
  }

  // Where a leapfrog trajectory ends.
  trajectory(theta, momentum, size, steps) {
    return this.core.lend([Float32Array.from(theta), Float32Array.from(momentum)], (at, m) => {
      const logLikelihood = this.core.exports.model_trajectory(this.address, at, m, size, steps);
      return { theta: this.core.floats(at, this.dim), momentum: this.core.floats(m, this.dim), logLikelihood };
    });
  }
}

// Members trained by Adam on all rows.
export class Training extends Owned {
  constructor(model, { members = 1, steps, rate = 0.01, prior = true, clipNorm = 0, dropout = 0, seed = 0 }) {
    const make = model.core.exports.training_new;
    super(model.core, "training", make(model.address, members, steps, rate, prior ? 1 : 0, clipNorm, dropout, seed));
    Object.assign(this, { model, members, steps });
  }

  advance(steps) {
    return this.core.exports.training_advance(this.address, steps) === 1;
  }

  get done() {
    return this.core.exports.training_done(this.address);
  }

  get loss() {
    return this.core.exports.training_loss(this.address);
  }

  // Parameters [member][dim].
  get theta() {
    return this.core.floats(this.core.exports.training_theta(this.address), this.members * this.model.dim);
  }

  // Parameters of the first member under dropout masks, [draw][dim].
  passes(draws) {
    return this.core.lend([new Float32Array(draws * this.model.dim)], (out) => {
      this.core.exports.training_passes(this.address, draws, out);
      return this.core.floats(out, draws * this.model.dim);
    });
  }

  set theta(values) {
    const { memory, training_theta } = this.core.exports;
    new Float32Array(memory.buffer, training_theta(this.address), values.length).set(values);
  }
}

// Chains of HMC from theta [chain][dim].
export class Sampler extends Owned {
  constructor(model, settings, start) {
    const { chains = 4, draws = 500, warmup = 300, thin = 1, length = 0, jitter = 0.2, refresh = 1 } = settings;
    const { targetAccept = 0.8, maxSteps = 1000, seed = 0 } = settings;
    const values = [chains, draws, warmup, thin, length, jitter, refresh, targetAccept, maxSteps, seed];
    const make = model.core.exports.sampler_new;
    super(model.core, "sampler", model.core.lend([Float64Array.from(values), Float32Array.from(start)],
      (at, first) => make(model.address, at, first)));
    Object.assign(this, { model, chains, warmup, thin });
    this.total = this.core.exports.sampler_total(this.address);
  }

  // Searches for a step size; false if there is none.
  begin() {
    return this.core.exports.sampler_begin(this.address) === 1;
  }

  advance() {
    return this.core.exports.sampler_advance(this.address) === 1;
  }

  get done() {
    return this.core.exports.sampler_done(this.address);
  }

  // Draws per chain.
  get kept() {
    return Math.max(0, Math.floor((this.done - this.warmup) / this.thin));
  }

  get theta() {
    return this.core.floats(this.core.exports.sampler_theta(this.address), this.chains * this.model.dim);
  }

  // Draws [draw][chain][dim], from a draw on.
  draws(first = 0) {
    const size = this.chains * this.model.dim;
    const address = this.core.exports.sampler_draws(this.address) + 4 * first * size;
    return this.core.floats(address, (this.kept - first) * size);
  }

  get report() {
    return this.core.lend([6], (out) => {
      this.core.exports.sampler_report(this.address, out);
      const [acceptance, divergences, stepSize, length, gradients, restarts] = this.core.doubles(out, 6);
      return { acceptance, divergences, stepSize, length, gradients, restarts };
    });
  }
}

// The model average at inputs x [row][input].
export class Predictive extends Owned {
  constructor(model, x, rows) {
    const make = model.core.exports.predictive_new;
    super(model.core, "predictive", model.core.lend([Float32Array.from(x)], (at) => make(model.address, at, rows)));
    Object.assign(this, { model, rows });
  }

  add(theta) {
    this.core.lend([theta], (at) => this.core.exports.predictive_add(this.address, at, theta.length / this.model.dim));
  }

  clear() {
    this.core.exports.predictive_clear(this.address);
  }

  get draws() {
    return this.core.exports.predictive_draws(this.address);
  }

  get summary() {
    return this.core.lend([this.rows, this.rows, this.rows, this.rows], (...parts) => {
      this.core.exports.predictive_summary(this.address, ...parts);
      const [mean, total, aleatoric, epistemic] = parts.map((part) => this.core.doubles(part, this.rows));
      return { mean, total, aleatoric, epistemic };
    });
  }

  quantile(level) {
    return this.core.lend([this.rows], (out) => {
      this.core.exports.predictive_quantile(this.address, level, out);
      return this.core.doubles(out, this.rows);
    });
  }

  // The predictive density of a row at values y.
  density(row, y) {
    return this.core.lend([Float64Array.from(y), y.length], (at, out) => {
      this.core.exports.predictive_density(this.address, row, at, y.length, out);
      return this.core.doubles(out, y.length);
    });
  }

  // The largest R-hat over the rows, of draws [draw][chain]; NaN with fewer than four draws per chain.
  rhat(chains) {
    return this.core.exports.predictive_rhat(this.address, chains);
  }

  function(draw) {
    return this.core.lend([new Float32Array(this.rows)], (out) => {
      this.core.exports.predictive_function(this.address, draw, out);
      return this.core.floats(out, this.rows);
    });
  }
}

// A density of two variables: by name, or that of a model on the plane through three parameter vectors.
export class Plane extends Owned {
  static named(core, name) {
    return new Plane(core, "plane", core.exports.plane_new(PLANES[name]));
  }

  // Points [3][dim]: the first is the origin, the second lies on the first axis.
  static through(model, points) {
    const make = model.core.exports.plane_through;
    return new Plane(model.core, "plane", model.core.lend([points], (at) => make(model.address, at)));
  }

  // The coordinates of those three points.
  corners() {
    const flat = this.core.doubles(this.core.exports.plane_corners(this.address), 6);
    return [0, 1, 2].map((k) => [flat[2 * k], flat[2 * k + 1]]);
  }

  evaluate(point) {
    return this.core.lend([Float64Array.from(point), 2], (at, out) => {
      const logDensity = this.core.exports.plane_evaluate(this.address, at, out);
      return { logDensity, gradient: this.core.doubles(out, 2) };
    });
  }

  // Log densities on a grid of x [from, to, count] by y, y outer and x inner.
  surface(x, y) {
    const count = x[2] * y[2];
    return this.core.lend([Float64Array.from(x), Float64Array.from(y), count], (xs, ys, out) => {
      this.core.exports.plane_surface(this.address, xs, ys, out);
      return this.core.doubles(out, count);
    });
  }
}

// Chains of HMC on a plane, with their trajectories.
export class Orbit extends Owned {
  constructor(plane, { chains, stepSize, length, seed = 0 }) {
    super(plane.core, "orbit", plane.core.exports.orbit_new(plane.address, chains, stepSize, length, seed));
  }

  start(chain, [u, v]) {
    this.core.exports.orbit_start(this.address, chain, u, v);
  }

  // Moves a chain by one trajectory, with random numbers of an iteration or with a given momentum and uniform number.
  advance(chain, iteration) {
    this.core.exports.orbit_advance(this.address, chain, iteration);
    return this.last();
  }

  advanceFrom(chain, momentum, uniform) {
    this.core.lend([Float64Array.from(momentum)], (at) =>
      this.core.exports.orbit_advance_from(this.address, chain, at, uniform));
    return this.last();
  }

  last() {
    const { exports } = this.core;
    const points = exports.orbit_points(this.address);
    const path = this.core.doubles(exports.orbit_path(this.address), 2 * points);
    return {
      path: Array.from({ length: points }, (_, k) => [path[2 * k], path[2 * k + 1]]),
      energyError: this.core.doubles(exports.orbit_error(this.address), points),
      ...this.report,
    };
  }

  get report() {
    return this.core.lend([6], (out) => {
      this.core.exports.orbit_report(this.address, out);
      const [acceptance, accepted, divergent, meanAcceptance, divergences, gradients] = this.core.doubles(out, 6);
      return { acceptance, accepted: accepted === 1, divergent: divergent === 1, meanAcceptance, divergences, gradients };
    });
  }

  // The larger R-hat and the smaller effective sample size of the two coordinates.
  get convergence() {
    return this.core.lend([2], (out) => {
      this.core.exports.orbit_convergence(this.address, out);
      const [rhat, ess] = this.core.doubles(out, 2);
      return { rhat, ess };
    });
  }
}
