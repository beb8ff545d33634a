// The engine page: draws one stream of events as it arrives.
import { cells, duration, histogram, quantile, short, spark, stack } from "./charts.js";
import { $, ask, events, placeIcons, ServerError, showPhase, startTheme } from "./common.js";
import { el } from "./markdown.js";

const MINUTE = 60;
const BINS = 120;
const SHOWN = 64;

let about = null;
let ticks = [];     // of the last minute
let rare = [];      // those of them that have distributions
let steps = [];     // of the last minute: {at, kind, bucket, rows, chunks, tokens, ms, expected, late}
let newest = null;
let paused = false;

// Incoming events.

function takeTick(tick) {
  newest = tick;
  ticks.push(tick);
  if (tick.pages || tick.ttft) rare.push(tick);
  for (const [, kind, bucket, rows, chunks, tokens, ms, expected, late] of tick.steps) {
    steps.push({ at: tick.t, kind, bucket, rows, chunks, tokens, ms, expected, late });
  }
  const before = tick.t - MINUTE;
  const recent = (list, time) => { const at = list.findIndex((each) => time(each) >= before); return at > 0 ? list.slice(at) : list; };
  ticks = recent(ticks, (each) => each.t);
  steps = recent(steps, (each) => each.at);
  rare = recent(rare, (each) => each.t);
}

async function watch() {
  for (;;) {
    try {
      const reply = await ask("ui/engine/events");
      $("error").hidden = true;
      ticks = []; rare = []; steps = [];
      for await (const { event, data } of events(reply)) {
        const body = JSON.parse(data);
        if (event === "about") { about = body; showAbout(); } else if (event === "tick") { takeTick(body); drawSoon(); }
      }
      showPhase($("phase"), "lost");
    } catch (error) {
      showPhase($("phase"), "lost");
      $("error").hidden = false;
      $("error").textContent = error instanceof ServerError ? `${error.message}${error.status === 401 ? ". Load the page again to type one in." : ""}` : "No connection to the server. Trying again.";
      if (error instanceof ServerError && error.status === 401) return;
    }
    await new Promise((resolve) => setTimeout(resolve, 2000));
  }
}

// Draws at most once per frame, and not while hidden or paused.

let wanted = false;

function drawSoon() {
  if (wanted || paused) return;
  wanted = true;
  requestAnimationFrame(() => { wanted = false; if (newest) draw(); });
}

function draw() {
  showPhase($("phase"), newest.phase, newest.progress);
  drawTiles();
  drawStep();
  drawBatch();
  const latest = rare.at(-1);
  if (latest && latest !== draw.shown) {
    draw.shown = latest;
    drawPages(latest.pages);
    drawTier(latest.tier);
    drawQueue(latest.queue);
    for (const name of ["ttft", "tpot"]) drawTimes(name);
    drawBuckets();
  }
}

// One value per bin of the last minute, newest last. `sum` adds up the samples in a bin.
function binned(list, time, start, add) {
  const bins = Array.from({ length: BINS }, start);
  for (const each of list) {
    const index = BINS - 1 - Math.floor(((newest.t - time(each)) / MINUTE) * BINS);
    if (index >= 0) bins[index] = add(bins[index], each);
  }
  return bins;
}

const TILES = [
  ["Generated", "tokens/s", "decode", () => rates(1)],
  ["Read from prompts", "tokens/s", "chunk", () => rates(0)],
  ["Running", "sequences", "accent", () => levels((tick) => tick.running)],
  ["Waiting", "sequences", "warn", () => levels((tick) => tick.waiting)],
  ["KV cache held", "%", "shared", () => levels((tick) => tick.total_pages ? 100 * (1 - tick.free_pages / tick.total_pages) : 0, 100)],
  ["Prefix cache hits", "% of prompts", "cached", prefixes],
];

function rates(which) {
  const grown = [];
  for (let index = 1; index < ticks.length; index++) {
    grown.push({ t: ticks[index].t, more: ticks[index].tokens[which] - ticks[index - 1].tokens[which] });
  }
  const values = binned(grown, (each) => each.t, () => 0, (sum, each) => sum + each.more).map((each) => (each * BINS) / MINUTE);
  // The newest bin is not full yet, so the label shows the two seconds before it.
  const span = ticks.filter((tick) => tick.t >= newest.t - 2);
  const time = span.length > 1 ? newest.t - span[0].t : 0;
  return { value: time ? (newest.tokens[which] - span[0].tokens[which]) / time : 0, values: values.slice(0, -1) };
}

