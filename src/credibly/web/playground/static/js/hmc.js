// Inside HMC: leapfrog trajectories on a density of two variables, step by step.

import { problemLines } from "./code.js";
import { round } from "./fitting.js";
import { LEAPS, nextSeed } from "./limits.js";
import { html, levels, make, Plot, show } from "./plot.js";
import { save } from "./save.js";

const TRAJECTORIES = 60;
// What each density shows, and a step size and trajectory length that suit it.
const DENSITIES = {
  banana: { step: 0.25, length: 1.6, say: "A curved ridge: no single step size suits its middle and its arms." },
  funnel: { step: 0.25, length: 1.6, say: "Neal's funnel: v is the log variance of u. Steps that suit the mouth are too large for the neck." },
  modes: { step: 0.25, length: 1.6, say: "Two Gaussians: a trajectory crosses the valley only with enough kinetic energy." },
  network: {
    step: 0.02, length: 0.6,
    say: "The posterior of the network in the regression scene, on the plane through three of its MAP fits; u and v are distances in weight space.",
  },
};
// Leapfrog steps of a trajectory, as the engines count them.
const leaps = (length, step) => Math.ceil(length / step - 1e-9);
const quiet = matchMedia("(prefers-reduced-motion: reduce)");

export class InsideHMC {
  constructor(app) {
    this.app = app;
    this.name = "hmc";
    this.main = html("div", { class: "holder" });
    this.side = html("div", { class: "holder" });
    this.numbers = html("div", { class: "numbers wide" });
    this.say = html("p", { class: "say" });
    const key = (name, text, sign = "") => html("span", {}, html("span", { class: `key ${name}` }, sign), text);
    const button = (label, title, onclick) => html("button", { type: "button", class: "quiet", title, onclick }, label);
    this.node = html(
      "div",
      { class: "inside" },
      html("section", { class: "panel large" }, this.say, this.main, html("p", { class: "legend" },
        html("span", {}, html("span", { class: "scale posterior" }), "density"), key("leapfrog", "leapfrog steps"), key("drawn", "accepted: a draw"),
        key("rejected", "rejected proposal", "×"), key("diverged", "divergent trajectory")), html("footer", {},
        button("Code", "Show the lines of credibly for this density", () => this.showCode()),
        button("SVG", "Save this picture as SVG", () => save(this.plot.svg, "credibly-hmc", "svg")),
        button("PNG", "Save this picture as PNG", () => save(this.plot.svg, "credibly-hmc", "png")),
      )),
      html("section", { class: "panel" }, html("h2", {}, "Energy error along the trajectory"), this.side, this.numbers,
        html("p", { class: "say" },
          "Leapfrog keeps the energy almost constant. The error decides whether the end of a trajectory is accepted. " +
          "Large steps make the error grow until trajectories diverge; short trajectories make a random walk.")),
    );
  }

  get state() {
    return this.app.state.hmc;
  }

  enter() {
    this.plot = new Plot(this.main, { label: "Density and trajectories of HMC", ratio: 0.72, focusable: false, axes: ["u", "v"] });
    this.errors = new Plot(this.side, { label: "Energy error along the trajectory", axes: ["step", ""], ratio: 0.5, focusable: false, least: 150 });
    this.plot.onredraw = () => this.redraw();
    this.refit();
  }

  leave() {
    cancelAnimationFrame(this.frame);
    for (const plot of [this.plot, this.errors]) plot?.observer.disconnect();
    this.main.replaceChildren();
    this.side.replaceChildren();
    this.asked = null;
  }

  // The length that the engines run: they take at most so many steps.
  get length() {
    const { length, step } = this.state;
    return leaps(length, step) > LEAPS ? Number((LEAPS * step).toPrecision(12)) : length;
  }

  request() {
    const { density, step, chains, seed } = this.state;
    const fit = this.app.scenes.regression.request();
    const request = { type: "hmc", id: fit.id, density, step_size: step, trajectory_length: this.length, chains, seed };
    request.trajectories = TRAJECTORIES;
    return density === "network" ? { ...request, data: fit.data, model: fit.model } : request;
  }

