// What the scenes of regression and classification share: panels, requests, probes, and editing the points.

import { panelCode } from "./code.js";
import { options } from "./methods.js";
import { Panel } from "./panel.js";
import { html } from "./plot.js";
import { save } from "./save.js";

// A new request waits for the drafts of the last one, so that dragging a point never starves a panel; but not longer.
const PATIENCE = 600;
const PROBE_EVERY = 50;
// Pixels within which a pointer, or a finger, grabs a point.
const NEAR = 14;
const FINGER = 22;
export const round = (value) => Number(value.toPrecision(4));

export class FitScene {
  constructor(app, name) {
    this.app = app;
    this.name = name;
    this.panels = [];
    this.asked = null;
    this.eraser = false;
    this.probes = new Set();
    this.cursor = null;
    this.node = html("div", { class: "panels" });
  }

  get state() {
    return this.app.state[this.name];
  }

  enter() {
    this.rebuild();
    this.refit();
  }

  leave() {
    clearTimeout(this.later);
    for (const panel of this.panels) panel.plot.observer.disconnect();
    this.panels = [];
    this.asked = null;
  }

  rebuild() {
    for (const panel of this.panels) panel.plot.observer.disconnect();
    this.node.replaceChildren();
    this.node.dataset.count = this.state.panels.length;
    this.panels = this.state.panels.map((method, i) => new Panel(this, i, method, this.app.methods));
    this.node.append(...this.panels.map((panel) => panel.node));
    for (const panel of this.panels) {
      panel.plot.resize();
      this.listen(panel.plot);
    }
    this.reframe();
  }

  choose(index, method) {
    this.state.panels[index] = method;
    this.panels[index].use(method);
    this.changed();
  }

  setCount(count) {
    const { panels } = this.state;
    const others = this.app.methods.filter((name) => !panels.includes(name));
    while (panels.length > count) panels.pop();
    while (panels.length < count) panels.push(others.pop() ?? "hmc");
    this.rebuild();
    this.changed();
  }

  // -- requests ------------------------------------------------------------------------------------------------------
  changed() {
    this.app.changed();
    this.refit();
  }

  request() {
    const { model } = this.app.state;
    return {
      type: "fit",
      id: this.app.nextId(),
      scene: this.name,
      data: this.data(),
      model: {
        hidden: Array(model.depth).fill(model.width),
        activation: model.activation,
        prior_scale: model.prior,
        likelihood_temperature: round(model.likelihood * model.posterior),
        prior_temperature: model.posterior,
        noise: model.predicted && this.name === "regression" ? "predicted" : model.noise,
      },
      panels: this.state.panels.map((method) => ({ method, options: options(method, model) })),
      seed: model.seed,
      grid: this.grid(),
    };
  }

  refit() {
    if (!this.state.points.length) for (const panel of this.panels) panel.empty();
    for (const panel of this.panels) this.draw(panel);
    this.app.hint(this.state.points.length ? "" : "There are no points. Add the first one by clicking into a plot.");
    if (!this.state.points.length) {
      this.app.send({ type: "cancel" });
      this.asked = null;
      return;
    }
    if (this.drafting()) {
      this.dirty = true;
      return;
    }
    this.dirty = false;
    clearTimeout(this.later);
    const request = this.request();
    if (!this.app.send(request)) return;
    this.asked = request;
    this.waitingFor = new Set(this.panels.keys());
    this.sentAt = performance.now();
    for (const panel of this.panels) panel.waiting();
    this.later = setTimeout(() => this.settle(), PATIENCE);
  }

  drafting() {
    return Boolean(this.asked) && this.waitingFor.size > 0 && performance.now() - this.sentAt < PATIENCE;
  }

  settle() {
    if (this.dirty && !this.drafting()) this.refit();
  }

  receive(message) {
    if (message.type === "probe") {
      const panel = this.panels[message.panel];
      if (panel && this.asked) panel.probed(message);
      return;
    }
    if (message.id !== this.asked?.id) return;
    const panel = this.panels[message.panel];
    if (message.type === "error") {
      for (const one of this.panels) one.fail(message.message);
      this.waitingFor.clear();
    } else if (panel && message.type === "failed") panel.fail(message.message);
    else if (panel && message.type === "band") {
      panel.grid = this.asked.grid;
      if (!panel.node.dataset.first || this.waitingFor.has(message.panel)) {
        panel.node.dataset.first = Math.round(performance.now() - this.sentAt);
      }
      panel.receive(message);
      this.probe(null, message.panel);
    }
    this.waitingFor.delete(message.panel);
    if (this.dirty && !this.drafting()) this.refit();
  }

  // Asks for the numbers at a new input, or again for those of one panel.
  probe(x, panel = null) {
    if (x) {
      this.state.probe = x.map(round);
      this.app.changed();
    }
    this.probes.add(panel);
    this.probing ??= setTimeout(() => this.sendProbe(), this.probes.size === 1 && x ? 0 : PROBE_EVERY);
  }

