// Regression: bands split into noise and model uncertainty, sampled functions, the density at the probed input.

import { FitScene, round } from "./fitting.js";
import { make, show } from "./plot.js";

const WINDOW = [-4, 4, -3, 3];
const CELLS = 161;
// Half-width of a central 90 % interval, in standard deviations.
const HALF = 1.645;
// Width of the density at the probed input, as a fraction of the plot's.
const DENSITY = 0.16;

export class Regression extends FitScene {
  constructor(app) {
    super(app, "regression");
    this.ratio = 0.5;
    this.plotLabel =
      "Data and predictions. Click to add a point, drag to move it, right-click to remove it. " +
      "With the keyboard: arrows move a cursor, Enter adds a point, Delete removes the nearest, Shift and arrows move it.";
  }

  data() {
    return { x: this.state.points.map(([x]) => [x]), y: this.state.points.map(([, y]) => y) };
  }

  point({ x, y }) {
    return [round(x), round(y)];
  }

  probePoint({ x }) {
    return [x];
  }

  grid() {
    const [x0, x1] = this.window();
    return { x: [x0, x1, CELLS] };
  }

  // The usual window, or a larger one where the data need it.
  window() {
    const [x0, x1, y0, y1] = WINDOW;
    const xs = this.state.points.map(([x]) => Math.abs(x));
    const ys = this.state.points.map(([, y]) => Math.abs(y));
    const grow = (limit, values) => Math.max(limit, Math.ceil(1.25 * Math.max(0, ...values)));
    const [wide, high] = [grow(x1, xs), grow(y1, ys)];
    return [wide === x1 ? x0 : -wide, wide, high === y1 ? y0 : -high, high];
  }

  reframe() {
    const window = this.window();
    for (const panel of this.panels) panel.plot.show(window);
  }

  changed() {
    this.reframe();
    super.changed();
  }

  draw(panel) {
    const { plot, band } = panel;
    plot.clear();
    if (band && this.state.points.length) {
      const [from, to, count] = panel.grid.x;
      const xs = Array.from({ length: count }, (_, i) => from + ((to - from) * i) / (count - 1));
      const reach = (variance) => band.mean.map((_, i) => HALF * Math.sqrt(variance(i)));
      const model = reach((i) => band.epistemic[i] ?? 0);
      const total = reach((i) => (band.epistemic[i] ?? 0) + (band.aleatoric[i] ?? 0));
      const off = (sign, by) => band.mean.map((m, i) => m + sign * by[i]);
      for (const sign of [-1, 1]) plot.area("bands", xs, off(sign, model), off(sign, total), { class: "aleatoric-band" });
      if (band.draws > 1) {
        plot.area("bands", xs, off(-1, model), off(1, model), { class: "epistemic-band" });
        if (this.state.functions) for (const one of band.functions) plot.line("lines", xs, one, { class: "function" });
      }
      plot.line("lines", xs, band.mean, { class: "mean" });
    }
    this.drawDensity(panel);
    for (const [x, y] of this.state.points) {
      make("circle", { cx: plot.x(x), cy: plot.y(y), r: 3.6, class: "point" }, plot.layers.points);
    }
    if (this.cursor && document.activeElement === plot.svg) {
      const [cx, cy] = [plot.x(this.cursor.x), plot.y(this.cursor.y)];
      make("path", { d: `M${cx - 8} ${cy}H${cx + 8}M${cx} ${cy - 8}V${cy + 8}`, class: "cursor" }, plot.layers.over);
    }
  }

  drawDensity({ plot, found, band }) {
    const [at] = this.state.probe;
    const { y, height } = plot.box;
    make("line", { x1: plot.x(at), x2: plot.x(at), y1: y, y2: y + height, class: "probe" }, plot.layers.over);
    if (!found?.density || !band || !this.state.points.length) return;
    const most = Math.max(...found.density);
    const span = (plot.window[1] - plot.window[0]) * DENSITY;
    // It opens to the side that has room.
    const side = found.x[0] + span > plot.window[1] ? -1 : 1;
    const xs = found.density.map((d) => found.x[0] + (side * span * d) / most);
    const path = plot.line("over", [found.x[0], ...xs, found.x[0]], [found.y[0], ...found.y, found.y.at(-1)], {});
    path.setAttribute("class", "density");
  }

  figures(found) {
    const std = (variance) => (variance === null ? null : Math.sqrt(variance));
    return [
      ["at x", show(found.x[0]), "at"],
      ["mean", show(found.mean), "mean"],
      ["noise (aleatoric) ±", show(std(found.aleatoric)), "aleatoric"],
      ["model (epistemic) ±", show(std(found.epistemic)), "epistemic"],
      ["total ±", show(std(found.total)), "total"],
      ["90 % interval", `${show(found.lower)} to ${show(found.upper)}`, "interval"],
    ];
  }
}