  changed() {
    this.app.changed();
    clearTimeout(this.later);
    this.later = setTimeout(() => this.refit(), 60);
  }

  refit() {
    cancelAnimationFrame(this.frame);
    this.asked = this.request();
    this.say.textContent = DENSITIES[this.state.density].say;
    if (this.asked.data?.x.length === 0) {
      this.app.hint("The regression scene has no points, so its network has no posterior. Add points there, or choose another density.");
      this.app.send({ type: "cancel" });
      return;
    }
    if (!this.app.send(this.asked)) return;
    this.app.hint("");
    Object.assign(this, { surface: null, queue: [], ended: [], finished: null, current: null, shown: 0 });
    this.node.dataset.stage = "waiting";
    this.frame = requestAnimationFrame((now) => this.tick(now));
  }

  receive(message) {
    if (message.id !== this.asked?.id) return;
    if (message.type === "error") this.app.hint(message.message);
    if (message.type === "surface") {
      this.surface = message;
      this.plot.show([message.x[0], message.x[1], message.y[0], message.y[1]]);
      this.redraw();
    }
    if (message.type === "trajectory") this.queue.push(message);
    if (message.type === "finished") {
      this.finished = message;
      this.node.dataset.stage = "final";
      this.describe();
    }
  }

  // Draws as many leapfrog steps as the speed asks for since the last frame.
  tick(now) {
    const passed = Math.min(100, now - (this.last ?? now));
    this.last = now;
    this.owed = (this.owed ?? 0) + (quiet.matches ? 1e4 : (passed / 1000) * this.state.speed);
    let drew = false;
    while (this.owed >= 1 && (this.current || this.queue.length)) {
      if (!this.current) {
        this.current = this.queue.shift();
        this.step = 0;
      }
      this.step += 1;
      this.owed -= 1;
      drew = true;
      if (this.step >= this.current.path.length) {
        this.ended.push(this.current);
        this.latest = this.current;
        this.current = null;
        this.owed = Math.min(this.owed, quiet.matches ? 1e4 : 40);
      }
    }
    if (!this.queue.length && !this.current) this.owed = 0;
    if (drew) this.animate();
    this.frame = requestAnimationFrame((next) => this.tick(next));
  }

  redraw() {
    if (!this.surface) return;
    const { x, y, log_density: values } = this.surface;
    this.plot.image(x, y, values, levels(values, this.asked.density === "network" ? 2 : 0.5));
    this.animate();
  }

  animate() {
    const { plot } = this;
    plot.clear("lines", "points", "over");
    for (const one of this.ended) this.drawEnd(one);
    const one = this.current ?? this.latest;
    if (one) {
      const until = this.current ? this.step : one.path.length;
      const path = one.path.slice(0, until);
      const xs = path.map((p) => p[0]);
      const ys = path.map((p) => p[1]);
      plot.line("lines", xs, ys, { class: one.divergent ? "path divergent" : "path" });
      for (const [px, py] of path) make("circle", { cx: plot.x(px), cy: plot.y(py), r: 2, class: "leap" }, plot.layers.lines);
      const [hx, hy] = path.at(-1);
      make("circle", { cx: plot.x(hx), cy: plot.y(hy), r: 5, class: "head" }, plot.layers.over);
      this.drawErrors(one, until);
    }
    this.describe();
  }

  drawEnd({ path, accepted, divergent }) {
    const at = accepted ? path.at(-1) : path[0];
    const { plot } = this;
    if (accepted) make("circle", { cx: plot.x(at[0]), cy: plot.y(at[1]), r: 3, class: "draw" }, plot.layers.points);
    else {
      const [ex, ey] = path.at(-1).map((v, i) => (i ? plot.y(v) : plot.x(v)));
      const d = `M${ex - 3.5} ${ey - 3.5}l7 7m0 -7l-7 7`;
      if (Math.abs(ex) < 1e5 && Math.abs(ey) < 1e5) make("path", { d, class: divergent ? "reject divergent" : "reject" }, plot.layers.points);
    }
  }

