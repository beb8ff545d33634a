"""The engine as a library in the process of a trainer: `jaxserve.Engine`.

An event loop on its own thread drives the engine. Any other thread may call the methods here.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from jaxserve.api import (
    EngineLimits,
    EngineStatus,
    FinishReason,
    PromptLogprobs,
    Request,
    Running,
    SamplingParams,
    TokenEvent,
    TokenLogprobs,
    WeightChange,
    WeightsChanged,
    WeightState,
)
from jaxserve.cli.config_file import flags_of
from jaxserve.cli.options import Options, parse_args
from jaxserve.engine.engine import AsyncEngine, Progress
from jaxserve.engine.loop import Parts
from jaxserve.metrics.metrics import Metrics
from jaxserve.startup.environment import prepare
from jaxserve.startup.kv_events import open_publisher
from jaxserve.startup.timeline import Timeline
from jaxserve.weights.model_source import ModelSource, find_model

type Prompt = str | Sequence[int]
"""A text, or token ids."""


class Output(NamedTuple):
    """The result of one prompt."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    """Sampled token ids, including a stop token at the end."""
    text: str
    """The text without the stop token."""
    finish: FinishReason
    logprobs: tuple[TokenLogprobs, ...] | None
    """Logprobs of each sampled token, if requested."""
    prompt_logprobs: tuple[PromptLogprobs, ...] | None
    """Logprobs of each prompt token but the first, if requested."""
    weights: tuple[int, ...]
    """Versions of the weights that computed the tokens."""


class Engine:
    """Serves one model in this process. Use it in a `with` statement, or call `close`."""

    def __init__(self, model: str | None = None, **flags: Any):
        """Loads a model, and compiles its steps or loads them from the cache.

        Args:
          model: as --model; None: the embedded model.
          flags: flags of serving, with underscores: `max_model_len=2048`, `dtype="float32"`,
            `enable_prefix_caching=False`. On a GPU, `gpu_memory_utilization` decides how much
            memory
            is left for the trainer.

        Raises:
          ConfigError, CheckpointError: the start failed; the message is one line.
        """
        self._open(parse_args([*(("--model", model) if model else ()), *flags_of(flags)]))

    @classmethod
    def of_options(cls, options: Options) -> Engine:
        """Returns the engine of a parsed command line. Raises like the constructor."""
        engine = cls.__new__(cls)
        engine._open(options)
        return engine

    def _open(self, options: Options) -> None:
        prepare(options.gpu_memory_utilization)
        from jaxserve.runner.runner import Pending  # imports jax: not before `prepare`
        from jaxserve.startup.build import build_parts

        self._source = source = find_model(options)
        metrics = Metrics(source.names[0])
        self._publisher = publisher = open_publisher(options, metrics)
        cache_events = None if publisher is None else publisher.publish

        def build(progress: Progress) -> Parts[Pending]:
            return build_parts(
                *(options, source, metrics, progress, Timeline()),
                cache_events=cache_events,
                alone=False,
            )

        limits = EngineLimits(
            max_model_len=options.max_model_len or source.spec.max_position,
            vocab_size=source.spec.vocab_size,
            sampled_vocab=source.sampled_vocab,
        )
        self._engine = AsyncEngine(build=build, limits=limits, metrics=metrics)
        self._ids = itertools.count()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="engine-loop", daemon=True
        )
        self._thread.start()
        try:
            self._wait(self._engine.start())
        except BaseException:
            self.close()
            raise
        self._convert: Any = None

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the engine. Unfinished requests get an error."""
        if self._loop.is_running():
            self._wait(self._engine.stop())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()
        if self._publisher is not None:
            self._publisher.close()

    # Requests.

    def generate(
        self, prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams]
    ) -> list[Output]:
        """Returns the output of each prompt. All prompts are computed together.

        Args:
          params: for all prompts, or one per prompt. The model's end tokens are stop tokens too.

        Raises:
          Rejected, Overloaded, EngineFailed: see `api.Engine.generate`.
        """
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else params
        return self._wait(self._all(prompts, each))

    async def stream(self, prompt: Prompt, params: SamplingParams) -> AsyncIterator[TokenEvent]:
        """Yields a prompt's events as they arrive, on the caller's event loop. Closing the iterator
        ends the sequence. Raises like `generate`."""
        async with aclosing(self.submit(self._request(prompt, params))) as steps:
            async for events in steps:
                for event in events:
                    yield event

    async def submit(self, request: Request) -> AsyncGenerator[list[TokenEvent]]:
        """Runs `api.Engine.generate` on the caller's event loop. It does not add the model's end
        tokens."""
        caller = asyncio.get_running_loop()
        queue: asyncio.Queue[list[TokenEvent] | BaseException | None] = asyncio.Queue()

        async def forward() -> None:
            ended: BaseException | None = None
            try:
                async with aclosing(self._engine.generate(request)) as steps:
                    async for events in steps:
                        caller.call_soon_threadsafe(queue.put_nowait, events)
            except Exception as error:
                ended = error
            caller.call_soon_threadsafe(queue.put_nowait, ended)

        forwarding = asyncio.run_coroutine_threadsafe(forward(), self._loop)
        try:
            while (item := await queue.get()) is not None:
                if isinstance(item, BaseException):
                    raise item
                yield item
        finally:
            forwarding.cancel()

    def score(self, prompts: Sequence[Prompt]) -> list[list[float]]:
        """Returns the log probability of each prompt token but the first, given the tokens before
        it."""
        params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
        outputs = self.generate(prompts, params)
        return [[each.logprob for each in output.prompt_logprobs or ()] for output in outputs]

    # The model, and the state of the engine.

    @property
    def source(self) -> ModelSource:
        """The model's names, folder, tokenizer and sampling defaults."""
        return self._source

    @property
    def limits(self) -> EngineLimits:
        return self._engine.limits

    def status(self) -> EngineStatus:
        return self._engine.status()

    @property
    def page_size(self) -> int:
        """Tokens per page of the KV cache. Sequences share whole pages of a prefix."""
        occupancy = self._engine.occupancy(1)
        assert occupancy is not None, "the engine serves"
        return occupancy.pages.page_size

    # Weights.

    @property
    def weights(self) -> WeightState:
        return self._engine.weights

    def update_weights(
        self, tree: Mapping[Any, Any], running: Running = Running.DRAIN
    ) -> WeightsChanged:
        """Serves a trainer's weights from some step on. The weights stay on the device.

        Args:
          tree: the `parameters` of a model of `jaxserve.flax`, or arrays by Hugging Face's names.
          running: what happens to running sequences.

        Raises:
          WeightsRefused: the engine's weights are quantised, or the tree does not fit.
        """
        import jax

        from jaxserve.api import WeightsRefused
        from jaxserve.weights.trees import engine_params

        runner = self._engine.runner
        if self._convert is None:
            abstract = jax.tree.map(
                lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), runner.params
            )
            self._convert = jax.jit(
                partial(engine_params, spec=self._source.spec, abstract=abstract)
            )
        try:
            params = jax.block_until_ready(self._convert(dict(tree)))
        except (KeyError, ValueError, TypeError) as error:
            raise WeightsRefused(f"the tree does not fit: {error}") from None
        return self._wait(self._engine.use_weights(partial(runner.use_params, params), running))

    def load_weights(self, change: WeightChange) -> WeightsChanged:
        """Serves weights from files. Raises WeightsRefused."""
        return self._wait(self._engine.change_weights(change))

    def pause(self, *, finish: bool = False) -> None:
        """See `api.Engine.pause`."""
        self._wait(self._engine.pause(finish=finish))

    def resume(self) -> None:
        self._wait(self._engine.resume())

    def sleep(self, *, drop_weights: bool = False) -> None:
        """Frees the KV cache, and the weights if `drop_weights`, for the trainer's step."""
        self._wait(self._engine.sleep(drop_weights=drop_weights))

    def wake(self) -> None:
        self._wait(self._engine.wake())

    # Private.

    def _wait[T](self, doing: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(doing, self._loop).result()

    async def _all(
        self, prompts: Sequence[Prompt], params: Sequence[SamplingParams]
    ) -> list[Output]:
        requests = [self._request(*each) for each in zip(prompts, params, strict=True)]
        return list(await asyncio.gather(*map(self._one, requests)))

    async def _one(self, request: Request) -> Output:
        events: list[TokenEvent] = []
        async for some in self._engine.generate(request):
            events += some
        tokens = tuple(event.token for event in events if event.token is not None)
        finish = events[-1].finish or FinishReason.ABORT
        shown = tokens[:-1] if finish is FinishReason.STOP else tokens
        text = b"".join(self._source.tokenizer.token_bytes(token) for token in shown)
        logprobs = tuple(event.logprobs for event in events if event.logprobs is not None)
        return Output(
            prompt=request.prompt,
            tokens=tokens,
            text=text.decode("utf-8", "replace"),
            finish=finish,
            logprobs=logprobs or None,
            prompt_logprobs=events[0].prompt_logprobs,
            weights=tuple(sorted({event.weights for event in events})),
        )

    def _request(self, prompt: Prompt, params: SamplingParams) -> Request:
        tokenizer = self._source.tokenizer
        ids = tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        stops = params.stop_token_ids | tokenizer.eos_token_ids
        return Request(
            id=f"library-{next(self._ids)}",
            prompt=tuple(ids),
            params=replace(params, stop_token_ids=stops),
        )
