// Fits of the panels of a request: short drafts first, then each method's own fit, shown while it runs.

import { Model, Predictive, Sampler, Training } from "./core.js";

// Smallest standard deviation of predicted noise.
const FLOOR = 0.02;
// Steps of a draft that starts at an earlier fit, and of one that has none.
const WARM_STEPS = 40;
const COLD_STEPS = 150;
const DRAFT_SAMPLING = { warmup: 20, draws: 5, maxSteps: 25 };
// Milliseconds between two bands of a running fit, at least, and in units of the time that the last one took; steps of
// training between two looks at the clock.
const EVERY = 120;
const REST = 4;
const CHUNK = 10;
const FUNCTIONS = 12;
const LEVEL = 0.9;
// Points of a predictive density, and how many standard deviations they reach to either side.
const DENSITY_POINTS = 101;
const REACH = 4;
// The cheapest drafts come first.
const ORDER = ["map", "mle", "dropout", "ensemble", "hmc"];
// Forward passes with dropout per prediction, and its rate unless the page says otherwise.
const PASSES = 100;
const RATE = 0.05;

const plain = (values) => Array.from(values, (value) => (Number.isFinite(value) ? value : null));
const finite = (value) => (Number.isFinite(value) ? value : null);
export const linspace = (low, high, count) =>
  Array.from({ length: count }, (_, k) => low + ((high - low) * k) / (count - 1));

// The model that a request describes, with its data.
export function makeModel(core, { model, data, classes }) {
  const predicted = model.noise === "predicted" && !classes;
  const made = new Model(core, {
    ...model,
    inputs: classes ? 2 : 1,
    outputs: predicted ? 2 : 1,
    likelihood: classes ? "bernoulli" : predicted ? "heteroscedastic" : "gaussian",
    noise: predicted ? FLOOR : classes ? 1 : model.noise,
    learned: false,
    fanIn: true,
  });
  made.setData(data.x, data.y);
  return made;
}

// A panel's latest draws, with what is needed to start another fit from them and to predict.
class Panel {
  constructor(request, method, dim) {
    const { scene, model } = request;
    this.key = JSON.stringify([method, scene, model.hidden, model.activation, model.noise === "predicted", dim]);
    this.request = request;
  }

  // Keeps the parameter vectors of a stage of the fit; `last` are those at which the chains or members are.
  keep(core, stage, theta, last) {
    Object.assign(this, { core, stage, theta, last });
  }

  // The predictive at one input, from the latest draws.
  probe(x) {
    const { classes } = this.request;
    if (!this.theta || x.length !== (classes ? 2 : 1)) return null;
    const model = makeModel(this.core, this.request);
    const predictive = new Predictive(model, x, 1);
    try {
      predictive.add(this.theta);
      const { mean, total, aleatoric, epistemic } = predictive.summary;
      const parts = { mean, total, aleatoric, epistemic };
      const found = Object.fromEntries(Object.entries(parts).map(([name, values]) => [name, finite(values[0])]));
      if (classes) return { ...found, lower: null, upper: null, y: null, density: null };
      const [lower, upper] = [(1 - LEVEL) / 2, (1 + LEVEL) / 2].map((level) => finite(predictive.quantile(level)[0]));
      const reach = REACH * Math.sqrt(total[0]);
      const y = linspace(mean[0] - reach, mean[0] + reach, DENSITY_POINTS);
      return { ...found, lower, upper, y: plain(y), density: plain(predictive.density(0, y)) };
    } finally {
      predictive.delete();
      model.delete();
    }
  }
}

export class FitRun {
  constructor(core, request, post, panels) {
    Object.assign(this, { core, request, post, panels, began: performance.now(), owned: [] });
    this.model = this.own(makeModel(core, request));
    const axes = request.grid.map((axis) => linspace(...axis));
    // Of two inputs, the first varies fastest.
    this.grid = request.classes ? axes[1].flatMap((y) => axes[0].flatMap((x) => [x, y])) : axes[0];
    this.rows = axes.reduce((count, axis) => count * axis.length, 1);
    for (const index of [...panels.keys()]) if (index >= request.panels.length) panels.delete(index);
  }

  own(object) {
    this.owned.push(object);
    return object;
  }

  end() {
    for (const object of this.owned.reverse()) object.delete();
  }

  // Yields after every piece of work.
  *steps() {
    const order = this.request.panels.map((_, index) => index);
    order.sort((a, b) => ORDER.indexOf(this.request.panels[a].method) - ORDER.indexOf(this.request.panels[b].method));
    for (const draft of [true, false]) {
      for (const index of order) {
        const { method } = this.request.panels[index];
        const failure = yield* method === "hmc" ? this.sample(index, draft) : this.train(index, draft);
        if (failure) this.post({ type: "failed", panel: index, message: failure });
        yield;
      }
    }
  }

  // Where the last fit of a panel ended, if it has the same method and network.
  previous(index) {
    const before = this.panels.get(index);
    const { method } = this.request.panels[index];
    return before?.theta && before.key === new Panel(this.request, method, this.model.dim).key ? before.last : null;
  }