  drawErrors(one, until) {
    const errors = one.energy_error;
    const most = Math.max(0.1, ...errors.map((e) => Math.min(50, Math.abs(e ?? 50))));
    this.errors.show([0, Math.max(1, errors.length - 1), -1.15 * most, 1.15 * most]);
    this.errors.clear();
    const xs = errors.slice(0, until).map((_, i) => i);
    this.errors.line("lines", [0, errors.length - 1], [0, 0], { class: "limit" });
    this.errors.line("lines", xs, errors.slice(0, until), { class: one.divergent ? "path divergent" : "path" });
  }

  describe() {
    const { ended, finished } = this;
    const mean = ended.length ? ended.reduce((sum, one) => sum + (one.acceptance ?? 0), 0) / ended.length : null;
    const last = ended.at(-1);
    const { step, length } = this.state;
    const cut = this.length < length ? ` (cut from ${leaps(length, step)})` : "";
    const rows = [
      ["trajectories", `${ended.length} of ${TRAJECTORIES * this.state.chains}`, "count"],
      ["leapfrog steps each", `${leaps(this.length, step)}${cut}`, "steps"],
      ["energy error, last", show(last?.energy_error.at(-1)), "error"],
      ["acceptance", show(mean), "acceptance"],
      ["divergences", String(ended.filter((one) => one.divergent).length), "divergences"],
    ];
    const all = finished && [
      ["acceptance", show(finished.acceptance), "all-acceptance"],
      ["divergences", show(finished.divergences), "all-divergences"],
      ["effective draws", show(finished.ess), "ess"],
      ["gradients per effective draw", show(finished.ess === null ? null : finished.gradients / finished.ess), "cost"],
      ["R̂", show(finished.rhat), "rhat"],
    ];
    const list = (entries) => html("dl", { class: "numbers wide" },
      ...entries.map(([name, value, key]) => html("div", {}, html("dt", {}, name), html("dd", { "data-value": key }, value))));
    const nodes = [html("h3", {}, "Shown so far"), list(rows)];
    if (all) nodes.push(html("h3", {}, `All ${TRAJECTORIES * this.asked.chains} trajectories`), list(all));
    this.numbers.replaceChildren(...nodes);
  }

  showCode() {
    const { density, step, chains, seed } = this.state;
    const settings = `chains=${chains}, draws=${TRAJECTORIES}, warmup=0, step_size=${step}, trajectory_length=${this.length}`;
    if (density === "network") {
      const request = { ...this.app.scenes.regression.request(), scene: "regression" };
      this.app.showCode([...problemLines(request), `posterior = cr.HMC(${settings}, init="ensemble").fit(problem, seed=${seed})`,
        "print(posterior.diagnostics())", "# The page shows the plane through three MAP fits; these chains move in all directions."].join("\n"), "The same density and settings in Python");
      return;
    }
    const formula = {
      banana: "-0.5 * w[0]**2 - 2 * (w[1] - 0.5 * w[0] ** 2 + 1) ** 2",
      funnel: "-(w[1] ** 2) / 4.5 - w[0] ** 2 / (2 * torch.exp(w[1])) - 0.5 * w[1]",
      modes: "torch.logaddexp(*(-((w[0] - m) ** 2 + w[1] ** 2) / 0.72 for m in (-2.0, 2.0)))",
    }[density];
    this.app.showCode([
      "import torch, credibly as cr",
      `density = cr.Density(lambda w: ${formula}, dim=2)`,
      `posterior = cr.HMC(${settings}, mass="identity").fit(density, seed=${seed})`,
      'print(posterior.statistics["acceptance"].mean(), posterior.diagnostics())',
    ].join("\n"), "The same density and settings in Python");
  }

  again() {
    this.state.seed = nextSeed(this.state.seed);
    this.changed();
  }

  set(key, value) {
    this.state[key] = typeof value === "number" ? round(value) : value;
    if (key === "density") {
      const { step, length } = DENSITIES[value];
      Object.assign(this.state, { step, length });
      this.app.controls.sync();
    }
    this.changed();
  }
}
