"""Stand-ins for the engine and for a model's tokenizer, scripted by the test that uses them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from jaxserve.api import (
    EngineFailed,
    EngineLimits,
    EngineStatus,
    FinishReason,
    PromptLogprobs,
    Request,
    Start,
    TokenEvent,
    TokenLogprobs,
    WeightChange,
    WeightsChanged,
    WeightState,
)
from jaxserve.tokenizer import HfTokenizer
from jaxserve.views import Occupancy, PagesView, StepView, WaitingView

IM_START, IM_END, THINK, END_THINK, CALL, END_CALL = range(256, 262)
SPECIAL = ("<|im_start|>", "<|im_end|>")
NOT_SPECIAL = ("<think>", "</think>", "<tool_call>", "</tool_call>")

CHATML = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- for tool in tools %}{{- tool | tojson }}{%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.reasoning_content %}
        {{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' }}
    {%- endif %}
    {{- message.content }}
    {%- for call in message.tool_calls or [] %}
        {%- set written = call.function.arguments %}
        {%- if written is not string %}{% set written = written | tojson %}{% endif %}
        {{- '<tool_call>\\n' + written + '\\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""


def tiny_tokenizer(
    chat_template: str | None = CHATML, more_special: Sequence[str] = ()
) -> HfTokenizer:
    """A byte-level BPE without merges: token id = byte value; the markers follow from 256 on, and
    more special ones from 262."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in visible]
    vocab = {chr(b): b for b in visible} | {chr(256 + i): b for i, b in enumerate(hidden)}
    full = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    full.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    full.decoder = decoders.ByteLevel()
    full.add_special_tokens(list(SPECIAL))
    full.add_tokens(list(NOT_SPECIAL))
    full.add_special_tokens(list(more_special))
    return HfTokenizer(full, eos_token_ids=frozenset({IM_END}), chat_template=chat_template)


type Script = Sequence[int] | Callable[[Request], Sequence[int]]


