// The chat page.
import { empty, receive } from "./answers.js";
import { $, ask, icon, keep, kept, key, placeIcons, ServerError, showPhase, startTheme } from "./common.js";
import { coloured, el, render } from "./markdown.js";
import { asCurl, asPython, body, DEFAULTS, tools } from "./requests.js";
import { hideAlternatives, tokenView } from "./tokens.js";

const CHATS = "jaxserve.chats", SETTINGS = "jaxserve.settings";
const MOST_CHATS = 50;
const IDEAS = [
  ["What is the capital of France?", "a fact"],
  ["Write a Python function that merges two sorted lists, and explain how fast it is.", "code"],
  ["Compare TCP and UDP in a table.", "a table"],
  ["Tell me a short story about a scheduler that never let anybody starve.", "a story"],
];

let chats = kept(CHATS, []);
let current = null;
let settings = { ...DEFAULTS, ...kept(SETTINGS, {}) };
let keyless = false; // the server wants a key, and none was given
let running = null; // {controller, chat, answer, show} while an answer comes

// Chats.

const title = (chat) => chat.messages.find((message) => message.role === "user")?.text.trim().slice(0, 80) || "New chat";

function save() {
  const worth = chats.filter((chat) => chat.messages.length).slice(0, MOST_CHATS);
  const light = (chat) => ({ ...chat, messages: chat.messages.map((message) => ({ ...message, tokens: [] })) });
  // If storage is full, drops token views, which are large, and then old chats.
  if (keep(CHATS, worth)) return;
  for (let many = worth.length; many > 0 && !keep(CHATS, worth.slice(0, many).map(light)); many >>= 1);
}

function open(chat) {
  if (running && running.chat !== chat) running.controller.abort();
  current = chat;
  showList();
  showChat();
  document.body.classList.remove("side");
  $("side").setAttribute("aria-expanded", "false");
}

function begin() {
  const blank = chats.find((chat) => !chat.messages.length) ?? { id: crypto.randomUUID?.() ?? String(Math.random()), messages: [] };
  chats = [blank, ...chats.filter((chat) => chat !== blank)];
  open(blank);
  $("prompt").focus();
}

function remove(chat) {
  if (running?.chat === chat) running.controller.abort();
  chats = chats.filter((other) => other !== chat);
  save();
  if (chat === current) chats.length ? open(chats[0]) : begin();
  else showList();
  $("new").focus();
}

function showList() {
  $("list").replaceChildren(...chats.map((chat) => el("li", { class: chat === current ? "current" : "" },
    el("button", { class: "open", type: "button", "aria-current": chat === current ? "true" : null, onclick: () => open(chat) }, title(chat)),
    el("button", { class: "button plain icon delete", type: "button", "aria-label": `Delete: ${title(chat)}`, onclick: () => remove(chat) }, icon("bin")))));
}

// Messages.

function showChat() {
  hideAlternatives();
  $("welcome").hidden = current.messages.length > 0;
  $("messages").replaceChildren(...current.messages.map(messageView));
  toEnd(true);
}

function messageView(message, index) {
  if (message.role !== "assistant") {
    const who = message.role === "user" ? "You" : "Result of a tool";
    return el("article", { class: `message ${message.role}` }, el("h2", { class: "hidden" }, who), el("div", { class: "said" }, message.text));
  }
  const root = el("article", { class: "message assistant" }, el("h2", { class: "hidden" }, "Model"));
  const text = el("div", { class: "text" });
  let seen = "", thoughtBox = null, callBoxes = [];

  const show = () => {
    const live = running?.answer === message;
    root.setAttribute("aria-busy", live);
    if (message.thought) {
      thoughtBox ??= root.insertBefore(fold(""), text);
      const seconds = message.thinking ? ` for ${message.thinking.toFixed(1)} s` : "";
      thoughtBox.firstChild.textContent = live && !message.text ? "Thinking…" : `Thought${seconds}`;
      thoughtBox.lastChild.textContent = message.thought.trim();
    }
    if (message.text !== seen) render(text, (seen = message.text));
    text.classList.toggle("cursor", live);
    message.calls.filter(Boolean).forEach((call, number) => {
      callBoxes[number] ??= root.appendChild(callView(message, call));
      callBoxes[number].update(live);
    });
    if (!live) root.append(...ending(message, index, text));
  };
  root.append(text);
  root.show = show;
  show();
  return root;
}

const fold = (name, ...children) => el("details", { class: "fold" }, el("summary", {}, name), el("div", {}, ...children));

