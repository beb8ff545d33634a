"""One streamed request to an OpenAI-compatible server."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import aiohttp

from jaxserve.bench.records import Outcome, Record
from jaxserve.bench.traffic import Prompt, Slo

_OUTPUT = ("content", "reasoning_content", "reasoning", "tool_calls")
"""Parts of a chat delta that are output. A delta with only a role is not a first token."""


@dataclass(frozen=True, kw_only=True)
class Target:
    """The server, and the form of requests to it."""

    url: str
    model: str
    endpoint: str = "completions"
    """`completions` or `chat`."""
    ignore_eos: bool = True
    """Ask for exactly the drawn number of tokens. Servers without the field ignore it."""
    timeout: float = 600.0
    """Seconds from the sending of a request to its timeout."""
    api_key: str | None = None
    slo_headers: bool = False
    """Send each request's limits as `x-slo-ttft-ms`, `x-slo-tpot-ms` and `x-slo-e2e-ms`."""


class Client:
    """Sends prompts over one connection pool without a limit, which would be a hidden queue."""

    def __init__(self, target: Target, session: aiohttp.ClientSession, clock: Callable[[], float]):
        self._target = target
        self._session = session
        self._clock = clock
        path = "chat/completions" if target.endpoint == "chat" else "completions"
        self._endpoint = f"{target.url}/v1/{path}"

    async def send(self, prompt: Prompt, record: Record, slo: Slo) -> None:
        """Sends a prompt now and fills in the record. Never raises for errors of the server."""
        body = json.dumps(_body(self._target, prompt)).encode()
        seconds = self._target.timeout
        timeout = aiohttp.ClientTimeout(total=seconds if math.isfinite(seconds) else None)
        record.sent = self._clock()
        try:
            async with self._session.post(
                self._endpoint, data=body, headers=_headers(self._target, slo), timeout=timeout
            ) as reply:
                if reply.status != 200:
                    text = _message(await reply.text())[:200]
                    shed = reply.status in (429, 503)
                    record.outcome = Outcome.SHED if shed else Outcome.FAILED
                    record.error = f"HTTP {reply.status}: {text}"
                    return
                await self._read(reply, record)
        except TimeoutError:
            record.outcome = Outcome.TIMED_OUT
            record.error = f"no end after {self._target.timeout:g} s"
        except (aiohttp.ClientError, OSError, ValueError, TypeError, AttributeError) as error:
            # The last three: the data of the server is not a completion chunk.
            record.outcome = Outcome.FAILED
            record.error = f"{type(error).__name__}: {error}"

    async def _read(self, reply: aiohttp.ClientResponse, record: Record) -> None:
        ended = False
        usage: dict[str, Any] = {}
        try:
            async for line in reply.content:
                if not line.startswith(b"data:"):
                    continue  # an empty line between events, or a keep-alive comment
                data = line[5:].strip()
                if data == b"[DONE]":
                    ended = True
                    break
                now = self._clock()
                chunk = json.loads(data)
                if error := _error(chunk):
                    record.outcome = Outcome.SHED if _is_shed(error) else Outcome.FAILED
                    record.error = _message(data.decode(errors="replace"))[:200]
                    return
                if any(_has_output(choice) for choice in chunk.get("choices") or ()):
                    record.token_times.append(now)
                usage = chunk.get("usage") or usage
        finally:  # also report the output of a lost request
            record.output_tokens = usage.get("completion_tokens") or len(record.token_times)
        record.prompt_tokens = usage.get("prompt_tokens") or record.prompt_tokens
        record.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        if ended and record.token_times:
            record.outcome = Outcome.COMPLETED
        else:
            record.outcome = Outcome.FAILED
            record.error = "the stream ended early" if not ended else "the stream had no output"


def _error(answer: dict[str, Any]) -> Any:
    """Returns the error in a chunk or a body. OpenAI and vLLM nest it; SGLang may not."""
    return answer.get("error") or (answer if answer.get("object") == "error" else None)


def _is_shed(error: Any) -> bool:
    """Returns whether an error in a stream means that the server refused the request."""
    if not isinstance(error, dict):
        return False
    kinds = ("rate_limit_error", "service_unavailable_error", "overloaded_error")
    return error.get("code") in (429, 503) or error.get("type") in kinds


def _message(body: str) -> str:
    """Returns the message of an error in a known format, else the whole body."""
    try:
        error = _error(json.loads(body))
        return error if isinstance(error, str) else str(error["message"])
    except (ValueError, LookupError, TypeError, AttributeError):
        return body


def _has_output(choice: dict[str, Any]) -> bool:
    """Returns whether a chunk has output. In completions every chunk has, because random tokens may
    form text that is not complete yet.

    In chats too, except for empty text beside a role, which only announces the message.
    """
    delta = choice.get("delta")
    if delta is None:
        return True
    parts = [delta.get(part) for part in _OUTPUT]
    return any(parts) or ("" in parts and not delta.get("role"))


def _body(target: Target, prompt: Prompt) -> dict[str, Any]:
    body: dict[str, Any] = {
        "model": target.model,
        "temperature": prompt.temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if target.ignore_eos:
        body["ignore_eos"] = True
    if target.endpoint == "chat":
        body["messages"] = [{"role": "user", "content": prompt.prompt}]
        body["max_completion_tokens"] = prompt.output_tokens
    else:
        body["prompt"] = prompt.prompt
        body["max_tokens"] = prompt.output_tokens
    return body


def _headers(target: Target, slo: Slo) -> dict[str, str]:
    headers = {"Content-Type": "application/json"}
    if target.api_key:
        headers["Authorization"] = f"Bearer {target.api_key}"
    if target.slo_headers and slo.ttft is not None:
        headers["x-slo-ttft-ms"] = f"{slo.ttft * 1e3:g}"
    tpot = slo.tpot if slo.tpot is not None else slo.itl_p95
    if target.slo_headers and tpot is not None:
        headers["x-slo-tpot-ms"] = f"{tpot * 1e3:g}"
    if target.slo_headers and math.isfinite(target.timeout):
        headers["x-slo-e2e-ms"] = f"{target.timeout * 1e3:g}"
    return headers


async def served_model(
    session: aiohttp.ClientSession, url: str, api_key: str | None, wanted: str | None
) -> tuple[str, int | None]:
    """Returns the model to request and its context length. The model is `wanted`, or the first one
    that the server names.

    The length is None if the server does not report it (vLLM's field `max_model_len`).
    """
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    async with session.get(f"{url}/v1/models", headers=headers) as reply:
        reply.raise_for_status()
        models: list[dict[str, Any]] = (await reply.json())["data"]
    for model in models:
        if wanted in (None, model["id"]):
            return model["id"], model.get("max_model_len")
    return wanted or models[0]["id"], None
