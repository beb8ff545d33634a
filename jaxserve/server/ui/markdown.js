// Markdown to elements. Text of a model only becomes text nodes: nothing here parses HTML,
// links may only go to http, https and mailto, and images become links.

const BULLET = /^(\s*)([-*+]|\d{1,9}[.)])\s+(.*)$/;
const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([\w+#.-]{0,32})/;
const RULE = /^ {0,3}([-*_])( *\1){2,} *$/;
const DEEPEST = 12;

export function el(tag, props = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (name === "class") made.className = value;
    else if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value === true) made.setAttribute(name, "");
    else if (value !== false && value != null) made.setAttribute(name, value);
  }
  made.append(...children.filter((child) => child != null));
  return made;
}

// Renders into `root`. Replaces only changed blocks, because a stream grows at its end.
export function render(root, text) {
  const blocks = split(text);
  const shown = root.blocks ?? [];
  let same = 0;
  while (same < blocks.length && same < shown.length && blocks[same] === shown[same]) same++;
  while (root.childNodes.length > same) root.lastChild.remove();
  for (const block of blocks.slice(same)) root.append(one(block));
  root.blocks = blocks;
}

// Blocks of lines. Each becomes one element.
function split(text) {
  const blocks = [];
  let lines = [], fence = null;
  const end = () => { if (lines.length) blocks.push(lines.join("\n")); lines = []; };
  for (const line of text.replace(/\r\n?/g, "\n").split("\n")) {
    if (fence) {
      lines.push(line);
      if (line.trim().startsWith(fence) && !line.trim().replaceAll(fence[0], "")) { end(); fence = null; }
      continue;
    }
    const opened = FENCE.exec(line);
    if (opened) { end(); fence = opened[1]; lines.push(line); continue; }
    const list = lines.length && BULLET.test(lines[0]) && !RULE.test(lines[0]);
    if (!line.trim()) {
      if (list) lines.push(line); else end();
      continue;
    }
    if (list && !BULLET.test(line) && !/^\s/.test(line) && !lines.at(-1).trim()) end();
    else if (!list && lines.length && (BULLET.test(line) || /^ {0,3}(#{1,6} |>)/.test(line) !== /^ {0,3}(#{1,6} |>)/.test(lines[0]))) end();
    if (RULE.test(line) || /^ {0,3}#{1,6} /.test(line)) { end(); blocks.push(line); continue; }
    lines.push(line);
  }
  end();
  return blocks;
}

function one(block, depth = 0) {
  const lines = block.split("\n");
  const fence = FENCE.exec(lines[0]);
  if (fence) {
    const closed = lines.length > 1 && lines.at(-1).trim().startsWith(fence[1]);
    return code(lines.slice(1, closed ? -1 : undefined).join("\n"), fence[2]);
  }
  if (RULE.test(lines[0])) return el("hr");
  const heading = /^ {0,3}(#{1,6}) +(.*?)#* *$/.exec(lines[0]);
  if (heading && lines.length === 1) {
    return el(`h${Math.min(5, Math.max(3, 1 + heading[1].length))}`, {}, ...inline(heading[2]));
  }
  if (lines[0].trimStart().startsWith(">") && depth < DEEPEST) {
    const inner = lines.map((line) => line.replace(/^ {0,3}> ?/, "")).join("\n");
    return el("blockquote", {}, ...split(inner).map((part) => one(part, depth + 1)));
  }
  if (BULLET.test(lines[0])) return list(lines, depth);
  if (lines.length > 1 && /^[\s|:-]+$/.test(lines[1]) && lines[1].includes("-") && lines[0].includes("|")) {
    return table(lines);
  }
  return el("p", {}, ...inline(lines.join("\n")));
}

function list(lines, depth) {
  const ordered = /\d/.test(BULLET.exec(lines[0])[2]);
  const start = ordered ? parseInt(BULLET.exec(lines[0])[2], 10) : null;
  const made = el(ordered ? "ol" : "ul", { start: start === 1 ? null : start });
  const outer = BULLET.exec(lines[0])[1].length;
  let item = null;
  const items = [];
  for (const line of lines) {
    const bullet = BULLET.exec(line);
    if (bullet && bullet[1].length <= outer + 1) items.push((item = [bullet[3]]));
    else item.push(line.slice(Math.min(line.length - line.trimStart().length, outer + 2)));
  }
  for (const content of items) {
    const [first, ...rest] = content;
    const at = rest.findIndex((line) => BULLET.test(line) || FENCE.test(line) || !line.trim());
    const text = at < 0 ? content : [first, ...rest.slice(0, at)];
    const inner = at < 0 || depth >= DEEPEST ? [] : split(rest.slice(at).join("\n"));
    made.append(el("li", {}, ...inline(text.join("\n")), ...inner.map((part) => one(part, depth + 1))));
  }
  return made;
}

function cells(line) {
  return line.trim().replace(/^\|/, "").replace(/\|$/, "").split("|").map((cell) => cell.trim());
}

function table(lines) {
  const row = (line, tag) => el("tr", {}, ...cells(line).map((cell) => el(tag, {}, ...inline(cell))));
  const body = lines.slice(2).map((line) => row(line, "td"));
  return el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "table" },
    el("table", {}, el("thead", {}, row(lines[0], "th")), el("tbody", {}, ...body)));
}

// Inside a paragraph. Each step finds the next mark, so the work is linear in the text,
// except for unclosed marks, whose search is bounded.
const MARKS = /(`+)|(\*\*|__|~~)|([*_])|\[([^\]\n]{1,500})\]\(([^)\s]{1,2000})\)|(https?:\/\/[^\s<>()"'`\]]{1,2000})|\\([\\`*_{}[\]()#+\-.!~|>])/g;
const WRAPS = { "**": "strong", "__": "strong", "~~": "s", "*": "em", _: "em" };
const FARTHEST = 2000;

function inline(text, depth = 0) {
  const nodes = [];
  let from = 0;
  const marks = new RegExp(MARKS);
  for (let found; (found = marks.exec(text)); ) {
    const [whole, ticks, two, single, label, target, bare, escaped] = found;
    let node = null, to = found.index + whole.length;
    const mark = ticks ?? two ?? single;
    if (mark) {
      const close = closing(text, mark, to);
      if (close > to) {
        const inner = text.slice(to, close);
        if (ticks) node = el("code", {}, inner.replace(/^ (.+) $/, "$1"));
        else if (depth < DEEPEST && words(text, found.index, to, close, mark)) {
          node = el(WRAPS[mark], {}, ...inline(inner, depth + 1));
        }
        if (node) to = close + mark.length;
      }
    } else if (target) node = link(label, target);
    else if (bare) {
      const trimmed = bare.replace(/[.,;:!?*_]+$/, "");
      node = link(trimmed, trimmed);
      to = found.index + trimmed.length;
    } else if (escaped) node = document.createTextNode(escaped);
    if (!node) { marks.lastIndex = to; continue; }
    if (found.index > from) nodes.push(text.slice(from, found.index));
    nodes.push(node);
    from = marks.lastIndex = to;
  }
  if (from < text.length) nodes.push(text.slice(from));
  return nodes;
}

function closing(text, mark, from) {
  const near = text.slice(from, from + FARTHEST);
  for (let at = near.indexOf(mark); at >= 0; at = near.indexOf(mark, at + 1)) {
    if (near[at + mark.length] !== mark[0] && (at === 0 || near[at - 1] !== mark[0])) return from + at;
  }
  return -1;
}

// Whether the marks are at the edges of words: 2 * 3 * 4 and snake_case_names are text.
function words(text, open, from, close, mark) {
  const outside = /[\p{L}\p{N}]/u;
  if (/\s/.test(text[from]) || /\s/.test(text[close - 1])) return false;
  if (mark[0] !== "_") return true;
  return !outside.test(text[open - 1] ?? "") && !outside.test(text[close + mark.length] ?? "");
}

function link(label, target) {
  let url;
  try { url = new URL(target); } catch { return document.createTextNode(label === target ? label : `${label} (${target})`); }
  if (!["http:", "https:", "mailto:"].includes(url.protocol)) return document.createTextNode(`${label} (${target})`);
  return el("a", { href: url.href, target: "_blank", rel: "noopener noreferrer nofollow", title: url.href }, label);
}

function code(text, language) {
  const copy = el("button", { class: "button plain", type: "button" }, "Copy");
  copy.addEventListener("click", async () => {
    await navigator.clipboard?.writeText(text);
    copy.textContent = "Copied";
    setTimeout(() => (copy.textContent = "Copy"), 1500);
  });
  return el("div", { class: "code" },
    el("div", {}, el("span", {}, language || "text"), copy),
    el("pre", { tabindex: "0", role: "region", "aria-label": `${language || "text"} code` }, el("code", {}, ...coloured(text))));
}

// Highlights common keywords, strings, numbers and comments of many languages.
const WORDS = new Set(("and as assert async await bool break case catch char class const continue crate def del do double elif else enum except export extends false finally float fn for from func function global if impl implements import in int interface is lambda let long loop match mod module mut new nil None not null number of or pass private pub public raise return select self static string struct super switch this throw trait true True False try type typeof undefined union unsafe use using var void when where while with yield " +
  "SELECT FROM WHERE JOIN GROUP ORDER BY LIMIT INSERT UPDATE DELETE CREATE TABLE then fi done echo").split(" "));
// Bounded, so that unclosed quotes do not make it slow.
const PIECES = /((?<!:)\/\/[^\n]*|(?<![\w&])#[^\n]*|\/\*[^]{0,300}?\*\/)|("(?:[^"\\\n]|\\.){0,300}"|'(?:[^'\\\n]|\\.){0,300}'|`(?:[^`\\]|\\.){0,300}`)|(\b\d[\w.]*)|([A-Za-z_]\w*)/g;

export function coloured(text) {
  if (text.length > 40000) return [text];
  const nodes = [];
  let from = 0;
  for (const found of text.matchAll(PIECES)) {
    const [whole, comment, string, number, word] = found;
    const kind = comment ? "c" : string ? "s" : number ? "n" : WORDS.has(word) ? "k" : null;
    if (!kind) continue;
    if (found.index > from) nodes.push(text.slice(from, found.index));
    nodes.push(el("span", { class: kind }, whole));
    from = found.index + whole.length;
  }
  nodes.push(text.slice(from));
  return nodes;
}
