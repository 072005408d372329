// Pictures of a prediction in SVG, from points that the server computed.

import { draw, make, short } from "./shared.js";

// Narrow screens get a narrower picture, so that its text stays readable.
const WIDTH = Math.max(340, Math.min(640, document.documentElement.clientWidth - 40));
const HEIGHT = 240;
const EDGE = 24;

/** Return about five round numbers between two ends. */
function ticks(low, high) {
  const raw = (high - low) / 5;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((one) => one * power).find((one) => one >= raw);
  const found = [];
  for (let k = Math.ceil(low / step); k * step <= high && found.length < 12; k += 1) found.push(k * step || 0);
  return found;
}

function key(...entries) {
  return make("p", { class: "key" }, ...entries.map(([kind, text]) => make("span", {}, make("i", { class: kind }), text)));
}

/** The distribution of a number with its intervals: a density, probabilities of counts, or a survival curve. */
export function distribution(found, one, curve) {
  const end = found.curves.length > 1 ? `_${curve.target}` : "";
  const percent = Number((100 * found.levels[0]).toPrecision(10));
  const value = (name) => (typeof one[name + end] === "number" ? one[name + end] : null);
  const [lower, upper] = [value(`lower_${percent}`), value(`upper_${percent}`)];
  const bayes = [value(`bayes_lower_${percent}`), value(`bayes_upper_${percent}`)];
  const shown = [curve.x[0], curve.x.at(-1), lower, upper].filter((x) => x !== null);
  const [low, high] = [Math.min(...shown), Math.max(...shown)];
  const top = Math.max(...curve.y) || 1;
  const x = (v) => EDGE + ((v - low) / (high - low || 1)) * (WIDTH - 2 * EDGE);
  const y = (v) => HEIGHT - 40 - (v / top) * (HEIGHT - 60);
  const names = { density: "density", probability: "probability", survival: "probability of survival" };
  const picture = draw("svg", {
    viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", class: "distribution",
    "aria-label": `${names[curve.kind]} of ${curve.target}, ${percent} % between ${short(lower)} and ${short(upper)}`,
  });
  const points = curve.x.map((v, i) => [x(v), y(curve.y[i])]);
  const path = (some) => some.map(([a, b]) => `${a.toFixed(2)},${b.toFixed(2)}`).join(" ");
  if (curve.kind === "probability") {
    const wide = Math.max(1, 0.8 * (WIDTH - 2 * EDGE) / (curve.x.length + 1));
    curve.x.forEach((v, i) => {
      const inside = lower !== null && v >= lower && v <= upper;
      picture.append(draw("rect", {
        class: inside ? "bar in" : "bar", x: x(v) - wide / 2, y: points[i][1], width: wide, height: y(0) - points[i][1],
      }));
    });
  } else {
    if (curve.kind === "density" && lower !== null && upper !== null) {
      const inside = points.filter((_, i) => curve.x[i] >= lower && curve.x[i] <= upper);
      const at = (v) => interpolate(curve, v);
      const outline = [[x(lower), y(0)], [x(lower), y(at(lower))], ...inside, [x(upper), y(at(upper))], [x(upper), y(0)]];
      picture.append(draw("polygon", { class: "area", points: path(outline) }));
    }
    picture.append(draw("polyline", { class: "curve", points: path(points) }));
  }
  picture.append(draw("line", { class: "axis", x1: EDGE, x2: WIDTH - EDGE, y1: y(0), y2: y(0) }));
  for (const tick of ticks(low, high)) {
    picture.append(draw("line", { class: "axis", x1: x(tick), x2: x(tick), y1: y(0), y2: y(0) + 5 }));
    picture.append(draw("text", { class: "quiet", x: x(tick), y: y(0) + 20, "text-anchor": "middle" }, short(tick)));
  }
  const middle = found.task === "survival" ? value("median") : value("mean");
  if (middle !== null && middle >= low && middle <= high) {
    picture.append(draw("line", { class: "mean", x1: x(middle), x2: x(middle), y1: y(0), y2: 14 }));
  }
  const both = bayes[0] !== null && bayes[1] !== null;
  if (both) {
    const clip = (v) => x(Math.min(high, Math.max(low, v)));
    picture.append(draw("line", { class: "bayes", x1: clip(bayes[0]), x2: clip(bayes[1]), y1: y(0) - 3, y2: y(0) - 3 }));
  }
  const promise = both ? `${percent} % interval with coverage guarantee` : `${percent} % interval`;
  const rest = both ? [["bayes", `${percent} % interval of the posterior`]] : [];
  return [picture, key([curve.kind === "probability" ? "in" : "area", promise], ...rest)];
}