function callView(message, call) {
  const pre = el("pre", { tabindex: "0", role: "region", "aria-label": "Arguments" });
  const result = el("textarea", { rows: "2", placeholder: "What the tool gives back", "aria-label": `Result of ${call.name}` });
  const send = el("button", { class: "button", type: "button", onclick: () => answerCall(message, call, result.value) }, "Send result");
  const box = el("details", { class: "fold call", open: true }, el("summary", {}, "Calls ", el("b")), el("div", {}, pre, result, send));
  box.update = (live) => {
    box.querySelector("b").textContent = call.name;
    let shown = call.arguments;
    try { shown = JSON.stringify(JSON.parse(shown), null, 2); } catch { /* not whole yet */ }
    pre.replaceChildren(...coloured(shown));
    const answered = current.messages.some((other) => other.call === call.id);
    result.hidden = send.hidden = live || answered;
  };
  return box;
}

function answerCall(message, call, text) {
  const at = current.messages.indexOf(message);
  current.messages.splice(at + 1, 0, { role: "tool", call: call.id, text });
  save();
  showChat();
  const open = message.calls.some((each) => !current.messages.some((other) => other.call === each.id));
  if (!open) answer();
}

function ending(message, index, text) {
  const parts = [];
  if (message.error) parts.push(el("p", { class: "error", role: "alert" }, message.error));
  const button = (name, label, act, props = {}) =>
    el("button", { class: "button plain", type: "button", onclick: act, ...props }, icon(name), label);
  const row = el("div", { class: "actions" });
  if (message.text) row.append(button("copy", "Copy", () => navigator.clipboard?.writeText(message.text)));
  row.append(button("again", "Again", () => { current.messages.length = index; answer(); }));
  if (message.tokens.length) {
    row.append(button("tokens", "Tokens", (event) => {
      const on = event.currentTarget.getAttribute("aria-pressed") !== "true";
      event.currentTarget.setAttribute("aria-pressed", on);
      text.blocks = [];
      text.replaceChildren();
      if (on) text.append(tokenView(message.tokens)); else render(text, message.text);
    }, { "aria-pressed": "false" }));
  }
  const stats = message.stats, told = [];
  if (stats) {
    told.push(`${stats.tokens} tokens`);
    if (stats.rate) told.push(`${stats.rate.toFixed(stats.rate < 10 ? 1 : 0)} per second`);
    if (stats.first !== null) told.push(`first after ${stats.first < 1000 ? `${stats.first.toFixed(0)} ms` : `${(stats.first / 1000).toFixed(1)} s`}`);
    told.push(`${stats.prompt} read${stats.cached ? `, ${stats.cached} of them cached` : ""}`);
  }
  if (message.finish === "length") told.push("cut off by the limit of tokens");
  if (message.stopped) told.push("stopped");
  row.append(el("span", { class: "stats" }, told.join(" · ")));
  return [...parts, row];
}

// Scrolls with the end of an answer, unless the reader has scrolled up.
function toEnd(always = false) {
  const log = $("log");
  if (always || log.following) log.scrollTop = log.scrollHeight;
}
$("log").following = true;
$("log").addEventListener("scroll", () => {
  const log = $("log");
  log.following = log.scrollHeight - log.scrollTop - log.clientHeight < 60;
});

// Answers.

function speak(text) { $("spoken").textContent = text; }

async function answer() {
  const chat = current, message = empty();
  let request;
  try { request = body($("model").value || undefined, chat.messages, settings); } catch (error) { return showSettings(error.message); }
  const controller = new AbortController();
  chat.messages.push(message);
  running = { controller, chat, answer: message };
  chats = [chat, ...chats.filter((other) => other !== chat)];
  showList();
  showChat();
  showSend();
  speak("The model is answering.");
  let asked = false;
  const changed = () => {
    if (asked) return;
    asked = true;
    requestAnimationFrame(() => {
      asked = false;
      if (current === chat && running?.answer === message) { $("messages").lastElementChild.show(); toEnd(); }
    });
  };
  try {
    await receive(request, message, controller.signal, changed);
    if (keyless) { await listModels(); showPhase($("phase"), "serving"); }
    speak("The answer is complete.");
  } catch (error) {
    if (controller.signal.aborted) { message.stopped = true; speak("Stopped."); }
    else { message.error = told(error); speak(`Error. ${message.error}`); }
  }
  message.calls = message.calls.filter(Boolean);
  running = null;
  save();
  showSend();
  if (current === chat) { const bottom = $("log").following; showChat(); toEnd(bottom); }
  $("forget-key").hidden = !key.get();
}

function told(error) {
  const later = error.retryAfter ? ` Try again in ${error.retryAfter} s.` : "";
  return error instanceof TypeError ? `No connection to the server (${error.message}).` : error.message + later;
}

function send() {
  const text = $("prompt").value;
  if (running || !text.trim()) return;
  $("prompt").value = "";
  grow();
  current.messages.push({ role: "user", text });
  answer();
}