function levels(of, top = 0) {
  let last = 0;
  const bins = binned(ticks, (tick) => tick.t, () => null, (_, tick) => of(tick));
  return { value: of(newest), values: bins.map((each) => (last = each ?? last)), top };
}

function prefixes() {
  const first = rare[0]?.prefix, last = rare.at(-1)?.prefix;
  if (!last) return { value: null, values: [0, 0], top: 100 };
  const [asked, found] = last[0] > first[0] ? [last[0] - first[0], last[1] - first[1]] : last;
  const grown = rare.slice(1).map((tick, index) => ({ t: tick.t, asked: tick.prefix[0] - rare[index].prefix[0], found: tick.prefix[1] - rare[index].prefix[1] }));
  let shown = 0;
  const values = binned(grown, (each) => each.t, () => [0, 0], ([a, b], each) => [a + each.asked, b + each.found])
    .map(([a, b]) => (shown = a ? (100 * b) / a : shown));
  return { value: asked ? (100 * found) / asked : null, values, top: 100 };
}

function drawTiles() {
  if (!$("tiles").children.length) {
    $("tiles").append(...TILES.map(([name]) => el("article", { class: "card tile" }, el("h2", {}, name),
      el("span", { class: "value" }), el("canvas", { "aria-hidden": "true" }))));
  }
  [...$("tiles").children].forEach((tile, index) => {
    const [, unit, tint, figures] = TILES[index];
    const { value, values, top } = figures();
    const text = value === null ? "–" : short(value);
    tile.querySelector(".value").replaceChildren(text, el("small", {}, ` ${unit}`));
    spark(tile.querySelector("canvas"), values, tint, top);
  });
}

const padding = (step) => Math.max(0, step.bucket - step.rows - step.tokens);
const many = (count, one) => `${count.toLocaleString("en")} ${one}${count === 1 ? "" : "s"}`;

function drawStep() {
  const step = steps.at(-1);
  if (!step) return;
  if (step !== drawStep.shown) {
    drawStep.shown = step;
    const parts = [["decode", step.rows], ["chunk", step.tokens], ["pad", padding(step)]];
    const whole = step.bucket <= 128; // a cell each, or a length for each kind
    const made = [];
    for (const [name, count] of parts) {
      if (whole) for (let index = 0; index < count; index++) made.push(el("i", { class: name }));
      else if (count) { const part = el("i", { class: name }); part.style.flexGrow = count; made.push(part); }
    }
    $("strip").replaceChildren(...made);
    const what = [step.rows ? many(step.rows, "next token") : null,
      !step.tokens ? null : step.kind === "verify" ? many(step.tokens, "draft") : `${many(step.tokens, "prompt token")} in ${many(step.chunks, "chunk")}`].filter(Boolean).join(" and ");
    const pad = padding(step), share = Math.round((100 * pad) / step.bucket);
    const time = step.ms === null ? "" : ` It took ${duration(step.ms / 1000)}${step.expected ? `; ${duration(step.expected / 1000)} were expected` : ""}.`;
    $("strip-text").textContent = `Bucket of ${step.bucket.toLocaleString("en")} ${{ decode: "rows", verify: "positions" }[step.kind] ?? "tokens"}: ${what}${pad ? `, ${share} % padding` : ", no padding"}.${time}`;
  }
  const latest = steps.slice(-SHOWN), most = Math.max(...latest.map((each) => each.bucket));
  $("recent").replaceChildren(...latest.map((each) => {
    const part = (name, count) => { const made = el("i", { class: name }); made.style.height = `${(3.4 * count) / most}rem`; return made; };
    return el("span", {}, part("decode", each.rows), part("chunk", each.tokens), part("pad", padding(each)));
  }));
}

