// Collects a streamed answer: text, reasoning, calls, tokens, times.
import { ask, events } from "./common.js";

export function empty() {
  return { role: "assistant", text: "", thought: "", calls: [], tokens: [] };
}

// Fills `answer` and calls `changed` after each event. Throws the errors of the server.
export async function receive(request, answer, signal, changed) {
  const began = performance.now();
  let first = null;
  const asked = { ...request, stream: true, stream_options: { include_usage: true } };
  const reply = await ask("v1/chat/completions", {
    method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(asked), signal,
  });
  for await (const { data } of events(reply)) {
    if (data === "[DONE]") break;
    const event = JSON.parse(data);
    if (event.error) throw new Error(event.error.message);
    const choice = event.choices?.[0];
    if (choice) take(answer, choice);
    const now = performance.now();
    if (first === null && (answer.text || answer.thought || answer.calls.length)) first = now;
    if (answer.thought && !answer.text && !answer.calls.length) answer.thinking = (now - first) / 1000;
    if (event.usage) {
      const tokens = event.usage.completion_tokens;
      answer.stats = {
        tokens, prompt: event.usage.prompt_tokens,
        cached: event.usage.prompt_tokens_details?.cached_tokens ?? 0,
        first: first === null ? null : first - began,
        rate: first !== null && tokens > 1 && now > first ? (1000 * (tokens - 1)) / (now - first) : null,
      };
    }
    changed();
  }
}

function take(answer, { delta = {}, finish_reason: finish, logprobs }) {
  answer.text += delta.content ?? "";
  answer.thought += delta.reasoning ?? delta.reasoning_content ?? "";
  for (const part of delta.tool_calls ?? []) {
    const call = (answer.calls[part.index ?? 0] ??= { id: "", name: "", arguments: "" });
    call.id = part.id ?? call.id;
    call.name += part.function?.name ?? "";
    call.arguments += part.function?.arguments ?? "";
  }
  for (const { token, logprob, top_logprobs: top } of logprobs?.content ?? []) {
    answer.tokens.push([token, logprob, (top ?? []).map((each) => [each.token, each.logprob])]);
  }
  if (finish) answer.finish = finish;
}
