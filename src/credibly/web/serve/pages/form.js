// The form of a run: a field per column, and the prediction of the row as a picture. All numbers are the server's.

import { classBars, distribution, inputStrip } from "./pictures.js";
import { make, request, short } from "./shared.js";

const at = (id) => document.getElementById(id);
const DELAY = 250;
const CAPITALS = ["rmse", "mae", "crps", "ece", "hmc", "sghmc", "sgld", "nuts", "map", "mle", "swag", "mclmc", "mile"];
let run = null;
let turn = 0;

async function start() {
  const { runs } = await request("runs");
  at("choice").hidden = runs.length < 2;
  at("run").replaceChildren(...runs.map((one) => make("option", {}, one.name)));
  at("run").addEventListener("change", () => show(at("run").value));
  const wanted = new URLSearchParams(location.search).get("run");
  at("run").value = runs.some((one) => one.name === wanted) ? wanted : runs[0].name;
  await show(at("run").value);
}

async function show(name) {
  run = await request(`runs/${encodeURIComponent(name)}/columns`);
  document.title = at("title").textContent = `Predict ${run.target}`;
  const title = (key) => (CAPITALS.includes(key) ? key.toUpperCase() : key.replaceAll("_", " "));
  const skill = Object.entries(run.metrics).slice(0, 3).map(([key, value]) => `${title(key)} ${short(value)}`);
  at("about").textContent = `Method: ${title(run.method)}, ${short(run.rows)} training rows. Metrics, ${run.metrics_on}: ${skill.join(", ")}.`;
  at("fields").replaceChildren(...run.columns.map(field));
  at("level").closest("label").hidden = run.classes !== null && run.calibration_rows === null;
  typical();
}

function field(column, number) {
  const input = make("input", { id: `field-${number}`, name: column.name });
  const found = make("div", { class: "field" }, make("label", { for: input.id }, make("span", {}, column.name)), input);
  if (column.kind === "categorical") {
    const list = make("datalist", { id: `levels-${number}` }, ...column.levels.map((l) => make("option", { value: l.value })));
    input.setAttribute("list", list.id);
    const some = column.levels.slice(0, 4).map((level) => level.value).join(", ");
    found.append(list, make("small", {}, column.levels.length > 4 ? `${some}, …` : some));
  } else {
    if (column.kind === "numeric") input.setAttribute("inputmode", "decimal");
    found.append(make("small", {}, `training rows: ${short(column.low)} to ${short(column.high)}`));
  }
  return found;
}

function typical() {
  run.columns.forEach((column, number) => { at(`field-${number}`).value = column.example ?? ""; });
  predict();
}

// A decimal number. Number() also reads 0x10, which the server refuses.
const DECIMAL = /^[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?$/i;

/** Return the row in the form: numbers in numeric columns, null for empty fields, and the text of everything else. */
function row() {
  return Object.fromEntries(run.columns.map((column, number) => {
    const text = at(`field-${number}`).value.trim();
    if (text === "") return [column.name, null];
    // The point of a number is decimal here; in text, the server reads it as the run's files were written.
    const value = column.kind === "numeric" && DECIMAL.test(text) ? Number(text) : NaN;
    return [column.name, Number.isFinite(value) ? value : text];
  }));
}

async function predict() {
  const own = ++turn;
  at("result").classList.add("stale");
  const level = at("level").closest("label").hidden ? "" : `?level=${at("level").value}`;
  try {
    const found = await request(`runs/${encodeURIComponent(run.name)}/picture${level}`, {
      method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify([row()]),
    });
    // Responses may arrive out of order: show only the latest.
    if (own === turn) showPrediction(found);
  } catch (error) {
    if (own === turn) showProblem(error);
  }
  if (own === turn) at("result").classList.remove("stale");
}

function showProblem(error) {
  at("problem").hidden = false;
  // The advice for a cell is about JSON and parameters, which a form has none of; its only row needs no number.
  const cell = run?.columns.some((column) => column.name === error.argument);
  const advice = cell ? "Leave the field empty if the value is missing" : error.advice;
  const message = error.message.replace(/^rows\[0\]: /, "");
  at("problem").textContent = advice ? `${message}. ${advice}.` : message;
  run.columns.forEach((column, number) => {
    at(`field-${number}`).parentElement.classList.toggle("wrong", column.name === error.argument);
  });
  for (const id of ["headline", "pictures", "numbers", "ood", "notes", "inputs"]) at(id).replaceChildren();
  at("inputs-title").hidden = at("inputs-key").hidden = true;
}

function showPrediction(found) {
  const one = found.predictions[0];
  at("problem").hidden = true;
  for (const wrong of document.querySelectorAll(".field.wrong")) wrong.classList.remove("wrong");
  at("headline").textContent = headline(found, one);
  const pictures = found.classes ? [classBars(found, one)] : found.curves.map((curve) => distribution(found, one, curve));
  at("pictures").replaceChildren(...pictures.flat());
  const numbers = Object.entries(one).filter(([key]) => !["notes", "ood"].includes(key));
  at("numbers").replaceChildren(...numbers.map(([key, value]) =>
    make("div", {}, make("dt", {}, key), make("dd", { "data-name": key, "data-value": value }, short(value)))));
  at("ood").textContent = one.ood === null ? "" :
    `Model uncertainty is higher than on ${percentBelow(one.ood)} % of rows like the training rows (ood ${short(one.ood)})` +
    (one.ood > 0.99 ? ": out of distribution, so do not rely on this prediction." : ".");
  at("notes").replaceChildren(...one.notes.split("; ").filter(Boolean).map((note) => make("li", {}, note)));
  at("inputs-title").hidden = at("inputs-key").hidden = false;
  at("inputs").replaceChildren(...found.inputs.map((input, number) => inputRow(input, run.columns[number])));
}

// Rounded down: 100 % is said of 1 alone.
function percentBelow(ood) {
  return Math.floor(100 * ood + 1e-9);
}

function headline(found, one) {
  if (found.classes) return `${run.target}: ${one.prediction}, probability ${short(one[`p_${one.prediction}`])}`;
  const percent = Number((100 * found.levels[0]).toPrecision(10));
  return found.curves.map((curve) => {
    const end = found.curves.length > 1 ? `_${curve.target}` : "";
    const middle = found.task === "survival" ? `median ${short(one[`median${end}`])}` : short(one[`mean${end}`]);
    const [low, high] = [one[`lower_${percent}${end}`], one[`upper_${percent}${end}`]];
    return `${curve.target}: ${middle}, ${percent} % between ${short(low)} and ${short(high)}`;
  }).join("; ");
}

function inputRow(input, column) {
  const found = make("div", { class: "input", "data-name": input.name, "data-unusual": input.unusual },
    make("span", {}, `${input.name} = ${short(input.value)}`), inputStrip(input, column));
  if (input.why) found.append(make("span", { class: "why" }, input.why));
  return found;
}

let timer = 0;
at("row").addEventListener("submit", (event) => { event.preventDefault(); clearTimeout(timer); predict(); });
at("row").addEventListener("input", () => { clearTimeout(timer); timer = setTimeout(predict, DELAY); });
at("typical").addEventListener("click", typical);
start().catch((error) => { at("problem").hidden = false; at("problem").textContent = error.message; });
