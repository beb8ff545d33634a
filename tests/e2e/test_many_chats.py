"""The official client, many chats at once, a server process with the embedded model."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import openai
import pytest

from tests.e2e.process import Server, small_model

MODEL = "jaxserve-embedded"

TOPICS = (
    "Hello!",
    "Who are you?",
    "What is the capital of France?",
    "What is 47 + 38?",
    "Spell the word garden.",
    "Sort these words: pear, apple, fig, cherry",
    "Reverse the word lantern.",
    "Thank you, bye!",
)


class Chat(NamedTuple):
    """One conversation, and whether its client goes away in the middle."""

    content: str
    options: dict[str, Any]
    stream: bool
    dropped: bool


def make_chats(count: int) -> list[Chat]:
    """Short and long prompts, greedy and seeded, streamed and not; every third is dropped."""
    chats = []
    for index in range(count):
        content = f"{TOPICS[index % len(TOPICS)]}"
        if index % 8 == 3:  # about five hundred tokens, several steps
            entries = "\n".join(f"key {index}{n}: value {n * 37 % 101}" for n in range(40))
            content = f"{entries}\n{content}"
        options: dict[str, Any] = {"max_tokens": 16 + index % 5 * 12}
        if index % 2:
            options |= {"temperature": 1.0, "seed": index}
        dropped = index % 3 == 2
        chats.append(Chat(content, options, stream=dropped or index % 4 < 2, dropped=dropped))
    return chats


class Completion(NamedTuple):
    """Of a prompt of token ids."""

    prompt: list[int]
    options: dict[str, Any]
    dropped: bool = False


async def run(client: openai.AsyncOpenAI, chat: Chat | Completion) -> str | None:
    """The answer; None if it was dropped."""
    if isinstance(chat, Completion):
        whole = await client.completions.create(
            model="small", prompt=chat.prompt, extra_body=chat.options
        )
        return whole.choices[0].text
    messages: Any = [{"role": "user", "content": chat.content}]
    if not chat.stream:
        reply = await client.chat.completions.create(model=MODEL, messages=messages, **chat.options)
        message = reply.choices[0].message
        return f"{getattr(message, 'reasoning', '')}|{message.content}"
    stream = await client.chat.completions.create(
        model=MODEL, messages=messages, stream=True, **chat.options
    )
    thoughts, texts, chunks = [], [], 0
    async for chunk in stream:
        delta = chunk.choices[0].delta
        thoughts.append(getattr(delta, "reasoning", None) or "")
        texts.append(delta.content or "")
        chunks += 1
        if chat.dropped and chunks == 3:
            await stream.close()
            return None
    return f"{''.join(thoughts) or None}|{''.join(texts)}"


@pytest.fixture(scope="module")
def small_pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A model that takes seconds to compile, and pages for four sequences of 92 tokens."""
    folder = small_model(tmp_path_factory.mktemp("model"))
    flags = ("--kv-cache-memory-bytes", "420k", "--max-model-len", "128", "--block-size", "16")
    with Server("--model", str(folder), "--served-model-name", "small", *flags) as running:
        yield running


def client_of(server: Server) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


async def assert_like_alone(server: Server, chats: Sequence[Chat | Completion]) -> None:
    """Run the chats together, then each alone; kept answers must be equal."""
    free = (await server.load())["free_pages"]
    async with client_of(server) as client:
        together = await asyncio.gather(*(run(client, chat) for chat in chats))
        assert (await server.settled())["free_pages"] == free, "pages are still held"
        for chat, answer in zip(chats, together, strict=True):
            if chat.dropped:
                assert answer is None
            else:
                assert answer == await run(client, chat), chat
    assert (await server.settled())["free_pages"] == free
    assert await server.metric('jaxserve_compiles_total{phase="serving"}') == 0


async def test_many_chats_get_the_answers_they_get_alone(server: Server) -> None:
    await assert_like_alone(server, make_chats(24))


@pytest.mark.slow
async def test_preempted_completions_get_the_answers_they_get_alone(small_pool: Server) -> None:
    # Short answers teach the admission to expect short ones; then come long ones.
    short = Completion([1, 2, 3], {"max_tokens": 80, "stop_token_ids": list(range(256))})
    async with client_of(small_pool) as client:
        for _ in range(4):
            await run(client, short)
    longer = {"max_tokens": 80, "ignore_eos": True}
    asked = [
        Completion([7 + index] * 12, {**longer, "temperature": index % 2, "seed": index})
        for index in range(10)
    ]
    await assert_like_alone(small_pool, asked)
    assert await small_pool.metric("vllm:num_preemptions_total") > 0


async def test_choices_stops_logprobs_and_token_prompts_work_together(server: Server) -> None:
    async with client_of(server) as client:
        reply = await client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "Who are you?"}],
            n=3,
            temperature=1.0,
            seed=1,
            max_tokens=30,
            logprobs=True,
            top_logprobs=5,
        )
        assert [choice.index for choice in reply.choices] == [0, 1, 2]
        assert reply.usage is not None
        assert reply.usage.total_tokens == reply.usage.prompt_tokens + reply.usage.completion_tokens
        logprobs = reply.choices[0].logprobs
        assert logprobs is not None and logprobs.content
        assert all(len(entry.top_logprobs) == 5 for entry in logprobs.content)

        whole = await client.completions.create(model=MODEL, prompt=[5, 6, 7, 8], max_tokens=24)
        text = whole.choices[0].text
        stop = text[len(text) // 2 : len(text) // 2 + 3]
        cut = await client.completions.create(
            model=MODEL, prompt=[5, 6, 7, 8], max_tokens=24, stop=stop
        )
        assert cut.choices[0].finish_reason == "stop"
        assert cut.choices[0].text == text[: text.index(stop)]


async def test_what_cannot_be_served_is_refused_with_numbers(server: Server) -> None:
    async with client_of(server) as client:
        with pytest.raises(openai.BadRequestError, match="4096"):
            await client.completions.create(model=MODEL, prompt=[5] * 5000, max_tokens=1)
        with pytest.raises(openai.BadRequestError, match="999999"):
            await client.completions.create(model=MODEL, prompt=[999_999], max_tokens=1)
        with pytest.raises(openai.NotFoundError, match="gpt-4"):
            await client.completions.create(model="gpt-4", prompt="hi", max_tokens=1)
