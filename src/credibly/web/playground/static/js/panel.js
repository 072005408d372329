// One panel: a method, its plot, the progress of its fit, and the numbers at the probed input.

import { CHAINED, METHODS } from "./methods.js";
import { html, make, Plot, show } from "./plot.js";

// R-hat up to which chains count as agreeing.
const AGREE = 1.03;
// Verdicts of converged chains.
const SETTLED = ["Good", "Usable", "Chains agree"];

// The grade of a verdict in a few words. "Not yet" says nothing once a fit has ended: what is missing does.
function grade(verdict) {
  const found = verdict.split(":")[0].toLowerCase();
  if (found !== "not yet") return found;
  const diverged = verdict.match(/[\d,]+ trajector(y|ies) diverged/);
  if (diverged && !verdict.includes("nearly agree")) return `chains agree, but ${diverged[0]}`;
  return /effective draws of/.test(verdict) ? "more draws needed" : found;
}

export class Panel {
  constructor(scene, index, method, known) {
    this.scene = scene;
    this.index = index;
    this.band = null;
    this.found = null;
    this.history = [];
    this.select = html("select", { "aria-label": `Method of panel ${index + 1}`, class: "method" });
    for (const name of known) {
      this.select.append(html("option", { value: name }, METHODS[name].label));
    }
    this.select.addEventListener("change", () => scene.choose(index, this.select.value));
    this.status = html("span", { class: "status", role: "status" });
    this.rhat = make("svg", { class: "spark", width: 64, height: 18, viewBox: "0 0 64 18", "aria-hidden": "true" });
    const progress = html("span", { class: "progress", title: `Over the draws, R̂ falls towards 1; dashed: ${AGREE}` }, this.status, this.rhat);
    this.say = html("p", { class: "say" });
    this.verdict = html("summary", {});
    this.noteText = html("p", {});
    this.note = html("details", { class: "note", hidden: true }, this.verdict, this.noteText);
    this.holder = html("div", { class: "holder" });
    this.numbers = html("dl", { class: "numbers" });
    const button = (label, title, onclick) => html("button", { type: "button", class: "quiet", title, onclick }, label);
    this.node = html(
      "section",
      { class: "panel", "data-panel": String(index) },
      html("header", {}, this.select, progress),
      this.say,
      this.holder,
      this.numbers,
      this.note,
      html(
        "footer",
        {},
        button("Code", "Show the lines of credibly that reproduce these numbers", () => scene.showCode(index)),
        button("SVG", "Save this picture as SVG", () => scene.save(index, "svg")),
        button("PNG", "Save this picture as PNG", () => scene.save(index, "png")),
      ),
    );
    this.plot = new Plot(this.holder, { label: scene.plotLabel, ratio: scene.ratio });
    this.plot.onredraw = () => scene.draw(this);
    this.use(method);
  }

  use(method) {
    this.method = method;
    this.select.value = method;
    this.say.textContent = METHODS[method].say;
    this.node.dataset.method = method;
  }

  // A request is on its way: what is shown belongs to the previous one.
  waiting() {
    this.history = [];
    this.node.dataset.stage = "waiting";
  }

  receive(band) {
    this.band = band;
    this.node.dataset.stage = band.stage;
    this.node.dataset.request = band.id;
    this.notify(`Convergence: ${grade(band.diagnosis ?? "")}`, band.diagnosis);
    if (band.rhat !== null && band.stage !== "draft") this.history.push(band.rhat);
    this.describe();
    this.spark();
    this.scene.draw(this);
  }

  // Without points there is nothing to show.
  empty() {
    Object.assign(this, { band: null, found: null, history: [] });
    this.node.dataset.stage = "empty";
    this.status.textContent = "";
    this.status.classList.remove("settled");
    this.numbers.replaceChildren();
    this.notify("", "");
    this.spark();
  }

  fail(message) {
    this.node.dataset.stage = "failed";
    this.status.textContent = "failed";
    this.notify("What went wrong", message);
    this.note.open = true;
  }

  notify(title, text) {
    this.note.hidden = !text;
    this.verdict.textContent = title;
    this.noteText.textContent = text ?? "";
  }

  describe() {
    const { stage, done, total, rhat, seconds, diagnosis } = this.band;
    const chains = CHAINED.includes(this.method);
    const parts = [];
    if (stage === "draft") parts.push("draft");
    if (stage === "running") parts.push(`${chains ? "iteration" : "step"} ${done} of ${total}`);
    if (stage === "final") parts.push(`done in ${show(seconds, 2)} s`);
    if (chains && rhat !== null && stage !== "draft") parts.push(`R̂ ${show(rhat)}`);
    this.status.textContent = parts.join(" · ");
    // The engine's verdict counts: chains may agree and still have too few effective draws.
    const agree = SETTLED.some((word) => diagnosis?.startsWith(word));
    this.status.classList.toggle("settled", stage === "final" && (!chains || agree));
  }

  // R-hat over the draws so far, on a logarithmic axis from 1 to 3.
  spark() {
    this.rhat.replaceChildren();
    if (this.history.length < 2) return;
    const y = (value) => 16 - 14 * Math.min(1, Math.log(Math.max(1, value)) / Math.log(3));
    const x = (i) => 1 + (62 * i) / (this.history.length - 1);
    make("line", { x1: 0, x2: 64, y1: y(AGREE), y2: y(AGREE), class: "limit" }, this.rhat);
    const points = this.history.map((value, i) => `${x(i).toFixed(1)},${y(value).toFixed(1)}`);
    make("polyline", { points: points.join(" "), class: "trace" }, this.rhat);
  }

  // The decomposition in numbers, at the probed input.
  probed(found) {
    this.found = found;
    const rows = this.scene.figures(found, this.band);
    this.numbers.replaceChildren(
      ...rows.map(([name, value, key]) => html("div", { class: key }, html("dt", {}, name), html("dd", { "data-value": key }, value))),
    );
    this.scene.draw(this);
  }
}
