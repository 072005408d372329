// Classification in the plane: probability, mutual information, and what a model predicts far from its data.

import { FitScene, round } from "./fitting.js";
import { colours, make, mix, show } from "./plot.js";

const WINDOW = [-5, 5, -3.5, 3.5];
const COLUMNS = 56;
const ROWS = 40;
const MAPS = ["probability", "epistemic", "aleatoric"];
const LOG2 = Math.log(2);

export class Classification extends FitScene {
  constructor(app) {
    super(app, "classification");
    this.ratio = 0.7;
    this.label = 0;
    this.plotLabel =
      "Data and predictions in the plane. Click to add a point of the chosen class (Shift for the other), drag to move it, " +
      "right-click to remove it. With the keyboard: arrows move a cursor, Enter adds a point, Delete removes the nearest.";
  }

  data() {
    return { x: this.state.points.map(([x, y]) => [x, y]), y: this.state.points.map(([, , label]) => label) };
  }

  point({ x, y, other }) {
    return [round(x), round(y), other ? 1 - this.label : this.label];
  }

  probePoint({ x, y }) {
    return [x, y];
  }

  window() {
    const { far } = this.state;
    const most = Math.max(1, ...this.state.points.map(([x, y]) => Math.max(Math.abs(x) / WINDOW[1], Math.abs(y) / WINDOW[3])));
    return WINDOW.map((value) => value * Math.max(far, 1.1 * most > 1.1 ? 1.1 * most : 1));
  }

  grid() {
    const [x0, x1, y0, y1] = this.window();
    return { x: [x0, x1, COLUMNS], y: [y0, y1, ROWS] };
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
      const { x, y } = panel.grid;
      const map = MAPS.includes(this.state.map) ? this.state.map : "probability";
      document.body.dataset.map = map;
      const [paper, first, second, model, noise] = colours("paper", "first", "second", "epistemic", "aleatoric");
      const values = map === "probability" ? band.mean : band[map];
      const colour =
        map === "probability"
          ? (p) => (p < 0.5 ? mix(paper, first, 1 - 2 * p) : mix(paper, second, 2 * p - 1))
          : (nats) => mix(paper, map === "epistemic" ? model : noise, nats / LOG2);
      plot.image(x, y, values, colour, 2);
    }
    for (const [px, py, label] of this.state.points) {
      const at = { cx: plot.x(px), cy: plot.y(py) };
      if (label) make("rect", { x: at.cx - 4, y: at.cy - 4, width: 8, height: 8, class: "point second" }, plot.layers.points);
      else make("circle", { ...at, r: 4.4, class: "point first" }, plot.layers.points);
    }
    const [sx, sy] = this.state.probe;
    star(plot, plot.x(sx), plot.y(sy));
    if (this.cursor && document.activeElement === plot.svg) {
      const [cx, cy] = [plot.x(this.cursor.x), plot.y(this.cursor.y)];
      make("path", { d: `M${cx - 8} ${cy}H${cx + 8}M${cx} ${cy - 8}V${cy + 8}`, class: "cursor" }, plot.layers.over);
    }
  }

  figures(found) {
    return [
      ["at", `${show(found.x[0])}, ${show(found.x[1])}`, "at"],
      ["P(square)", show(found.mean), "mean"],
      ["noise (aleatoric), nats", show(found.aleatoric), "aleatoric"],
      ["model (epistemic), nats", show(found.epistemic), "epistemic"],
      ["total entropy, nats", show(found.total), "total"],
    ];
  }
}

function star(plot, cx, cy) {
  const points = Array.from({ length: 10 }, (_, i) => {
    const [angle, radius] = [(Math.PI * i) / 5 - Math.PI / 2, i % 2 ? 3.6 : 8.5];
    return `${(cx + radius * Math.cos(angle)).toFixed(1)},${(cy + radius * Math.sin(angle)).toFixed(1)}`;
  });
  make("polygon", { points: points.join(" "), class: "star" }, plot.layers.over);
}