function drawBatch() {
  const bins = binned(steps, (step) => step.at, () => [0, 0, 0, 0],
    ([n, rows, tokens, pad], step) => [n + 1, rows + step.rows, tokens + step.tokens, pad + padding(step)]);
  stack($("batch"), bins.map(([n, ...sums]) => sums.map((sum) => (n ? sum / n : 0))), ["decode", "chunk", "pad"], "tokens per step, mean");
  const sums = bins.reduce((all, bin) => all.map((each, index) => each + bin[index]), [0, 0, 0, 0]);
  const total = sums[1] + sums[2] + sums[3];
  const late = steps.filter((step) => step.late).length;
  $("batch-text").textContent = total
    ? `${many(sums[0], "step")} in view: ${Math.round((100 * sums[1]) / total)} % next tokens, ${Math.round((100 * sums[2]) / total)} % prompt tokens, ${Math.round((100 * sums[3]) / total)} % padding${late ? `; before ${late} the device waited for the host` : ""}.`
    : "No step in the last minute.";
}

function drawPages(pages) {
  if (!pages) return;
  const states = Array.from(atob(pages.states), (each) => each.charCodeAt(0));
  cells($("pages"), states);
  const held = pages.total - pages.free;
  const sample = pages.stride > 1 ? ` The map shows one page in ${pages.stride}.` : "";
  $("pages-text").textContent = `${many(pages.total, "page")} of ${pages.page_size} tokens: ${held.toLocaleString("en")} held, ${pages.cached.toLocaleString("en")} free with a prefix that can be found, ${(pages.free - pages.cached).toLocaleString("en")} free.${sample}`;
}

function drawQueue(queue) {
  if (!queue) return;
  const total = queue.flatMap((row) => row.slice(1)).reduce((sum, each) => sum + each, 0);
  $("queue-text").textContent = total ? `${many(total, "sequence")} in all.` : "Nobody waits.";
  const limits = about?.deadlines ?? [0, 1, 5, 30];
  const names = ["overdue", ...limits.slice(1).map((limit) => `≤ ${limit} s`), "later", "no deadline"];
  const rows = total ? queue : [["new", ...names.map(() => 0)]];
  $("queue").replaceChildren(
    el("thead", {}, el("tr", {}, el("th", { scope: "col" }, "class"), ...names.map((name) => el("th", { scope: "col" }, name)))),
    el("tbody", {}, ...rows.map(([name, ...counts]) => el("tr", {}, el("th", { scope: "row" }, name), ...counts.map((count) => el("td", {}, count || "·"))))));
}

// Host memory and disk: their content, their hits, and the moves of the last minute.
function drawTier(tier) {
  $("tier").hidden = !tier;
  if (!tier) return;
  const first = rare.find((tick) => tick.tier), time = newest.t - first.t;
  const rate = (name) => (time > 0 ? `${bytes((tier[name] - first.tier[name]) / time)}/s` : "–");
  const share = (tokens) => (tier.looked_up ? `${short(tokens)} (${Math.round((100 * tokens) / tier.looked_up)} %)` : "·");
  const rows = [["host memory", tier.host_bytes, tier.host_total, tier.from_host, "stored", "loaded"]];
  if (tier.disk_total) rows.push(["disk", tier.disk_bytes, tier.disk_total, tier.from_disk, "written", "read"]);
  const names = ["tier", "used", "of", "tokens that came back", "in", "out", "in, ever", "out, ever"];
  $("tiers").replaceChildren(
    el("thead", {}, el("tr", {}, ...names.map((name) => el("th", { scope: "col" }, name)))),
    el("tbody", {}, ...rows.map(([name, used, total, tokens, into, out]) => el("tr", {}, el("th", { scope: "row" }, name),
      ...[bytes(used), bytes(total), share(tokens), rate(into), rate(out), bytes(tier[into]), bytes(tier[out])].map((cell) => el("td", {}, cell))))));
  $("tier-text").textContent = `${tier.loading ? `${many(tier.loading, "sequence")} waiting for pages.` : "Nobody waits for pages."} Shares are of the ${many(tier.looked_up, "token")} that the device did not have.`;
}

function bytes(count) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  const power = Math.min(units.length - 1, Math.floor(Math.log10(Math.max(count, 1)) / 3));
  return `${+(count / 1000 ** power).toPrecision(3)} ${units[power]}`;
}

