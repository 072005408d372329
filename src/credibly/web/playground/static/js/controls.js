// The controls beside a scene: presets, sliders and choices, built from short descriptions.

import { LIMITS, nextSeed, PANELS } from "./limits.js";
import { html, show } from "./plot.js";
import { PRESETS } from "./presets.js";

const slider = (key, label, limits, more = {}) => ({ kind: "slider", key, label, ...limits, ...more });
const choice = (key, label, { options }, more = {}) => ({ kind: "choice", key, label, options, ...more });
const { model: M, hmc: H, vi: V, classification: C } = LIMITS;

const MODEL = [
  slider("prior", "Prior scale", M.prior, { hint: "Standard deviation of the weights, times the root of the fan-in." }),
  slider("noise", "Noise", M.noise, { only: "regression", hint: "Standard deviation of y around the function." }),
  { kind: "check", key: "predicted", label: "Noise predicted by the network", only: "regression" },
  slider("likelihood", "Likelihood temperature", M.likelihood, { hint: "Below 1 the data count for more rows than there are." }),
  slider("posterior", "Posterior temperature", M.posterior, { hint: "Below 1: a cold posterior, sharper than Bayes." }),
  slider("width", "Width", M.width),
  slider("depth", "Hidden layers", M.depth),
  choice("activation", "Activation", M.activation),
  slider("rate", "Dropout rate", M.rate, { method: "dropout" }),
  slider("chains", "Chains of HMC", M.chains, { hint: "SGHMC runs twice as many." }),
];

const HMC = [
  choice("density", "Density", H.density),
  slider("step", "Step size", H.step, { hint: "Of the leapfrog integrator." }),
  slider("length", "Trajectory length", H.length, { hint: "Step size times number of steps." }),
  slider("chains", "Chains", H.chains),
  slider("speed", "Leapfrog steps per second", H.speed, { still: true }),
];

const VI = [
  choice("family", "Family of q", V.family),
  slider("points", "Data points", V.points),
  slider("noise", "Noise", V.noise),
  slider("prior", "Prior scale", V.prior),
];

export class Controls {
  constructor(app, node) {
    this.app = app;
    this.node = node;
    this.fields = [];
  }

  build() {
    const { scene } = this.app.state;
    this.fields = [];
    this.node.replaceChildren();
    if (scene === "hmc" || scene === "vi") {
      const target = this.app.state[scene];
      this.group("Settings", (scene === "hmc" ? HMC : VI).map((one) => this.field(one, target, (key, value) => this.app.scene.set(key, value))));
      this.node.append(html("button", { type: "button", onclick: () => this.app.scene.again() }, "Another seed"));
      return;
    }
    this.dataGroup(scene);
    const { model } = this.app.state;
    const set = (key, value) => {
      model[key] = value;
      this.app.scene.changed();
    };
    const known = MODEL.filter((one) => (!one.only || one.only === scene) && (!one.method || this.app.methods.includes(one.method)));
    this.group("Model", known.map((one) => this.field(one, model, set)));
    const seed = () => {
      model.seed = nextSeed(model.seed);
      this.app.scene.changed();
    };
    this.node.append(html("button", { type: "button", onclick: seed }, "Another seed"));
    this.sync();
  }

  group(title, nodes) {
    this.node.append(html("fieldset", {}, html("legend", {}, title), ...nodes));
  }

  dataGroup(scene) {
    const { state } = this.app;
    const own = state[scene];
    const buttons = html("div", { class: "presets" });
    for (const [name, one] of Object.entries(PRESETS[scene])) {
      const press = () => {
        own.preset = name;
        own.points = one.points();
        own.probe = [...one.probe];
        if (scene === "regression") state.model.predicted = Boolean(one.predicted);
        else own.far = one.far ?? 1;
        this.app.scene.changed();
        this.sync();
      };
      buttons.append(html("button", { type: "button", "data-preset": name, onclick: press }, one.label));
    }
    this.say = html("p", { class: "say" });
    const eraser = html("button", { type: "button", "aria-pressed": String(this.app.scene.eraser) }, "Erase");
    eraser.addEventListener("click", () => {
      this.app.scene.eraser = !this.app.scene.eraser;
      eraser.setAttribute("aria-pressed", String(this.app.scene.eraser));
    });
    const clear = () => {
      own.points = [];
      this.app.said = "";
      this.app.scene.edited();
    };
    const file = html("input", { type: "file", accept: ".csv,.tsv,.txt,text/csv", hidden: true });
    file.addEventListener("change", () => {
      this.app.readFile(file.files[0]);
      // Otherwise the same file, corrected, could not be chosen again.
      file.value = "";
    });
    const tools = html("div", { class: "presets" }, eraser, html("button", { type: "button", onclick: clear }, "Clear"),
      html("button", { type: "button", onclick: () => file.click() }, "Open CSV"), file);
    const nodes = [buttons, this.say, tools];
    if (scene === "classification") nodes.push(...this.planeFields(own));
    else nodes.push(this.field({ kind: "check", key: "functions", label: "Sampled functions" }, own, (key, value) => {
      own[key] = value;
      this.app.changed();
      for (const panel of this.app.scene.panels) this.app.scene.draw(panel);
    }));
    const panels = (key, value) => this.app.scene.setCount(value);
    const count = { get count() { return own.panels.length; } };
    nodes.push(this.field(slider("count", "Panels", PANELS), count, panels));
    this.group("Data", nodes);
  }