  sendProbe() {
    const [panel, ...others] = this.probes;
    this.probes.clear();
    this.probing = null;
    if (!this.asked) return;
    const request = { type: "probe", id: this.asked.id, x: this.state.probe };
    this.app.send(others.length || panel === null ? request : { ...request, panel });
  }

  // -- points --------------------------------------------------------------------------------------------------------
  nearest(plot, { px, py }, reach = NEAR) {
    let best = -1;
    let least = reach;
    this.state.points.forEach(([x, y], i) => {
      const distance = Math.hypot(plot.x(x) - px, plot.y(y) - py);
      if (distance < least) [best, least] = [i, distance];
    });
    return best;
  }

  add(at) {
    if (this.state.points.length >= this.app.limit) {
      this.app.hint(`At most ${this.app.limit} points.`);
      return;
    }
    this.state.points.push(this.point(at));
    this.edited();
  }

  remove(index) {
    if (index < 0) return;
    this.state.points.splice(index, 1);
    this.edited();
  }

  edited() {
    this.state.preset = "";
    this.app.controls.sync();
    this.changed();
  }

  move(index, at) {
    const [x, y, ...rest] = this.point(at);
    this.state.points[index] = [x, y, ...this.state.points[index].slice(2, 2 + rest.length)];
    this.edited();
  }

  listen(plot) {
    const { svg } = plot;
    let held = -1;
    let tapped = null;
    svg.addEventListener("pointerdown", (event) => {
      const at = plot.at(event);
      tapped = null;
      if (event.button !== 0 || !plot.inside(at)) return;
      svg.focus({ preventScroll: true });
      const touch = event.pointerType === "touch";
      held = this.nearest(plot, at, touch ? FINGER : NEAR);
      if (this.eraser) {
        this.remove(held);
        held = -1;
      } else if (held >= 0) svg.setPointerCapture(event.pointerId);
      // A finger may be about to scroll: it adds a point when it is lifted.
      else if (touch) tapped = at;
      else this.add({ ...at, other: event.shiftKey });
    });
    svg.addEventListener("pointermove", (event) => {
      const at = plot.at(event);
      if (held >= 0) this.move(held, at);
      else if (plot.inside(at)) this.probe(this.probePoint(at));
      svg.style.cursor = this.nearest(plot, at) >= 0 ? "grab" : "crosshair";
    });
    // A finger on a point drags it, elsewhere it scrolls the page.
    svg.addEventListener("touchstart", (event) => {
      if (event.touches.length === 1 && this.nearest(plot, plot.at(event.touches[0]), FINGER) >= 0) event.preventDefault();
    }, { passive: false });
    svg.addEventListener("pointerup", (event) => {
      held = -1;
      const at = plot.at(event);
      if (tapped && Math.hypot(at.px - tapped.px, at.py - tapped.py) < NEAR) this.add(tapped);
      tapped = null;
    });
    svg.addEventListener("pointercancel", () => {
      held = -1;
      tapped = null;
    });
    svg.addEventListener("contextmenu", (event) => {
      event.preventDefault();
      this.remove(this.nearest(plot, plot.at(event)));
    });
    svg.addEventListener("keydown", (event) => this.key(event, plot));
    svg.addEventListener("blur", () => {
      this.cursor = null;
      for (const panel of this.panels) this.draw(panel);
    });
  }

  // Arrows move a cursor, with Shift the nearest point; Enter adds a point, Delete removes the nearest.
  key(event, plot) {
    const [x0, x1, y0, y1] = plot.window;
    const step = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, 1], ArrowDown: [0, -1] }[event.key];
    const act = step || ["Enter", " ", "Delete", "Backspace"].includes(event.key);
    if (!act || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    this.cursor ??= { x: (x0 + x1) / 2, y: (y0 + y1) / 2 };
    const pixels = { px: plot.x(this.cursor.x), py: plot.y(this.cursor.y) };
    const near = this.nearest(plot, pixels, Infinity);
    if (step) {
      const from = event.shiftKey && near >= 0 ? { x: this.state.points[near][0], y: this.state.points[near][1] } : this.cursor;
      const to = { x: from.x + (step[0] * (x1 - x0)) / 60, y: from.y + (step[1] * (y1 - y0)) / 40 };
      this.cursor = { x: Math.min(x1, Math.max(x0, to.x)), y: Math.min(y1, Math.max(y0, to.y)) };
      if (event.shiftKey && near >= 0) this.move(near, this.cursor);
      this.probe(this.probePoint(this.cursor));
    } else if (event.key === "Enter" || event.key === " ") this.add(this.cursor);
    else this.remove(near);
    for (const panel of this.panels) this.draw(panel);
  }

  // -- results -------------------------------------------------------------------------------------------------------
  showCode(index) {
    if (!this.state.points.length) return;
    const request = this.asked ?? this.request();
    this.app.showCode(panelCode(request, index, this.state.probe));
  }

  save(index, kind) {
    const { method, plot } = this.panels[index];
    save(plot.svg, `credibly-${this.name}-${method}`, kind);
  }
}
