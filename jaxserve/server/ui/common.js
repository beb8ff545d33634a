// Code of both pages: the server's address, the key, the colours.
import { el } from "./markdown.js";

export const root = new URL("..", import.meta.url);
export const $ = (id) => document.getElementById(id);

const KEY = "jaxserve.key";
const THEME = "jaxserve.theme";

export function kept(name, fallback = null) {
  try { return JSON.parse(localStorage.getItem(name)) ?? fallback; } catch { return fallback; }
}

// Returns false if the browser stores nothing or has no room.
export function keep(name, value) {
  try { localStorage.setItem(name, JSON.stringify(value)); return true; } catch { return false; }
}

export const key = {
  get: () => { try { return sessionStorage.getItem(KEY) ?? localStorage.getItem(KEY); } catch { return null; } },
  set(value, remember) {
    try {
      sessionStorage.setItem(KEY, value);
      if (remember) localStorage.setItem(KEY, value); else localStorage.removeItem(KEY);
    } catch { /* a browser that keeps nothing asks again */ }
  },
  forget() { try { sessionStorage.removeItem(KEY); localStorage.removeItem(KEY); } catch { /* none */ } },
};

export class ServerError extends Error {
  constructor(status, message, retryAfter) {
    super(message);
    this.status = status;
    this.retryAfter = retryAfter;
  }
}

// Sends a request with the key. Asks the user for a key until the server accepts it.
export async function ask(path, options = {}) {
  for (;;) {
    const headers = { ...options.headers };
    if (key.get()) headers.Authorization = `Bearer ${key.get()}`;
    const reply = await fetch(new URL(path, root), { ...options, headers });
    if (reply.ok) return reply;
    let message = `the server answered ${reply.status}`;
    try { message = (await reply.json()).error.message; } catch { /* not in the usual shape */ }
    if (reply.status !== 401 || !(await askForKey(message, options.signal))) {
      throw new ServerError(reply.status, message, reply.headers.get("Retry-After"));
    }
  }
}

let asking = null;

function askForKey(message) {
  asking ??= new Promise((resolve) => {
    const input = el("input", { type: "password", id: "key-input", autocomplete: "off", required: true });
    const remember = el("input", { type: "checkbox", id: "key-remember" });
    const form = el("form", { method: "dialog" },
      el("h2", { id: "key-title" }, "This server wants an API key"),
      el("p", { class: "soft", id: "key-why" }, key.get() ? message : "It stays in this tab unless you say otherwise."),
      el("label", { for: "key-input" }, "API key"), input,
      el("p", {}, el("label", {}, remember, " Remember it in this browser")),
      el("div", { class: "row" },
        el("button", { class: "button primary", value: "use" }, "Use key"),
        el("button", { class: "button", value: "", formnovalidate: true }, "Cancel")));
    const dialog = el("dialog", { id: "key", "aria-labelledby": "key-title", "aria-describedby": "key-why" }, form);
    document.body.append(dialog);
    dialog.addEventListener("close", () => {
      const given = dialog.returnValue === "use" && input.value.trim();
      if (given) key.set(given, remember.checked);
      dialog.remove();
      asking = null;
      resolve(Boolean(given));
    });
    dialog.showModal();
  });
  return asking;
}

// Yields the events of a stream as {event, data}.
export async function* events(reply) {
  const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    rest += value;
    for (let end; (end = rest.indexOf("\n\n")) >= 0; rest = rest.slice(end + 2)) {
      const found = { event: "message", data: "" };
      for (const line of rest.slice(0, end).split("\n")) {
        if (line.startsWith("data:")) found.data += line.slice(5).trimStart();
        else if (line.startsWith("event:")) found.event = line.slice(6).trim();
      }
      if (found.data) yield found;
    }
  }
}

export function startTheme(button, changed = () => {}) {
  const dark = () => getComputedStyle(document.documentElement).colorScheme === "dark" ||
    (!document.documentElement.dataset.theme && matchMedia("(prefers-color-scheme: dark)").matches);
  const apply = (theme) => {
    if (theme) document.documentElement.dataset.theme = theme;
    button.setAttribute("aria-label", dark() ? "Use light colours" : "Use dark colours");
    changed();
  };
  apply(kept(THEME));
  button.addEventListener("click", () => {
    const theme = dark() ? "light" : "dark";
    keep(THEME, theme);
    apply(theme);
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => apply(kept(THEME)));
}

export function showPhase(pill, phase, progress = 1) {
  const words = { serving: "ready", lost: "no connection", failed: "engine failed", draining: "shutting down", keyless: "needs an API key" };
  pill.dataset.state = phase;
  const done = phase in words || progress >= 1 ? "" : ` ${Math.round(100 * progress)} %`;
  const text = (words[phase] ?? phase) + done;
  if (pill.textContent !== text) pill.textContent = text;
}

const svg = (paths) => {
  const made = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  made.setAttribute("viewBox", "0 0 24 24");
  made.setAttribute("class", "line");
  made.setAttribute("aria-hidden", "true");
  for (const d of paths) {
    const path = document.createElementNS(made.namespaceURI, "path");
    path.setAttribute("d", d);
    made.append(path);
  }
  return made;
};

const ICONS = {
  menu: ["M4 7h16M4 12h16M4 17h16"],
  plus: ["M12 5v14M5 12h14"],
  send: ["M12 19V6M6 11l6-6 6 6"],
  stop: ["M8 8h8v8H8z"],
  theme: ["M12 4v16M12 4a8 8 0 1 0 0 16", "M12 4a8 8 0 0 1 0 16"],
  sliders: ["M4 8h9M17 8h3M4 16h3M11 16h9", "M15 6v4M9 14v4"],
  code: ["M9 8l-4 4 4 4M15 8l4 4-4 4"],
  bin: ["M5 7h14M10 7V5h4v2M7 7l1 12h8l1-12"],
  copy: ["M9 9h10v10H9z", "M5 15V5h10"],
  again: ["M19 12a7 7 0 1 1-2-5M19 4v4h-4"],
  tokens: ["M4 6h7v5H4zM13 6h7v5h-7zM4 13h5v5H4zM11 13h9v5h-9z"],
};

export const icon = (name) => svg(ICONS[name]);

export function placeIcons() {
  for (const place of document.querySelectorAll("[data-icon]")) place.prepend(icon(place.dataset.icon));
}
