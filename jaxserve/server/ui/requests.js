// Turns a chat and its settings into the body of a request, and the request into code to copy.
import { key, root } from "./common.js";

const NUMBERS = ["temperature", "top_p", "top_k", "min_p", "max_tokens", "seed", "repetition_penalty"];

export const DEFAULTS = { thinking: true };

// Throws an Error that says which setting is wrong.
export function body(model, messages, settings) {
  const made = { model, messages: [] };
  if (settings.system?.trim()) made.messages.push({ role: "system", content: settings.system });
  made.messages.push(...messages.map(asSent));
  for (const name of NUMBERS) {
    if (settings[name] !== undefined && settings[name] !== "") made[name] = Number(settings[name]);
  }
  if (settings.stop) made.stop = settings.stop;
  if (!settings.thinking) made.chat_template_kwargs = { enable_thinking: false };
  if (settings.logprobs) Object.assign(made, { logprobs: true, top_logprobs: 8 });
  if (settings.tools?.trim()) made.tools = tools(settings.tools);
  return made;
}

export function tools(text) {
  let list;
  try { list = JSON.parse(text); } catch (error) { throw new Error(`The tools are not JSON: ${error.message}`); }
  if (!Array.isArray(list)) throw new Error("The tools must be a list: [{…}]");
  return list;
}

function asSent({ role, text, calls, call }) {
  if (role === "tool") return { role, tool_call_id: call, content: text };
  const made = { role, content: text || (calls?.length ? null : "") };
  if (calls?.length) {
    made.tool_calls = calls.map(({ id, name, arguments: given }) => (
      { id, type: "function", function: { name, arguments: given } }));
  }
  return made;
}

// The code names the key and does not show it.
export function asCurl(request) {
  const quoted = JSON.stringify(request, null, 2).replaceAll("'", "'\\''");
  const header = key.get() ? ` \\\n  -H "Authorization: Bearer $JAXSERVE_API_KEY"` : "";
  return `curl ${new URL("v1/chat/completions", root)}${header} \\\n  -H 'Content-Type: application/json' \\\n  -d '${quoted}'\n`;
}

const OF_OPENAI = new Set(["model", "messages", "temperature", "top_p", "max_tokens", "seed", "stop", "logprobs", "top_logprobs", "tools"]);

export function asPython(request) {
  const own = Object.entries(request).filter(([name]) => OF_OPENAI.has(name));
  const extra = Object.entries(request).filter(([name]) => !OF_OPENAI.has(name));
  const lines = own.map(([name, value]) => `    ${name}=${python(value, "    ")},\n`);
  if (extra.length) lines.push(`    extra_body=${python(Object.fromEntries(extra), "    ")},\n`);
  const given = key.get() ? 'os.environ["JAXSERVE_API_KEY"]' : '"none"';
  return `${key.get() ? "import os\n\n" : ""}from openai import OpenAI

client = OpenAI(base_url="${new URL("v1", root)}", api_key=${given})
stream = client.chat.completions.create(
${lines.join("")}    stream=True,
)
for chunk in stream:
    if chunk.choices and chunk.choices[0].delta.content:
        print(chunk.choices[0].delta.content, end="", flush=True)
`;
}

function python(value, indent) {
  if (value === null) return "None";
  if (value === true) return "True";
  if (value === false) return "False";
  const inner = indent + "    ";
  if (Array.isArray(value)) {
    return value.length ? `[\n${value.map((each) => inner + python(each, inner)).join(",\n")},\n${indent}]` : "[]";
  }
  if (typeof value === "object") {
    const pairs = Object.entries(value).map(([name, each]) => `${inner}${JSON.stringify(name)}: ${python(each, inner)}`);
    return pairs.length ? `{\n${pairs.join(",\n")},\n${indent}}` : "{}";
  }
  return JSON.stringify(value);
}
