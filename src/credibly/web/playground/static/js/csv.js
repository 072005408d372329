// A CSV file as points: one or two input columns and a target, standardised so that the sliders keep their meaning.

const MAX_BYTES = 2e6;

export async function readPoints(file, scene, limit) {
  if (file.size > MAX_BYTES) throw new Error(`${file.name} has more than 2 MB; the playground is for small data.`);
  const lines = (await file.text()).split(/\r?\n/).filter((line) => line.trim());
  const separator = [";", "\t", ","].find((s) => lines[0]?.includes(s)) ?? ",";
  // Where semicolons separate cells, commas are decimal marks.
  const number = (cell) => (cell === "" ? NaN : Number(separator === ";" ? cell.replace(",", ".") : cell));
  const cells = lines.map((line) => line.split(separator).map((cell) => cell.trim().replace(/^"|"$/g, "")));
  const head = cells[0]?.some((cell) => cell !== "" && Number.isNaN(number(cell))) ? cells.shift() : null;
  const columns = scene === "regression" ? 2 : 3;
  const used = cells.map((row) => row.slice(0, columns));
  const rows = used.filter((row) => row.length === columns && row.every((cell) => cell !== ""));
  if (!rows.length) throw new Error(`${file.name}: needs ${columns} columns, ${columns - 1} of inputs and then the target.`);
  const numbers = rows.map((row) => row.map(number));
  const inputs = columns - 1;
  const bad = numbers.findIndex((row) => row.slice(0, inputs).some((v) => !Number.isFinite(v)));
  if (bad >= 0) throw new Error(`${file.name}: row ${bad + 1} has an input that is not a number.`);
  const names = head ?? Array.from({ length: columns }, (_, i) => `column ${i + 1}`);
  const step = Math.max(1, Math.ceil(rows.length / limit));
  const kept = numbers.map((row, i) => [row, rows[i]]).filter((_, i) => i % step === 0);
  const told = [];
  const standardised = Array.from({ length: inputs }, (_, c) => scaled(kept.map(([row]) => row[c]), names[c], told));
  let targets;
  if (scene === "regression") {
    if (kept.some(([row]) => !Number.isFinite(row[1]))) throw new Error(`${file.name}: the target must be numbers.`);
    targets = scaled(kept.map(([row]) => row[1]), names[1], told);
  } else {
    const labels = [...new Set(kept.map(([, row]) => row[2]))].sort();
    if (labels.length !== 2) throw new Error(`${file.name}: the third column must have two classes, got ${labels.length}.`);
    targets = kept.map(([, row]) => labels.indexOf(row[2]));
    told.push(`circle = ${labels[0]}, square = ${labels[1]}`);
  }
  const points = kept.map((_, i) => [...standardised.map((column) => column[i]), targets[i]]);
  const share = step > 1 ? `${points.length} of ${rows.length} rows. ` : "";
  const gaps = cells.length - rows.length;
  const left = gaps ? `${gaps} ${gaps > 1 ? "rows" : "row"} with an empty cell left out. ` : "";
  const wide = Math.max(...cells.map((row) => row.length)) > columns ? `Only the first ${columns} columns are used. ` : "";
  return { points, say: `${file.name}: ${share}${left}${wide}Standardised: ${told.join("; ")}.` };
}

function scaled(values, name, told) {
  const mean = values.reduce((sum, v) => sum + v, 0) / values.length;
  const std = Math.sqrt(values.reduce((sum, v) => sum + (v - mean) ** 2, 0) / values.length) || 1;
  told.push(`(${name} − ${Number(mean.toPrecision(3))}) / ${Number(std.toPrecision(3))}`);
  return values.map((v) => Number(((v - mean) / std).toFixed(3)));
}
