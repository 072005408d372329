// The playground's engine in a browser: answers the requests of PROTOCOL.md with the WebAssembly module.
//
// JavaScript moves arrays and decides what to run next; every number comes from C++.

import { FitRun } from "./fits.js";
import { OrbitRun } from "./orbits.js";
import { read } from "./requests.js";

export const METHODS = ["mle", "map", "ensemble", "dropout", "hmc"];
export const SCENES = ["regression", "classification", "hmc"];
export const POINTS = 400;

// Milliseconds of work between two looks at the messages that have arrived.
const SLICE = 25;

export class Engine {
  // `load()` resolves to a Core, `post(message)` sends a message to the page.
  constructor(load, post) {
    Object.assign(this, { load, post, current: null, panels: new Map() });
  }

  async open() {
    this.core = await this.load();
    this.post({ type: "hello", engine: "credibly (WebAssembly)", scenes: SCENES, methods: METHODS, points: POINTS });
  }

  async receive(message) {
    let request;
    try {
      request = read(message, { methods: METHODS, points: POINTS });
    } catch (error) {
      this.post({ type: "error", id: Number.isInteger(message?.id) ? message.id : null, message: error.message });
      return;
    }
    if (request.type === "probe") {
      this.probe(request);
      return;
    }
    const job = (this.current = { request });
    if (request.type === "cancel") return;
    try {
      await this.run(job);
    } catch (error) {
      if (!(error instanceof WebAssembly.RuntimeError)) throw error;
      // The module has stopped, most likely for lack of memory; what it held is lost.
      this.panels.clear();
      this.core = await this.load();
      const text = "the WebAssembly module ran out of memory: use fewer points, draws or units";
      if (this.current === job) this.post({ type: "error", id: request.id, message: text });
    }
  }

  // Works in slices, until the request is done or a newer one has arrived.
  async run(job) {
    const post = (message) => this.current === job && this.post({ ...message, id: job.request.id });
    const kind = job.request.type === "fit" ? FitRun : OrbitRun;
    const run = new kind(this.core, job.request, post, this.panels);
    let began = performance.now();
    try {
      for (const _ of run.steps()) {
        if (performance.now() - began < SLICE) continue;
        await new Promise((resolve) => setTimeout(resolve, 0));
        if (this.current !== job) return;
        began = performance.now();
      }
    } finally {
      run.end();
    }
  }

  probe(request) {
    for (const [index, panel] of [...this.panels].sort(([a], [b]) => a - b)) {
      const found = panel.probe(request.x);
      const { stage } = panel;
      if (found) this.post({ type: "probe", id: request.id, panel: index, stage, x: request.x, ...found });
    }
  }
}