function interpolate(curve, v) {
  const next = curve.x.findIndex((one) => one >= v);
  if (next < 0) return 0;
  if (next === 0) return curve.x[0] === v ? curve.y[0] : 0;
  const part = (v - curve.x[next - 1]) / (curve.x[next] - curve.x[next - 1]);
  return curve.y[next - 1] + part * (curve.y[next] - curve.y[next - 1]);
}

/** The probabilities of classes; those of the prediction set in a stronger colour. */
export function classBars(found, one) {
  const percent = Number((100 * found.levels[0]).toPrecision(10));
  const promised = one[`set_${percent}`];
  const members = new Set((promised ?? one.prediction).split(" | "));
  const order = [...found.classes].sort((a, b) => one[`p_${b}`] - one[`p_${a}`]).slice(0, 12);
  const high = 34;
  const picture = draw("svg", {
    viewBox: `0 0 ${WIDTH} ${high * order.length + 8}`, role: "img", class: "distribution",
    "aria-label": `probabilities of ${order.length} classes`,
  });
  order.forEach((name, i) => {
    const p = one[`p_${name}`];
    const wide = Math.max(1, p * (WIDTH - 2 * EDGE - 60));
    picture.append(draw("text", { x: EDGE, y: i * high + 14 }, name.length > 60 ? `${name.slice(0, 57)}…` : name));
    picture.append(draw("rect", { class: members.has(name) ? "bar in" : "bar", x: EDGE, y: i * high + 19, width: wide, height: 10 }));
    picture.append(draw("text", { class: "quiet", x: EDGE + wide + 6, y: i * high + 28 }, short(p)));
  });
  const text = promised === undefined ? "most probable class" : `in the ${percent} % prediction set`;
  return [picture, key(["in", text])];
}

// A strip's bar, with room on both sides for the dot of a value beyond all training rows.
const [START, LONG] = [14, 272];

/** A value among the quantiles of the training rows: 1 to 99 %, 25 to 75 %, and where it lies. */
export function inputStrip(input, column) {
  const picture = draw("svg", { viewBox: "0 0 300 18", role: "img", "aria-label": input.why || "usual" });
  const kind = input.unusual ? "dot unusual" : "dot";
  if (column.kind === "categorical") {
    const wide = LONG * (input.fraction ?? 0);
    picture.append(draw("rect", { class: "track", x: START, y: 6, width: LONG, height: 6 }));
    picture.append(draw("rect", { class: "box", x: START, y: 6, width: Math.max(2, wide), height: 6 }));
    return picture;
  }
  if (input.position === null) return picture;
  // Positions are ranks, so that every strip has the same scale whatever the units.
  const x = (rank) => START + LONG * rank;
  picture.append(draw("rect", { class: "track", x: x(0), y: 6, width: LONG, height: 6 }));
  picture.append(draw("rect", { class: "box", x: x(0.25), y: 6, width: LONG / 2, height: 6 }));
  const outside = input.unusual && (input.position <= 0 || input.position >= 1) ? (input.position <= 0 ? -6 : 6) : 0;
  picture.append(draw("circle", { class: kind, cx: x(input.position) + outside, cy: 9, r: 5 }));
  return picture;
}
