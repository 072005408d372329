// Inside variational inference: q over two weights, its free energy, and the two directions of the KL divergence.

import { nextSeed, START, within } from "./limits.js";
import { ellipse, html, levels, make, Plot, show } from "./plot.js";
import { random } from "./presets.js";
import { save } from "./save.js";

const STEPS = 600;

export class InsideVI {
  constructor(app) {
    this.app = app;
    this.name = "vi";
    this.main = html("div", { class: "holder" });
    this.side = html("div", { class: "holder" });
    this.numbers = html("dl", { class: "numbers wide" });
    const button = (label, title, onclick) => html("button", { type: "button", class: "quiet", title, onclick }, label);
    this.node = html(
      "div",
      { class: "inside" },
      html("section", { class: "panel large" }, this.main,
        html("p", { class: "legend" },
          html("span", {}, html("span", { class: "scale posterior" }), "p, the posterior of the weights a and b"),
          html("span", {}, html("span", { class: "key q" }), "q by Bayes by Backprop: minimises KL(q‖p)"),
          html("span", {}, html("span", { class: "key moments" }), "m, the Gaussian with the moments of p: minimises KL(p‖m)"),
          html("span", {}, "Ellipses at 1 and 2 standard deviations. Click to choose where q starts.")),
        html("footer", {},
          button("Code", "Show the lines of credibly that reproduce q", () => this.showCode()),
          button("SVG", "Save this picture as SVG", () => save(this.plot.svg, "credibly-vi", "svg")),
          button("PNG", "Save this picture as PNG", () => save(this.plot.svg, "credibly-vi", "png")))),
      html("section", { class: "panel" }, html("h2", {}, "Free energy, in nats"), this.side,
        html("p", { class: "legend" },
          html("span", {}, html("span", { class: "key q" }), "of q"),
          html("span", {}, html("span", { class: "key noisy" }), "estimate in training"),
          html("span", {}, html("span", { class: "key dashed" }), "−log evidence, its minimum")),
        this.numbers,
        html("p", { class: "say" },
          "The network f(x) = b tanh(a x) is the same for (a, b) and (−a, −b), so its posterior has two equal modes. " +
          "q settles in one of them: KL(q‖p) penalises mass where p has none. KL(p‖m) penalises a lack of mass where p has some: m covers both modes, and the valley between.")),
    );
  }

  get state() {
    return this.app.state.vi;
  }

