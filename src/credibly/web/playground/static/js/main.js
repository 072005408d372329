// The page: scenes, the engine behind them, and the state in the address.

import { Classification } from "./classification.js";
import { Controls } from "./controls.js";
import { readPoints } from "./csv.js";
import { InsideHMC } from "./hmc.js";
import { PANELS } from "./limits.js";
import { Regression } from "./regression.js";
import { decode, encode } from "./state.js";
import { transport } from "./transport.js";
import { InsideVI } from "./vi.js";

const find = (id) => document.getElementById(id);

class App {
  constructor() {
    this.state = decode(location.hash);
    this.methods = ["mle", "map", "ensemble", "dropout", "bbb", "laplace", "sghmc", "hmc"];
    this.limit = 400;
    this.id = 0;
    this.codeTitle = document.querySelector("#code h2").textContent;
    this.controls = new Controls(this, find("controls"));
    this.scenes = {};
    for (const scene of [new Regression(this), new Classification(this), new InsideHMC(this), new InsideVI(this)]) {
      this.scenes[scene.name] = scene;
    }
    this.offered = Object.keys(this.scenes);
    this.engine = transport();
    this.engine.onmessage = (message) => this.receive(message);
    this.engine.onstate = (state) => this.connection(state);
    for (const button of document.querySelectorAll("[data-scene]")) {
      button.addEventListener("click", () => this.open(button.dataset.scene));
    }
    find("link").addEventListener("click", () => this.copy(location.href, find("link")));
    find("copy").addEventListener("click", () => this.copy(find("lines").textContent, find("copy")));
    addEventListener("hashchange", () => {
      if (location.hash === encode(this.state)) return;
      this.state = decode(location.hash);
      this.open(this.state.scene);
    });
    const main = document.body;
    main.addEventListener("dragover", (event) => event.preventDefault());
    main.addEventListener("drop", (event) => {
      event.preventDefault();
      if (event.dataTransfer.files[0]) this.readFile(event.dataTransfer.files[0]);
    });
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.open(this.state.scene));
    // On a phone the controls would push the pictures below the first screen.
    find("settings").open = innerWidth > 720;
  }

  get scene() {
    return this.scenes[this.state.scene];
  }

  start() {
    this.engine.open();
  }

  connection(state) {
    find("engine").dataset.state = state;
    if (state !== "closed") return;
    const worker = document.documentElement.dataset.engine;
    this.hint(worker ? "WebAssembly could not be started in this browser. If you opened the page as a file, use a web server instead."
      : "The engine does not respond. Is `credibly playground` still running? Trying again …");
  }

  receive(message) {
    if (message.type === "hello") {
      this.methods = this.methods.filter((name) => message.methods.includes(name));
      this.limit = message.points;
      find("engine").textContent = message.engine;
      for (const button of document.querySelectorAll("[data-scene]")) {
        button.hidden = !message.scenes.includes(button.dataset.scene);
      }
      this.offered = message.scenes;
      this.open(this.state.scene);
    } else if (message.type === "error" && message.id === null) this.hint(message.message);
    else this.shown?.receive(message);
  }

  // A link may name methods that this engine does not have, or nothing that makes sense.
  restrict() {
    for (const name of ["regression", "classification"]) {
      const own = this.state[name];
      own.points = own.points.slice(0, this.limit);
      own.panels = own.panels.filter((method) => this.methods.includes(method)).slice(0, PANELS.high);
      if (!own.panels.length) own.panels = [this.methods.at(-1)];
    }
  }

  open(wanted) {
    const name = this.offered.includes(wanted) ? wanted : this.offered[0];
    try {
      this.show(name);
    } catch (error) {
      console.error(error);
      this.hint(`This scene cannot be shown (${error.message}). Remove what follows # in the address and load the page again.`);
    }
  }

  show(name) {
    this.shown?.leave();
    this.state.scene = name;
    this.restrict();
    this.shown = this.scene;
    for (const button of document.querySelectorAll("[data-scene]")) {
      if (button.dataset.scene === name) button.setAttribute("aria-current", "page");
      else button.removeAttribute("aria-current");
    }
    find("stage").replaceChildren(this.scene.node);
    document.body.dataset.scene = name;
    this.said = "";
    this.controls.build();
    this.scene.enter();
    this.changed();
  }

  nextId() {
    this.id += 1;
    return this.id;
  }

  send(request) {
    return this.engine.send(request);
  }

  changed() {
    clearTimeout(this.later);
    this.later = setTimeout(() => history.replaceState(null, "", encode(this.state)), 150);
  }

  hint(text) {
    find("hint").textContent = text;
    find("hint").hidden = !text;
  }

  async readFile(file) {
    const { scene } = this.state;
    if (scene !== "regression" && scene !== "classification") {
      this.hint("Files are read in Regression and Classification: open one of them and drop the file there.");
      return;
    }
    try {
      const { points, say } = await readPoints(file, scene, Math.min(200, this.limit));
      this.said = say;
      Object.assign(this.state[scene], { points, preset: "" });
      this.controls.sync();
      this.scene.changed();
    } catch (error) {
      this.hint(error.message);
    }
  }

  showCode(text, title = this.codeTitle) {
    find("lines").textContent = text;
    document.querySelector("#code h2").textContent = title;
    find("code").showModal();
  }

  async copy(text, button) {
    // Not what a second click finds there: that is "Copied".
    button.dataset.label ??= button.textContent;
    try {
      await navigator.clipboard.writeText(text);
      button.textContent = "Copied";
    } catch {
      // Without permission, as on pages that are served without TLS.
      const code = find("code").contains(button);
      button.textContent = code ? "Press Ctrl-C" : "Copy it from the address bar";
      if (code) getSelection().selectAllChildren(find("lines"));
    }
    setTimeout(() => (button.textContent = button.dataset.label), 1200);
  }
}

window.playground = new App();
window.playground.start();
