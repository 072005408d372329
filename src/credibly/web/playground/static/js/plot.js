// A plot drawn by hand in SVG: axes, layers, and the small vocabulary of shapes that the scenes share.

const NS = "http://www.w3.org/2000/svg";

export function make(name, attributes = {}, parent = null) {
  const node = document.createElementNS(NS, name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  parent?.append(node);
  return node;
}

export function html(name, attributes = {}, ...children) {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (key in node && typeof value !== "string") node[key] = value;
    else node.setAttribute(key, value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

export function linear(low, high, from, to) {
  const slope = (to - from) / (high - low);
  const scale = (value) => from + (value - low) * slope;
  scale.invert = (pixel) => low + (pixel - from) / slope;
  return scale;
}

export function ticks(low, high, count, least = 0) {
  const rough = Math.max(least, (high - low) / count);
  const power = 10 ** Math.floor(Math.log10(rough));
  // Neighbouring steps differ at most by a factor of 2, so that no axis ends up with a single tick.
  const step = [1, 2, 2.5, 5, 10].map((m) => m * power).find((s) => s >= rough * (1 - 1e-9));
  const found = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + 1e-9 * step; i++) found.push(i * step);
  return found;
}

// A number for display: three significant digits, no exponent where it can be avoided, and rounding errors as 0.
export function show(value, digits = 3) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  if (Math.abs(value) < 1e-9) return "0";
  if (Math.abs(value) >= 1e5 || Math.abs(value) < 1e-3) return value.toExponential(1).replaceAll("-", "−");
  return String(Number(value.toPrecision(digits))).replace("-", "−");
}

const LAYERS = ["image", "bands", "lines", "points", "over"];

export class Plot {
  // `ratio` is height over width. `onredraw` is called whenever the plot has a new size or window.
  constructor(holder, { label, ratio = 0.62, focusable = true, least = 180, axes = ["", ""] }) {
    this.holder = holder;
    this.ratio = ratio;
    this.least = least;
    this.names = axes;
    this.window = [-1, 1, -1, 1];
    this.margin = { left: 36, right: 10, top: 10, bottom: axes[0] ? 40 : 24 };
    this.svg = make("svg", { class: "plot", role: focusable ? "application" : "img", "aria-label": label });
    if (focusable) this.svg.setAttribute("tabindex", "0");
    holder.append(this.svg);
    this.clip = `clip-${Math.random().toString(36).slice(2)}`;
    this.clipRect = make("rect", {}, make("clipPath", { id: this.clip }, make("defs", {}, this.svg)));
    this.back = make("rect", { class: "paper" }, this.svg);
    this.layers = {};
    for (const name of LAYERS) {
      this.layers[name] = make("g", { class: name, "clip-path": `url(#${this.clip})` }, this.svg);
      if (name === "image") this.axes = make("g", { class: "axes" }, this.svg);
    }
    this.onredraw = () => {};
    this.observer = new ResizeObserver(() => this.resize());
    this.observer.observe(holder);
    this.resize();
  }

  resize() {
    const width = Math.max(120, Math.floor(this.holder.clientWidth));
    const height = Math.max(this.least, Math.round(width * this.ratio));
    if (width === this.width && height === this.height) return;
    Object.assign(this, { width, height });
    this.svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    this.svg.setAttribute("width", width);
    this.svg.setAttribute("height", height);
    this.frame();
  }

  show(window) {
    if (window.every((value, i) => value === this.window[i])) return;
    this.window = window;
    this.frame();
  }

  frame() {
    const { left, right, top, bottom } = this.margin;
    const [x0, x1, y0, y1] = this.window;
    const box = { x: left, y: top, width: this.width - left - right, height: this.height - top - bottom };
    this.box = box;
    this.x = linear(x0, x1, left, this.width - right);
    this.y = linear(y0, y1, this.height - bottom, top);
    for (const rect of [this.back, this.clipRect]) {
      for (const [key, value] of Object.entries(box)) rect.setAttribute(key, Math.max(0, value));
    }
    this.axes.replaceChildren();
    for (const value of ticks(x0, x1, Math.max(4, box.width / 70), this.names[0] === "step" ? 1 : 0)) {
      const at = this.x(value);
      make("line", { class: "grid", x1: at, x2: at, y1: top, y2: top + box.height }, this.axes);
      make("text", { x: at, y: top + box.height + 16, "text-anchor": "middle" }, this.axes).textContent = show(value);
    }
    for (const value of ticks(y0, y1, Math.max(4, box.height / 45))) {
      const at = this.y(value);
      make("line", { class: "grid", x1: left, x2: left + box.width, y1: at, y2: at }, this.axes);
      make("text", { x: left - 6, y: at + 4, "text-anchor": "end" }, this.axes).textContent = show(value);
    }
    const name = (text, at) => (make("text", { class: "axis-label", ...at }, this.axes).textContent = text);
    name(this.names[0], { x: left + box.width / 2, y: this.height - 6, "text-anchor": "middle" });
    name(this.names[1], { x: left + 6, y: top + 13 });
    this.onredraw();
  }

  clear(...names) {
    for (const name of names.length ? names : LAYERS) this.layers[name].replaceChildren();
  }

  // The position of a pointer event in the units of the data, and in pixels of the plot.
  at(event) {
    const bounds = this.svg.getBoundingClientRect();
    const px = ((event.clientX - bounds.left) / bounds.width) * this.width;
    const py = ((event.clientY - bounds.top) / bounds.height) * this.height;
    return { x: this.x.invert(px), y: this.y.invert(py), px, py };
  }

  inside({ px, py }) {
    const { x, y, width, height } = this.box;
    return px >= x && px <= x + width && py >= y && py <= y + height;
  }

  line(layer, xs, ys, attributes) {
    let path = "";
    let pen = "M";
    for (let i = 0; i < xs.length; i++) {
      if (ys[i] === null || xs[i] === null) pen = "M";
      else {
        path += `${pen}${this.x(xs[i]).toFixed(1)} ${this.limit(ys[i])}`;
        pen = "L";
      }
    }
    return make("path", { fill: "none", d: path, ...attributes }, this.layers[layer]);
  }

  area(layer, xs, low, high, attributes) {
    const there = xs.map((x, i) => `${this.x(x).toFixed(1)} ${this.limit(high[i] ?? 0)}`);
    const back = xs.map((x, i) => `${this.x(x).toFixed(1)} ${this.limit(low[i] ?? 0)}`).reverse();
    return make("path", { d: `M${there.join("L")}L${back.join("L")}Z`, ...attributes }, this.layers[layer]);
  }

  // Far values would overflow the renderer: they are cut well outside the frame.
  limit(y) {
    return Math.max(-2 * this.height, Math.min(3 * this.height, this.y(y))).toFixed(1);
  }

  // A map of values on a grid, x and y as [from, to, count], row by row from the smallest y. Between the grid's points
  // values are interpolated, so that levels of colour have smooth edges; `colour` turns a value into [r, g, b].
  image(x, y, values, colour, refine = 4) {
    const [columns, rows] = [(x[2] - 1) * refine + 1, (y[2] - 1) * refine + 1];
    const canvas = document.createElement("canvas");
    canvas.width = columns;
    canvas.height = rows;
    const context = canvas.getContext("2d");
    const pixels = context.createImageData(columns, rows);
    const value = (column, row) => values[row * x[2] + column] ?? -Infinity;
    for (let row = 0; row < rows; row++) {
      const below = Math.min(Math.floor(row / refine), y[2] - 2);
      const v = row / refine - below;
      for (let column = 0; column < columns; column++) {
        const left = Math.min(Math.floor(column / refine), x[2] - 2);
        const u = column / refine - left;
        const low = (1 - u) * value(left, below) + u * value(left + 1, below);
        const high = (1 - u) * value(left, below + 1) + u * value(left + 1, below + 1);
        pixels.data.set([...colour((1 - v) * low + v * high), 255], 4 * ((rows - 1 - row) * columns + column));
      }
    }
    context.putImageData(pixels, 0, 0);
    const box = { x: this.x(x[0]), y: this.y(y[1]), width: this.x(x[1]) - this.x(x[0]), height: this.y(y[0]) - this.y(y[1]) };
    this.layers.image.replaceChildren();
    this.svg.classList.add("imaged");
    make("image", { ...box, href: canvas.toDataURL(), preserveAspectRatio: "none" }, this.layers.image);
  }
}

// Ellipse of a Gaussian: the points at `size` standard deviations.
export function ellipse(mean, covariance, size, count = 72) {
  const [[a, b], [, d]] = covariance;
  const root = Math.sqrt(Math.max(a, 1e-300));
  const low = b / root;
  const diagonal = Math.sqrt(Math.max(d - low * low, 0));
  const points = Array.from({ length: count + 1 }, (_, i) => {
    const [u, v] = [Math.cos((2 * Math.PI * i) / count), Math.sin((2 * Math.PI * i) / count)];
    return [mean[0] + size * root * u, mean[1] + size * (low * u + diagonal * v)];
  });
  return [points.map((p) => p[0]), points.map((p) => p[1])];
}

// The colours of the page as [r, g, b], read from its style, so that images follow light and dark.
export function colours(...names) {
  const style = getComputedStyle(document.documentElement);
  return names.map((name) => {
    const hex = style.getPropertyValue(`--${name}`).trim();
    return [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16));
  });
}

// Colours of a log density: bands from its highest value down, `width` standard deviations of a Gaussian apart.
export function levels(values, width, bands = 9) {
  const [paper, ink] = colours("paper", "epistemic");
  const most = Math.max(...values.filter((value) => value !== null));
  const table = Array.from({ length: bands + 1 }, (_, i) => mix(paper, ink, 0.8 * (1 - i / bands)));
  const reach = (bands * width) ** 2 / 2;
  return (value) => table[value > most - reach ? Math.floor(Math.sqrt(2 * Math.max(0, most - value)) / width) : bands];
}

export function mix(a, b, t) {
  const share = Math.max(0, Math.min(1, t));
  return a.map((value, i) => Math.round(value + (b[i] - value) * share));
}
