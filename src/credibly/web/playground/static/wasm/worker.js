// The engine as a module worker: credibly.wasm lies next to this file.

import { Core } from "./core.js";
import { Engine } from "./engine.js";

const address = new URL("credibly.wasm", import.meta.url);

async function load() {
  const response = await fetch(address);
  if (!response.ok) throw new Error(`${address} could not be loaded: ${response.status}`);
  return Core.load(await response.arrayBuffer());
}

const engine = new Engine(load, (message) => postMessage(message));
const opened = engine.open().catch((error) => {
  const text = `WebAssembly could not be started (${error.message}). Run \`credibly playground\` on your machine instead.`;
  postMessage({ type: "error", id: null, message: text });
  throw error;
});
onmessage = async (event) => {
  await opened;
  await engine.receive(event.data);
};
