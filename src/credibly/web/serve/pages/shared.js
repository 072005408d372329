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

/** Text in which `words` in backticks are code. */
export function prose(text) {
  return text.split("`").map((part, i) => (i % 2 ? make("code", {}, part) : part));
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

/** A number with four significant digits, or all digits before the point. Years have no separator: only 10,000 and more. */
export function short(value) {
  if (typeof value !== "number") return value === null || value === undefined ? "–" : String(value);
  if (value !== 0 && (Math.abs(value) >= 1e7 || Math.abs(value) < 1e-4)) return value.toExponential(3).replaceAll("-", "−");
  const digits = Math.abs(value) >= 1000 ? { maximumFractionDigits: 0 } : { maximumSignificantDigits: 4 };
  return value.toLocaleString("en", { ...digits, useGrouping: "min2" }).replace("-", "−");
}