  enter() {
    this.plot = new Plot(this.main, { label: "Posterior of two weights and q. Click to choose where q starts.", ratio: 0.8, axes: ["a", "b"] });
    this.energy = new Plot(this.side, { label: "Free energy by step", axes: ["step", ""], ratio: 0.5, focusable: false, least: 150 });
    this.plot.onredraw = () => this.redraw();
    this.energy.onredraw = () => this.drawEnergy();
    this.plot.svg.addEventListener("pointerdown", (event) => {
      const at = this.plot.at(event);
      if (event.button !== 0 || !this.plot.inside(at)) return;
      this.start(at.x, at.y);
    });
    this.plot.svg.addEventListener("keydown", (event) => {
      const step = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, 1], ArrowDown: [0, -1] }[event.key];
      if (!step) return;
      event.preventDefault();
      this.start(this.state.start[0] + 0.25 * step[0], this.state.start[1] + 0.25 * step[1]);
    });
    this.refit();
  }

  start(x, y) {
    this.state.start = [x, y].map((v) => Number(within(v, START).toFixed(2)));
    this.changed();
  }

  leave() {
    for (const plot of [this.plot, this.energy]) plot?.observer.disconnect();
    this.main.replaceChildren();
    this.side.replaceChildren();
    this.asked = null;
  }

  request() {
    const { family, noise, prior, points, start, seed } = this.state;
    const { uniform, normal } = random(11);
    const x = Array.from({ length: points }, () => Number((-2 + 4 * uniform()).toFixed(3)));
    const y = x.map((v) => Number((1.2 * Math.tanh(v) + 0.2 * normal()).toFixed(3)));
    return {
      type: "vi", id: this.app.nextId(), data: { x: x.map((v) => [v]), y }, noise, prior_scale: prior, family, start,
      steps: STEPS, seed,
    };
  }

  changed() {
    this.app.changed();
    clearTimeout(this.later);
    this.later = setTimeout(() => this.refit(), 60);
  }

  refit() {
    this.asked = this.request();
    if (!this.app.send(this.asked)) return;
    this.app.hint("");
    Object.assign(this, { trail: [], finished: null });
    this.node.dataset.stage = "waiting";
  }

  receive(message) {
    if (message.id !== this.asked?.id) return;
    if (message.type === "error") this.app.hint(message.message);
    if (message.type === "surface") {
      this.surface = message;
      this.plot.show([message.x[0], message.x[1], message.y[0], message.y[1]]);
      this.redraw();
    }
    this.progress = message.steps ? message : this.progress;
    if (message.type === "q") {
      this.trail.push(message);
      this.drawQ();
      this.drawEnergy();
    }
    if (message.type === "finished") {
      this.finished = message;
      this.node.dataset.stage = "final";
      this.drawQ();
    }
    this.describe();
  }

  redraw() {
    if (!this.surface) return;
    const { x, y, log_density: values } = this.surface;
    this.plot.image(x, y, values, levels(values, 0.5));
    this.drawQ();
  }

  drawQ() {
    const { plot, trail } = this;
    plot.clear("lines", "points", "over");
    const [sx, sy] = this.state.start;
    make("circle", { cx: plot.x(sx), cy: plot.y(sy), r: 4, class: "start" }, plot.layers.points);
    if (!trail.length) return;
    plot.line("lines", [sx, ...trail.map((q) => q.mean[0])], [sy, ...trail.map((q) => q.mean[1])], { class: "trail" });
    const q = trail.at(-1);
    for (const size of [1, 2]) plot.line("over", ...ellipse(q.mean, q.covariance, size), { class: "q" });
    if (this.finished) {
      const { mean, covariance } = this.finished.moments;
      for (const size of [1, 2]) plot.line("over", ...ellipse(mean, covariance, size), { class: "moments" });
    }
  }

  drawEnergy() {
    const { trail, energy } = this;
    energy.clear();
    if (!trail?.length) return;
    const floor = -this.surface.log_evidence;
    // The estimate of each step is noisy; q's own value follows from its divergence from the posterior.
    const exact = trail.map((q) => q.kl_to_posterior + floor);
    const top = Math.max(...exact, ...trail.map((q) => q.free_energy));
    const bottom = Math.min(floor, ...trail.map((q) => q.free_energy));
    const room = 0.08 * (top - bottom) + 0.05;
    const window = [0, trail[0].steps, bottom - room, top + room];
    if (window.some((value, i) => value !== energy.window[i])) {
      energy.show(window);
      return;
    }
    const steps = trail.map((q) => q.step);
    energy.line("lines", [0, trail[0].steps], [floor, floor], { class: "limit" });
    for (const q of trail) make("circle", { cx: energy.x(q.step), cy: energy.y(q.free_energy), r: 2.4, class: "estimate" }, energy.layers.points);
    energy.line("lines", steps, exact, { class: "path" });
  }

  describe() {
    const q = this.trail.at(-1);
    if (!q) return;
    const rows = [
      [q.step < q.steps && this.asked.family !== "mean-field" ? "step (a mean field first)" : "step",
        `${this.progress.step} of ${this.progress.steps}`, "step"],
      ["free energy of q, estimated", show(q.free_energy), "free-energy"],
      ["−log evidence, its minimum", show(-this.surface.log_evidence), "floor"],
      ["KL(q‖p)", show(q.kl_to_posterior), "kl-to"],
      ["KL(p‖q)", show(q.kl_from_posterior), "kl-from"],
    ];
    if (this.finished) {
      rows.push(["KL(m‖p)", show(this.finished.moments.kl_to_posterior), "moments-to"]);
      rows.push(["KL(p‖m)", show(this.finished.moments.kl_from_posterior), "moments-from"]);
    }
    this.numbers.replaceChildren(
      ...rows.map(([name, value, key]) => html("div", {}, html("dt", {}, name), html("dd", { "data-value": key }, value))),
    );
  }

  showCode() {
    const { data, noise, prior_scale: prior, family, start, steps, seed } = this.asked;
    this.app.showCode([
      "import torch, credibly as cr",
      `x, y = torch.tensor([${data.x.map(([v]) => v).join(", ")}]).unsqueeze(1), torch.tensor([${data.y.join(", ")}])`,
      "net = torch.nn.Sequential(torch.nn.Linear(1, 1, bias=False), torch.nn.Tanh(), torch.nn.Linear(1, 1, bias=False))",
      `likelihood, prior = cr.likelihoods.Gaussian(scale=${noise}), cr.priors.Normal(scale=${prior})`,
      "problem = cr.Problem(net, data=(x, y), likelihood=likelihood, prior=prior, dtype=torch.float64)",
      `start = torch.tensor([[${start.join(", ")}]], dtype=torch.float64)`,
      `method = cr.BayesByBackprop(family="${family}", samples=16, estimator="weights", steps=${steps}, lr=0.03, init=start, init_scale=0.3)`,
      `posterior = method.fit(problem, seed=${seed})`,
      'print(posterior.loc, posterior.covariance(), -posterior.record.history["elbo"])',
    ].join("\n"));
  }

  again() {
    this.state.seed = nextSeed(this.state.seed);
    this.changed();
  }

  set(key, value) {
    this.state[key] = value;
    this.changed();
  }
}