function showSend() {
  const button = $("send");
  button.replaceChildren(icon(running ? "stop" : "send"));
  button.setAttribute("aria-label", running ? "Stop" : "Send");
  button.type = running ? "button" : "submit";
}

function grow() {
  const prompt = $("prompt");
  prompt.style.height = "auto";
  prompt.style.height = `${prompt.scrollHeight}px`;
}

// Settings, and the request as code.

function showSettings(error = "") {
  const form = $("settings").querySelector("form");
  for (const field of form.elements) {
    if (!field.name) continue;
    if (field.type === "checkbox") field.checked = Boolean(settings[field.name]);
    else field.value = settings[field.name] ?? "";
  }
  complain(error);
  if (!$("settings").open) $("settings").showModal();
}

function complain(error) {
  $("settings-error").textContent = error;
  $("settings-error").hidden = !error;
}

function readSettings() {
  for (const field of $("settings").querySelector("form").elements) {
    if (field.name) settings[field.name] = field.type === "checkbox" ? field.checked : field.value;
  }
  keep(SETTINGS, settings);
}

function showRequest(form) {
  const prompt = $("prompt").value;
  const messages = prompt.trim() || !current.messages.length
    ? [...current.messages, { role: "user", text: prompt || "Hello!" }] : current.messages;
  const last = messages.at(-1)?.role === "assistant" ? messages.slice(0, -1) : messages;
  let text;
  try { text = form(body($("model").value, last, settings)); } catch (error) { text = error.message; }
  $("request-code").replaceChildren(...coloured(text));
  $("request-code").text = text;
  $("as-curl").setAttribute("aria-pressed", form === asCurl);
  $("as-python").setAttribute("aria-pressed", form === asPython);
  if (!$("request").open) $("request").showModal();
}

// The server's state.

async function watch() {
  for (;;) {
    let pause = 15000;
    try {
      const reply = await fetch(new URL("../ready", import.meta.url));
      const { phase, progress } = await reply.json();
      showPhase($("phase"), keyless && phase === "serving" ? "keyless" : phase, progress);
      if (phase !== "serving") pause = 1000;
      else if (!$("model").options.length && !keyless) { await listModels(); showPhase($("phase"), phase); }
    } catch (error) {
      if (error instanceof ServerError && error.status === 401) {
        keyless = true; // whoever sends a message is asked again
        continue;
      }
      showPhase($("phase"), "lost");
      pause = 3000;
    }
    await new Promise((resolve) => setTimeout(resolve, pause));
  }
}

async function listModels() {
  const { data } = await (await ask("v1/models")).json();
  $("model").replaceChildren(...data.map(({ id }) => el("option", { value: id }, id)));
  $("forget-key").hidden = !key.get();
  keyless = false;
}

// Begin.

placeIcons();
startTheme($("theme"));
showSend();
$("ideas").append(...IDEAS.map(([text, kind]) => el("button", { type: "button", onclick: () => { $("prompt").value = text; grow(); send(); } },
  text, el("small", {}, kind))));
$("composer").querySelector("form").addEventListener("submit", (event) => { event.preventDefault(); send(); });
$("send").addEventListener("click", (event) => { if (running) { event.preventDefault(); running.controller.abort(); } });
$("prompt").addEventListener("input", grow);
$("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); send(); }
});
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape") return;
  hideAlternatives();
  if (document.body.classList.contains("side")) $("side").click();
  else if (!document.querySelector("dialog[open]")) running?.controller.abort();
});
$("new").addEventListener("click", begin);
$("side").addEventListener("click", () => {
  const on = document.body.classList.toggle("side");
  $("side").setAttribute("aria-expanded", on);
  if (on) $("new").focus();
});
document.querySelector("main").addEventListener("click", (event) => {
  if (document.body.classList.contains("side") && !$("side").contains(event.target)) $("side").click();
}, true);
addEventListener("resize", hideAlternatives);
$("log").addEventListener("scroll", hideAlternatives);
$("forget-key").addEventListener("click", () => { key.forget(); $("forget-key").hidden = true; });
$("show-settings").addEventListener("click", () => showSettings());
$("settings").addEventListener("close", readSettings);
$("settings-done").addEventListener("click", (event) => {
  const text = $("settings").querySelector("[name=tools]").value;
  try { if (text.trim()) tools(text); complain(""); } catch (error) { event.preventDefault(); complain(error.message); }
});
$("settings-reset").addEventListener("click", () => { settings = { ...DEFAULTS }; showSettings(); });
$("show-request").addEventListener("click", () => showRequest(asCurl));
$("as-curl").addEventListener("click", () => showRequest(asCurl));
$("as-python").addEventListener("click", () => showRequest(asPython));
$("request-copy").addEventListener("click", () => navigator.clipboard?.writeText($("request-code").text));
if (chats.length) open(chats[0]); else begin();
watch();
