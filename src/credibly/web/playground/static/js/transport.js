// Engines behind one interface: open(), send(request), close(), onmessage(message), onstate("open" | "closed").
// The messages are described in PROTOCOL.md.

export class SocketTransport {
  // The Python server, over a WebSocket. It reconnects, with growing pauses, until it is closed.
  constructor(url) {
    this.url = url;
    this.onmessage = () => {};
    this.onstate = () => {};
    this.wait = 250;
    this.wanted = false;
  }

  open() {
    this.wanted = true;
    this.socket = new WebSocket(this.url);
    this.socket.onopen = () => {
      this.wait = 250;
      this.onstate("open");
    };
    this.socket.onmessage = (event) => this.onmessage(JSON.parse(event.data));
    this.socket.onclose = () => {
      this.onstate("closed");
      if (this.wanted) setTimeout(() => this.wanted && this.open(), this.wait);
      this.wait = Math.min(8000, 2 * this.wait);
    };
  }

  send(request) {
    if (this.socket?.readyState !== WebSocket.OPEN) return false;
    this.socket.send(JSON.stringify(request));
    return true;
  }

  close() {
    this.wanted = false;
    this.socket?.close();
  }
}

export class WorkerTransport {
  // A module worker, such as the WebAssembly engine: messages are posted as plain objects in both directions.
  constructor(url) {
    this.url = url;
    this.onmessage = () => {};
    this.onstate = () => {};
  }

  open() {
    this.worker = new Worker(this.url, { type: "module" });
    this.worker.onmessage = (event) => this.onmessage(event.data);
    this.worker.onerror = () => this.onstate("closed");
    this.onstate("open");
  }

  send(request) {
    this.worker.postMessage(request);
    return true;
  }

  close() {
    this.worker?.terminate();
  }
}

// The engine of this page: `data-engine` on the root element names a worker module; without it, the server's socket.
export function transport() {
  const worker = document.documentElement.dataset.engine;
  if (worker) return new WorkerTransport(new URL(worker, document.baseURI));
  const scheme = location.protocol === "https:" ? "wss:" : "ws:";
  return new SocketTransport(`${scheme}//${location.host}/socket`);
}