  planeFields(own) {
    const redraw = (key, value) => {
      own[key] = value;
      this.app.changed();
      for (const panel of this.app.scene.panels) this.app.scene.draw(panel);
    };
    const zoom = (key, value) => {
      own[key] = value;
      this.app.scene.changed();
    };
    const labels = (key, value) => (this.app.scene.label = Number(value));
    return [
      this.field(choice("label", "Add points of class", { options: { 0: "circle", 1: "square" } }), this.app.scene, labels),
      this.field(choice("map", "Show", C.map), own, redraw),
      this.field(slider("far", "Zoom out", C.far, { unit: "×", hint: "What does a model predict far from all data?" }), own, zoom),
    ];
  }

  field(one, target, set) {
    const id = `field-${one.key}`;
    const field = { ...one, target };
    this.fields.push(field);
    if (one.kind === "check") {
      field.input = html("input", { type: "checkbox", id, "data-key": one.key });
      field.input.addEventListener("change", () => set(one.key, field.input.checked));
      field.sync = () => (field.input.checked = target[one.key]);
      field.sync();
      return html("label", { class: "check" }, field.input, one.label);
    }
    if (one.kind === "choice") {
      field.input = html("select", { id, "data-key": one.key });
      for (const [value, label] of Object.entries(one.options)) field.input.append(html("option", { value }, label));
      field.input.addEventListener("change", () => set(one.key, field.input.value));
      field.sync = () => (field.input.value = String(target[one.key]));
      field.sync();
      return html("label", { class: "field" }, html("span", {}, one.label), field.input);
    }
    return this.slider(field, one, target, set, id);
  }

  slider(field, one, target, set, id) {
    const { low, high, unit = "" } = one;
    const said = (value) => show(value) + unit;
    const to = one.log ? (v) => (100 * Math.log(v / low)) / Math.log(high / low) : (v) => v;
    const from = one.log ? (p) => Number((low * (high / low) ** (p / 100)).toPrecision(2)) : Number;
    const limits = one.log ? { min: "0", max: "100", step: "1" } : { min: String(low), max: String(high), step: String(one.step) };
    field.input = html("input", { type: "range", id, "data-key": one.key, ...limits });
    const output = html("output", { for: id });
    field.input.addEventListener("input", () => {
      const value = from(field.input.value);
      output.textContent = said(value);
      if (value !== target[one.key]) set(one.key, value);
    });
    field.sync = () => {
      field.input.value = to(target[one.key]);
      output.textContent = said(target[one.key]);
      field.input.setAttribute("aria-valuetext", said(target[one.key]));
    };
    field.sync();
    return html("label", { class: "field", title: one.hint ?? "" }, html("span", {}, one.label), output, field.input);
  }

  // Shows the state as it is: after a preset, a link or an edit.
  sync() {
    for (const field of this.fields) field.sync();
    const { scene } = this.app.state;
    const own = this.app.state[scene];
    for (const button of this.node.querySelectorAll("[data-preset]")) {
      button.setAttribute("aria-pressed", String(button.dataset.preset === own.preset));
    }
    if (this.say) this.say.textContent = PRESETS[scene]?.[own.preset]?.say ?? this.app.said ?? "";
    const noise = this.fields.find((field) => field.key === "noise" && field.target === this.app.state.model);
    if (noise) noise.input.disabled = this.app.state.model.predicted;
  }
}
