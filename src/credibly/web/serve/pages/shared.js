// Requests with a token where the server asks for one, and elements of the page.

const asked = document.getElementById("ask-token");

function waitForToken() {
  asked.hidden = false;
  return new Promise((resolve) => {
    asked.addEventListener("submit", (event) => {
      event.preventDefault();
      sessionStorage.setItem("token", document.getElementById("token").value);
      asked.hidden = true;
      resolve();
    }, { once: true });
  });
}

/** Fetch JSON from the server; an error of the server becomes an Error with its message, advice and argument. */
export async function request(path, options = {}) {
  for (;;) {
    const token = sessionStorage.getItem("token");
    const headers = { ...options.headers, ...(token ? { Authorization: `Bearer ${token}` } : {}) };
    const response = await fetch(path, { ...options, headers });
    if (response.status === 401) {
      await waitForToken();
      continue;
    }
    const found = await response.json();
    if (response.ok) return found;
    throw Object.assign(new Error(found.error.message), found.error);
  }
}

/** Make an element with attributes and children; text is never read as HTML. */
export function make(tag, attributes = {}, ...children) {
  const found = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) if (value !== null) found.setAttribute(name, value);
  found.append(...children);
  return found;
}

/** The same for SVG. */
export function draw(tag, attributes = {}, ...children) {
  const found = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) found.setAttribute(name, value);
  found.append(...children);
  return found;
}

/** A number with four significant digits, and more only where it is a large integer. */
export function short(value) {
  if (typeof value !== "number") return value === null || value === undefined ? "–" : String(value);
  if (value !== 0 && (Math.abs(value) >= 1e7 || Math.abs(value) < 1e-4)) return value.toExponential(3);
  return value.toLocaleString("en", { maximumSignificantDigits: Math.abs(value) >= 1000 ? 6 : 4 });
}