class FakeEngine:
    """Gives every request the tokens of a script, then waits for ever or ends with `finish`.

    Like the real one it ends a sequence at its stop tokens and at max_tokens. So many events come
    `together`, as for a reader that is late.
    """

    def __init__(
        self,
        script: Script = b"Hello",
        *,
        hang: bool = False,
        finish: FinishReason = FinishReason.LENGTH,
        refuse: Exception | None = None,
        fail_after: int | None = None,
        failure: type[Exception] = EngineFailed,
        step: asyncio.Semaphore | None = None,
        step_seconds: float = 0.0,
        together: int = 1,
        cached_tokens: int = 0,
        max_model_len: int = 4096,
        vocab_size: int = 300,
        sampled_vocab: int | None = None,
    ):
        self.requests: list[Request] = []
        self.running = 0
        self.aborted = asyncio.Event()
        """Set when a sequence was given up before its end."""
        self.prefix_cache_resets = 0
        self.steps: list[StepView] = []
        self.waiting: list[WaitingView] = []
        self.weight_state = WeightState(0, "served", paused=False, sleeping=False)
        self.weight_changes: list[WeightChange] = []
        self.refuse_weights: Exception | None = None
        self.version = 0
        """Of the weights that its tokens name."""
        self.phase = "serving"
        self.last_step_age = 0.0
        self._script = script
        self._hang = hang
        self._finish = finish
        self._refuse = refuse
        self._fail_after = fail_after
        self._failure = failure
        self._step = step
        self._step_seconds = step_seconds
        self._together = together
        self._cached_tokens = cached_tokens
        self._limits = EngineLimits(max_model_len, vocab_size, sampled_vocab)

    @property
    def limits(self) -> EngineLimits:
        return self._limits

    def status(self) -> EngineStatus:
        return EngineStatus(
            ready=self.phase == "serving",
            phase=self.phase,
            progress=1.0 if self.phase == "serving" else 0.5,
            running=self.running,
            waiting=0,
            free_pages=75,
            total_pages=100,
            last_step_age=self.last_step_age,
        )

    def steps_since(self, number: int) -> list[StepView]:
        return [step for step in self.steps if step.number > number]

    def occupancy(self, max_pages: int) -> Occupancy | None:
        del max_pages
        pages = PagesView(
            page_size=16, total=4, free=2, cached=1, stride=1, states=bytes((0, 1, 2, 3))
        )
        return Occupancy(pages, tuple(self.waiting))

    def bucket_seconds(self) -> Mapping[str, Mapping[int, float]]:
        return {"decode": {8: 0.004}, "mixed": {128: 0.02}}

    async def generate(self, request: Request) -> AsyncGenerator[list[TokenEvent]]:
        self.requests.append(request)
        if self._refuse is not None:
            raise self._refuse
        self.running += 1
        ended = False
        try:
            script = self._script(request) if callable(self._script) else self._script
            events: list[TokenEvent] = []
            for position, token in enumerate(script):
                await self._next_step(position)
                events.append(
                    self._event(request, token, position, last=position == len(script) - 1)
                )
                ended = events[-1].finish is not None
                if ended or len(events) == self._together:
                    yield events
                    events = []
                if ended:
                    return
            await asyncio.Event().wait()
        finally:
            self.running -= 1
            if not ended:
                self.aborted.set()

    def reset_prefix_cache(self) -> None:
        self.prefix_cache_resets += 1

    @property
    def weights(self) -> WeightState:
        return self.weight_state

    async def change_weights(self, change: WeightChange) -> WeightsChanged:
        if self.refuse_weights is not None:
            raise self.refuse_weights
        self.weight_changes.append(change)
        version = self.weight_state.version + 1
        self.weight_state = self.weight_state._replace(version=version, model=change.model)
        return WeightsChanged(version, 1.5, 0.01)

    async def pause(self, *, finish: bool = False) -> None:
        self.weight_state = self.weight_state._replace(paused=True)

    async def resume(self) -> None:
        self.weight_state = self.weight_state._replace(paused=False)

    async def sleep(self, *, drop_weights: bool = False) -> None:
        self.weight_state = self.weight_state._replace(paused=True, sleeping=True)

    async def wake(self) -> None:
        self.weight_state = self.weight_state._replace(paused=False, sleeping=False)

    async def _next_step(self, position: int) -> None:
        if position == self._fail_after:
            raise self._failure("RuntimeError: /secret/path at 0x7f00")
        if self._step is not None:
            await self._step.acquire()
        await asyncio.sleep(self._step_seconds)

    def _event(self, request: Request, token: int, position: int, *, last: bool) -> TokenEvent:
        params = request.params
        finish = None
        if token in params.stop_token_ids and position >= params.min_tokens:
            finish = FinishReason.STOP
        elif position + 1 == params.max_tokens:
            finish = FinishReason.LENGTH
        elif last and not self._hang:
            finish = self._finish
        failed = finish not in (None, FinishReason.STOP, FinishReason.LENGTH)
        logprobs = None
        if params.logprobs is not None:
            top = tuple((token + i, -0.5 - i) for i in range(params.logprobs))
            logprobs = TokenLogprobs(-0.5, top)
        return TokenEvent(
            request.id,
            None if failed else token,
            finish,
            logprobs,
            self._cached_tokens if position == 0 else 0,
            self._prompt_logprobs(request) if position == 0 else None,
            Start(0.25, 0.5, time.perf_counter()) if position == 0 and not failed else None,
            weights=self.version,
        )

    def _prompt_logprobs(self, request: Request) -> tuple[PromptLogprobs, ...] | None:
        """Each token is second to the one after it in the vocabulary."""
        if (most := request.params.prompt_logprobs) is None:
            return None
        scores = {
            token: PromptLogprobs(
                -0.75, 2, ((token + 1, -0.25), (token, -0.75), (token + 2, -9.0))[:most]
            )
            for token in set(request.prompt)
        }
        return tuple(scores[token] for token in request.prompt[1:])