  *train(index, draft) {
    const { method, options } = this.request.panels[index];
    const members = method === "ensemble" ? (options.members ?? 10) : 1;
    const before = draft ? this.previous(index) : null;
    const warm = before?.length === members * this.model.dim;
    const steps = draft ? (warm ? WARM_STEPS : COLD_STEPS) : (options.steps ?? 3000);
    const dropout = method === "dropout" ? (options.rate ?? RATE) : 0;
    const settings = { members, steps, prior: method !== "mle", dropout, seed: this.request.seed };
    const training = this.own(new Training(this.model, settings));
    if (warm) training.theta = before;
    const draws = () => (dropout ? training.passes(PASSES) : training.theta);
    const predictive = this.own(new Predictive(this.model, this.grid, this.rows));
    this.next = performance.now() + EVERY;
    while (training.done < steps) {
      if (!training.advance(CHUNK)) return "training failed: the loss is no longer a finite number";
      yield;
      // Before halfway the draft is the better picture.
      if (!draft && training.done > steps / 2 && training.done < steps && performance.now() > this.next) {
        const progress = { stage: "running", done: training.done, total: steps, loss: training.loss };
        this.show(index, predictive, draws(), training.theta, progress);
      }
    }
    const progress = draft ? { stage: "draft", done: 0, total: 1 } : { stage: "final", done: steps, total: steps };
    this.show(index, predictive, draws(), training.theta, { ...progress, loss: training.loss });
    return null;
  }

  *sample(index, draft) {
    const { options } = this.request.panels[index];
    const { chains = 4, draws = 500, warmup = 300, trajectory_length: length = 0 } = options;
    const settings = { chains, draws, warmup, length, jitter: length ? 0 : 0.2, seed: this.request.seed };
    if (draft) Object.assign(settings, DRAFT_SAMPLING);
    const before = draft ? this.previous(index) : null;
    const sampler = this.own(new Sampler(this.model, settings, this.starts(chains, before)));
    if (!sampler.begin()) return "no step size was found: the density is not finite at the starting points";
    const predictive = this.own(new Predictive(this.model, this.grid, this.rows));
    this.next = performance.now() + EVERY;
    let counted = 0;
    while (sampler.done < sampler.total) {
      if (!sampler.advance()) return "sampling failed: no step size was found during warm-up";
      yield;
      const last = sampler.done === sampler.total;
      if ((draft && !last) || (!last && (sampler.kept < 2 || performance.now() < this.next))) continue;
      const began = performance.now();
      predictive.add(sampler.draws(counted));
      counted = sampler.kept;
      const { acceptance, divergences } = sampler.report;
      const stage = draft ? "draft" : last ? "final" : "running";
      const progress = draft ? { done: 0, total: 1 } : { done: sampler.done, total: sampler.total };
      const rhat = finite(predictive.rhat(chains));
      const diagnosis = stage === "final" ? verdict(rhat, chains, divergences) : null;
      const fields = { stage, ...progress, rhat, acceptance, divergences, diagnosis };
      this.send(index, predictive, sampler.draws(), sampler.theta, fields, began);
    }
    return null;
  }

  // Starting points of chains: where the last ones ended, or new networks.
  starts(chains, before) {
    const { dim } = this.model;
    if (before) return Float32Array.from({ length: chains * dim }, (_, k) => before[k % before.length]);
    const fresh = new Training(this.model, { members: chains, steps: 1, seed: this.request.seed });
    try {
      return fresh.theta;
    } finally {
      fresh.delete();
    }
  }

  show(index, predictive, theta, last, fields) {
    const began = performance.now();
    predictive.clear();
    predictive.add(theta);
    this.send(index, predictive, theta, last, fields, began);
  }

  send(index, predictive, theta, last, fields, began = performance.now()) {
    const { method } = this.request.panels[index];
    const panel = new Panel(this.request, method, this.model.dim);
    panel.keep(this.core, fields.stage, theta, last);
    this.panels.set(index, panel);
    const { mean, aleatoric, epistemic } = predictive.summary;
    const message = {
      type: "band", panel: index, loss: null, rhat: null, acceptance: null, divergences: null, diagnosis: null, ...fields,
      draws: predictive.draws, mean: plain(mean), aleatoric: plain(aleatoric), epistemic: plain(epistemic),
    };
    if (!this.request.classes) {
      const count = Math.min(FUNCTIONS, predictive.draws);
      const picks = count > 1 ? linspace(0, predictive.draws - 1, count).map(Math.round) : [0];
      message.functions = picks.map((draw) => plain(predictive.function(draw)));
    }
    this.post({ ...message, seconds: (performance.now() - this.began) / 1000 });
    const now = performance.now();
    this.next = now + Math.max(EVERY, REST * (now - began));
  }
}

// What the numbers of the chains mean: a verdict before the colon, as the library's, then its reason. It is weaker than
// the library's "Good", which also counts effective draws.
function verdict(rhat, chains, divergences) {
  const many = divergences === 1 ? "1 trajectory" : `${divergences} trajectories`;
  const diverged = divergences ? `, and ${many} diverged` : "";
  if (rhat === null) return `Not yet: there are too few draws for R-hat${diverged}.`;
  const who = `the functions of the ${chains} chains`;
  const value = `(R-hat ${rhat.toFixed(3)})`;
  if (rhat > 1.1) return `Not mixed: ${who} disagree ${value}${diverged}. Run more chains, or another seed.`;
  if (rhat > 1.05) return `Not yet: ${who} nearly agree ${value}${diverged}.`;
  // As for the library, a region that was not explored outweighs agreement.
  if (divergences) return `Not yet: ${who} agree ${value}${diverged}.`;
  return `Chains agree: ${who} agree ${value}. Effective draws are not counted in this page.`;
}
