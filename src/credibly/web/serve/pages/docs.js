// The OpenAPI document of the server as a page.

import { make, prose, request } from "./shared.js";

const document_ = await request("openapi.json");
const schemas = document_.components.schemas;

function resolve(schema) {
  return schema && schema.$ref ? schemas[schema.$ref.split("/").pop()] : schema;
}

function table(head, rows) {
  const first = make("tr", {}, ...head.map((text) => make("th", {}, text)));
  const kind = (i) => ({ class: head[i] === "meaning" ? "wide" : null, "data-head": head[i] });
  const others = rows.map((row) => make("tr", {}, ...row.map((cell, i) => make("td", kind(i), ...[cell].flat()))));
  return make("div", { class: "scroll" }, make("table", {}, first, ...others));
}

function code(text) {
  return make("code", {}, text);
}

function types(schema) {
  return [schema.type ?? ""].flat().join(", ");
}

function columns(schema) {
  const rows = Object.entries(resolve(schema).properties).map(([name, one]) => [
    code(name), types(one), prose(one.description ?? ""), one.examples ? code(JSON.stringify(one.examples[0])) : "",
  ]);
  return table(["column", "type", "meaning", "example"], rows);
}

function section(path, method, one) {
  const found = make("section", {}, make("h2", {}, code(`${method.toUpperCase()} ${path}`)), make("p", {}, one.summary));
  if (one.parameters) {
    const rows = one.parameters.map((p) => [code(p.name), types(p.schema), String(p.schema.default ?? ""), prose(p.description)]);
    found.append(make("h3", {}, "Parameters"), table(["name", "type", "default", "meaning"], rows));
  }
  const body = one.requestBody?.content["application/json"];
  if (body) {
    const rows = body.schema.oneOf ? body.schema.oneOf[0] : body.schema;
    found.append(make("h3", {}, "Rows"), columns(rows.items));
    if (body.example) {
      const token = document_.security ? ` \\\n  -H "Authorization: Bearer $CREDIBLY_TOKEN"` : "";
      const data = JSON.stringify(body.example).replaceAll("'", "'\\''");
      const url = new URL(`.${path}`, location.href).href;
      found.append(make("pre", {}, `curl ${url}${token} \\\n  -H 'Content-Type: application/json' \\\n  -d '${data}'`));
    }
  }
  const answer = one.responses["200"].content["application/json"]?.schema?.properties?.predictions;
  if (answer) {
    const names = Object.keys(resolve(answer.items).properties);
    found.append(make("h3", {}, "Response"), make("p", {}, ...names.flatMap((n, i) => [i ? ", " : "", code(n)])));
  }
  return found;
}

document.getElementById("about").replaceChildren(...prose(document_.info.description));
const seen = new Set();
for (const [path, methods] of Object.entries(document_.paths)) {
  for (const [method, one] of Object.entries(methods)) {
    // A single run is described once, at the root.
    if (path.startsWith("/runs/") && seen.has(one.summary)) continue;
    seen.add(one.summary);
    document.getElementById("paths").append(section(path, method, one));
  }
}