const apart = (counts) => counts.map((each, index) => each - (index ? counts[index - 1] : 0));

function drawTimes(name) {
  const bounds = about?.bounds[name] ?? [], ever = rare.at(-1)[name];
  if (!ever) return;
  const earlier = rare[0][name];
  const now = apart(ever).map((each, index) => each - apart(earlier)[index]);
  histogram($(name), bounds, now, apart(ever));
  const told = (counts) => [0.5, 0.95].map((share) => quantile(bounds, counts, share)).map((each) => each === null ? "–" : duration(each));
  const count = (counts) => counts.reduce((sum, each) => sum + each, 0);
  const line = (which, counts) => `${which} ${many(count(counts), "sequence")}${count(counts) ? `, median ${told(counts)[0]}, 95th percentile ${told(counts)[1]}` : ""}`;
  $(`${name}-text`).textContent = `${line("Last minute:", now)}. ${line("Since the start:", apart(ever))}.`;
}

function drawBuckets() {
  const groups = new Map();
  for (const [kind, sizes] of Object.entries(about?.buckets ?? {})) for (const [size, ms] of sizes) groups.set(`${kind} ${size}`, { kind, size, ms, found: [] });
  for (const step of steps) {
    const name = `${step.kind} ${step.bucket}`;
    if (!groups.has(name)) groups.set(name, { kind: step.kind, size: step.bucket, ms: null, found: [] });
    if (step.ms !== null) groups.get(name).found.push(step);
  }
  const at = (list, share) => list[Math.min(list.length - 1, Math.floor(share * list.length))];
  const rows = [...groups.values()].map((group) => {
    const times = group.found.map((step) => step.ms).sort((a, b) => a - b);
    const expected = group.found.map((step) => step.expected ?? group.ms).filter((each) => each !== null).sort((a, b) => a - b);
    return { ...group, times, tick: expected.length ? at(expected, 0.5) : group.ms };
  });
  const most = Math.max(...rows.flatMap(({ times, tick }) => [at(times, 0.75) ?? 0, tick ?? 0]), 1e-6) * 1.04;
  const place = (ms) => `${(100 * ms) / most}%`;
  const body = rows.map(({ kind, size, times, tick }) => {
    const range = el("div", { class: "range" }, el("span", { class: "base" }));
    const put = (name, left, width) => { const made = el("span", { class: name }); made.style.left = place(left); if (width !== undefined) made.style.width = place(width); range.append(made); };
    if (times.length) put("half", at(times, 0.25), at(times, 0.75) - at(times, 0.25));
    if (tick !== null) put("tick", tick);
    if (times.length) put("dot", at(times, 0.5));
    const ms = (value) => value === null || value === undefined ? "–" : duration(value / 1000);
    return el("tr", {}, el("th", { scope: "row" }, `${kind} ${size.toLocaleString("en")}`), el("td", {}, times.length || "·"), el("td", {}, ms(tick)), el("td", {}, ms(at(times, 0.5))), el("td", { class: "plot" }, range));
  });
  const names = ["bucket", "steps", "expected", "median"];
  $("times").replaceChildren(el("thead", {}, el("tr", {}, ...names.map((name) => el("th", { scope: "col" }, name)), el("td", { class: "plot", "aria-hidden": "true" }))), el("tbody", {}, ...body));
}

function showAbout() {
  $("model").textContent = about.model;
  const total = Math.max(...about.startup.map(([, , end]) => end), 1e-6);
  $("startup").replaceChildren(...about.startup.map(([name, begin, end]) => {
    const bar = el("i");
    bar.style.left = `${(100 * begin) / total}%`;
    bar.style.width = `${(100 * (end - begin)) / total}%`;
    return el("li", {}, el("span", {}, name), el("span", {}, duration(end - begin)), el("span", { class: "lane", "aria-hidden": "true" }, bar));
  }));
}

placeIcons();
startTheme($("theme"), () => { draw.shown = null; drawSoon(); });
$("pause").addEventListener("click", () => {
  paused = !paused;
  $("pause").setAttribute("aria-pressed", paused);
  $("pause").textContent = paused ? "Go on" : "Pause";
  drawSoon();
});
addEventListener("resize", () => { draw.shown = null; drawSoon(); });
watch();
