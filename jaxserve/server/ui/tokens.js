// Shows an answer token by token. Less likely tokens have warmer colours. Pointing at a token, or
// moving with the arrow keys, shows its alternatives.
import { $ } from "./common.js";
import { el } from "./markdown.js";

const visible = (token) => token.replaceAll("\n", "⏎\n").replaceAll("\t", "⇥\t") || "∅";
const percent = (logprob) => {
  const share = 100 * Math.exp(logprob);
  return share >= 99.95 ? "100 %" : share >= 0.1 ? `${share.toFixed(1)} %` : "< 0.1 %";
};

export function tokenView(tokens) {
  const root = el("div", { class: "tokens", role: "group", "aria-label": "Tokens; arrow keys walk through them" });
  tokens.forEach(([token, logprob, top], index) => {
    const label = `${JSON.stringify(token)}, ${percent(logprob)}`;
    const others = top.filter(([other]) => other !== token).slice(0, 3);
    const described = others.map(([other, each]) => `${JSON.stringify(other)} ${percent(each)}`).join(", ");
    const span = el("span", { class: "token", role: "img", tabindex: index ? "-1" : "0",
      "aria-label": described ? `${label}; else ${described}` : label }, visible(token));
    span.style.setProperty("--doubt", (1 - Math.exp(logprob)).toFixed(3));
    const show = () => showAlternatives(span, token, logprob, top);
    span.addEventListener("mouseenter", show);
    span.addEventListener("focus", show);
    span.addEventListener("mouseleave", hideAlternatives);
    span.addEventListener("blur", hideAlternatives);
    root.append(span);
  });
  root.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    const all = [...root.children];
    const next = step && all[all.indexOf(document.activeElement) + step];
    if (!next) return;
    event.preventDefault();
    document.activeElement.tabIndex = -1;
    next.tabIndex = 0;
    next.focus();
  });
  return root;
}

function showAlternatives(span, token, logprob, top) {
  const box = $("alternatives");
  const rows = top.some(([other]) => other === token) ? top : [[token, logprob], ...top];
  box.replaceChildren(...rows.map(([other, each]) => {
    const code = el("code", {}, visible(other).trimEnd() || "␣");
    code.style.setProperty("--share", `${(100 * Math.exp(each)).toFixed(1)}%`);
    return el("div", { class: other === token ? "alt chosen" : "alt" }, code, el("span", {}, percent(each)));
  }));
  box.showPopover();
  const at = span.getClientRects()[0] ?? span.getBoundingClientRect();
  const below = at.bottom + 8 + box.offsetHeight < innerHeight;
  box.style.left = `${Math.max(8, Math.min(at.left, innerWidth - box.offsetWidth - 8))}px`;
  box.style.top = `${below ? at.bottom + 8 : Math.max(8, at.top - box.offsetHeight - 8)}px`;
}

export function hideAlternatives() {
  const box = $("alternatives");
  if (box.matches(":popover-open")) box.hidePopover();
}
