// Runs requests on the WebAssembly engine: node wasm_engine.mjs SCRIPTS MODULE < requests.json > messages.json
//
// A request is [message, wait]: without wait, the next one is sent while this one is being answered.

import { readFileSync } from "node:fs";
import { pathToFileURL } from "node:url";

const [folder, module] = process.argv.slice(2);
const { Core } = await import(pathToFileURL(`${folder}/core.js`));
const { Engine } = await import(pathToFileURL(`${folder}/engine.js`));
const messages = [];
const engine = new Engine(async () => Core.load(readFileSync(module)), (message) => messages.push(message));
await engine.open();
for (const [message, wait] of JSON.parse(readFileSync(0, "utf8"))) {
  const answered = engine.receive(message);
  if (wait) await answered;
  else await new Promise((resolve) => setTimeout(resolve, 60));
}
process.stdout.write(JSON.stringify(messages));
