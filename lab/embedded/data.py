"""Generates the embedded model's training chats and its evaluation set, both from a seed.

Run as a script it writes the tokenizer and the evaluation set next to the model:

    python -m lab.embedded.data --out checkpoints/jaxserve_checkpoints/embedded
"""

import argparse
import gzip
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from lab.embedded import tables
from lab.embedded.chat import (
    VOCAB_SIZE,
    Encoder,
    Message,
    assistant,
    render,
    system,
    tokenizer_config,
    train_tokenizer,
    turn,
    user,
)
from lab.embedded.recall import recall_messages
from lab.embedded.strings import Split, draw, name
from lab.embedded.tasks import (
    Exchange,
    add_subtract,
    add_subtract_3_digits,
    chat,
    fact,
    json_object,
    product,
    repeat,
    repeat_long,
    reverse_letters,
    reverse_words,
    sort_words,
    spell,
    times_table,
    unknown,
)
from lab.embedded.tools import (
    call_message,
    invented_tool_use,
    known_tool_use,
    offered_with,
    tool_use,
)

EVAL_SEED = 20_260
TOKENIZER_SEED = 7
# Rows of one block share a length; a document that is shorter is padded at its end.
BLOCK_LENGTHS = {"short": 128, "medium": 512, "long": 2304, "longest": 4096}

Task = Callable[[Random, Split], Exchange]
_TASKS: dict[Task, float] = {
    chat: 8,
    fact: 10,
    add_subtract: 22,
    add_subtract_3_digits: 8,
    times_table: 3,
    product: 10,
    spell: 12,
    reverse_letters: 14,
    sort_words: 12,
    reverse_words: 4,
    json_object: 8,
    repeat: 4,
    unknown: 3,
}


# -- Training -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Conversation:
    """A finished chat; `thinking` says whether its last turn was asked with thinking on."""

    messages: list[Message]
    tools: list[dict[str, Any]] | None = None
    thinking: bool = False


def _maybe_system(rng: Random) -> list[Message]:
    return [system(rng.choice(tables.SYSTEM_PROMPTS))] if rng.random() < 0.25 else []


def _name_turns(rng: Random, split: Split) -> tuple[list[Message], Exchange]:
    """A user who gives a name, and the later question what it was."""
    given = draw(split, "given_name", lambda: name(rng), str)
    introduction = rng.choice(("My name is {}.", "I am {}.", "Hi, my name is {}.", "Call me {}."))
    question = rng.choice(("What is my name?", "Who am I?", "Do you remember my name?"))
    asked = Exchange(question, f"Your name is {given}.", "", "contains", given)
    return turn(introduction.format(given), f"Nice to meet you, {given}!"), asked


def mixed_chat(rng: Random, encoder: Encoder, max_tokens: int) -> Conversation:
    """Questions of many tasks in a row, `max_tokens` or slightly less in all."""
    messages, thinking = _maybe_system(rng), rng.random() < 0.5
    last: Exchange | None = None
    if max_tokens >= 64 and rng.random() < 0.12:
        opening, last = _name_turns(rng, "train")
        messages += opening
    room = max_tokens - sum(encoder.lengths([m["content"] for m in messages])) - 80
    asked: list[Exchange] = []
    while not asked or room > 0:
        (task,) = rng.choices(list(_TASKS), weights=list(_TASKS.values()))
        asked.append(task(rng, "train"))
        room -= 16 + sum(encoder.lengths([asked[-1].user, asked[-1].answer]))
    *past, final = [*asked, last] if last else asked
    for exchange in past:
        messages += turn(exchange.user, exchange.answer)
    messages += turn(final.user, final.answer, final.thinking if thinking else "")
    return Conversation(messages, thinking=thinking)


def tool_chat(rng: Random) -> Conversation:
    """A request with tools: ends with the call, with the answer after it, or needs no tool."""
    messages, thinking = _maybe_system(rng), rng.random() < 0.5
    if rng.random() < 0.2:
        asked = rng.choice((chat, fact, add_subtract, unknown))(rng, "train")
        messages += turn(asked.user, asked.answer, asked.thinking if thinking else "")
        return Conversation(messages, offered_with(rng, None), thinking)
    if rng.random() < 0.25:
        asked = rng.choice((chat, fact))(rng, "train")
        messages += turn(asked.user, asked.answer)
    use = tool_use(rng, "train")
    messages += [user(use.request), call_message(use.call)]
    if rng.random() < 0.6:
        messages += [{"role": "tool", "content": use.result}, assistant(use.answer)]
        if rng.random() < 0.3:
            asked = chat(rng, "train")
            messages += turn(asked.user, asked.answer)
    return Conversation(messages, use.tools, thinking)


def recall_chat(rng: Random, encoder: Encoder, max_tokens: int) -> Conversation:
    """A list and several questions about it, `max_tokens` or slightly less in all."""
    num_questions = rng.randint(1, max(2, min(12, max_tokens // 80)))
    list_tokens = max(24, max_tokens - 30 - 52 * num_questions)
    messages, _ = recall_messages(rng, encoder, "train", list_tokens, num_questions)
    return Conversation(messages, thinking=rng.random() < 0.5)


def long_repeat_chat(rng: Random) -> Conversation:
    asked = repeat_long(rng, "train")
    return Conversation(turn(asked.user, asked.answer), thinking=rng.random() < 0.5)


def conversation(rng: Random, encoder: Encoder, block: str) -> Conversation:
    """A training chat meant for one block's rows."""
    length, chance = BLOCK_LENGTHS[block], rng.random()
    if block == "short":
        if chance < 0.12:
            return recall_chat(rng, encoder, length - 4)
        return mixed_chat(rng, encoder, rng.choice((24, 24, 64, length)))
    if block == "medium":
        if chance < 0.35:
            return tool_chat(rng)
        if chance < 0.62:
            return recall_chat(rng, encoder, rng.randint(160, length))
        return long_repeat_chat(rng) if chance < 0.68 else mixed_chat(rng, encoder, length)
    if chance < 0.12:
        return mixed_chat(rng, encoder, length)
    return recall_chat(rng, encoder, rng.randint(length // 3, length))


def block_rows(
    seed: int, step: int, block: str, num_rows: int, encoder: Encoder
) -> tuple[np.ndarray, np.ndarray]:
    """Rows of one training step: token ids (uint16) and which of them are scored (bool)."""
    rng = Random(f"{seed}/{step}/{block}")
    length = BLOCK_LENGTHS[block]
    ids = np.full((num_rows, length), encoder.stop_ids[1], np.uint16)
    scored = np.zeros((num_rows, length), np.bool_)
    row = 0
    while row < num_rows:
        drawn = conversation(rng, encoder, block)
        tokens = encoder.scored(drawn.messages, drawn.tools, thinking=drawn.thinking)
        if len(tokens.ids) <= length:
            ids[row, : len(tokens.ids)] = tokens.ids
            scored[row, : len(tokens.ids)] = tokens.scored
            row += 1
    return ids, scored


# -- Evaluation ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """One evaluation question, as an OpenAI request would put it, and the check of its answer."""

    task: str
    messages: list[Message]
    check: str
    expect: Any
    tools: list[dict[str, Any]] | None = None
    thinking: bool = False
    max_tokens: int = 96


def _exchange_cases(rng: Random) -> Iterator[Case]:
    tasks: tuple[tuple[str, Task, int, bool], ...] = (
        ("chat", chat, 60, False),
        ("unknown", unknown, 60, False),
        ("fact", fact, 120, False),
        ("add_subtract", add_subtract, 200, False),
        ("add_subtract_thinking", add_subtract, 200, True),
        ("add_subtract_3_digits", add_subtract_3_digits, 100, False),
        ("add_subtract_3_digits_thinking", add_subtract_3_digits, 100, True),
        ("times_table", times_table, 100, False),
        ("product", product, 100, False),
        ("product_thinking", product, 100, True),
        ("spell", spell, 100, False),
        ("reverse_letters", reverse_letters, 100, False),
        ("sort_words", sort_words, 100, False),
        ("reverse_words", reverse_words, 100, False),
        ("repeat", repeat, 100, False),
        ("repeat_long", repeat_long, 50, False),
        ("json", json_object, 150, False),
    )
    for task, make, count, thinking in tasks:
        max_tokens = 384 if make is repeat_long else 96
        for _ in range(count):
            asked = make(rng, "eval")
            messages = [user(asked.user)]
            yield Case(task, messages, asked.check, asked.expect, None, thinking, max_tokens)
    for _ in range(50):
        opening, question = _name_turns(rng, "eval")
        between = fact(rng, "eval")
        messages = [*opening, *turn(between.user, between.answer), user(question.user)]
        yield Case("name_memory", messages, question.check, question.expect)


def _tool_cases(rng: Random) -> Iterator[Case]:
    for task, make in (("tool_call", known_tool_use), ("new_tool_call", invented_tool_use)):
        for _ in range(100):
            use = make(rng, "eval")
            yield Case(task, [user(use.request)], "tool_call", use.call, use.tools)
    for index in range(100):
        use = known_tool_use(rng, "eval")
        call_id = f"call_{index}"
        result = {"role": "tool", "tool_call_id": call_id, "content": use.result}
        messages = [user(use.request), call_message(use.call, call_id), result]
        yield Case("tool_answer", messages, "equals", use.answer, use.tools)
    for _ in range(50):
        asked = rng.choice((fact, add_subtract))(rng, "eval")
        tools = offered_with(rng, None)
        yield Case("no_tool", [user(asked.user)], asked.check, asked.expect, tools)


def _recall_cases(rng: Random, encoder: Encoder) -> Iterator[Case]:
    """One question after a list that fills a context; recall_turns asks three others before."""
    for task, context, questions, count in (
        ("recall_256", 256, 1, 100),
        ("recall_512", 512, 1, 100),
        ("recall_1k", 1024, 1, 100),
        ("recall_2k", 2048, 1, 100),
        ("recall_3k", 3072, 1, 50),
        ("recall_4k", 4064, 1, 50),
        ("recall_turns", 1024, 4, 100),
    ):
        for _ in range(count):
            room = context - 20 - 44 * questions
            messages, value = recall_messages(rng, encoder, "eval", room, questions)
            yield Case(task, messages[:-1], "contains", value, max_tokens=32)


def eval_cases(encoder: Encoder, seed: int = EVAL_SEED) -> list[Case]:
    """The evaluation set: the same for a seed, disjoint from what is trained on."""
    rng = Random(seed)
    return [*_exchange_cases(rng), *_tool_cases(rng), *_recall_cases(rng, encoder)]


def write_cases(path: Path, cases: list[Case]) -> None:
    """One JSON object a line, gzipped without a time stamp so that equal sets are equal files."""
    lines = "".join(json.dumps(asdict(case)) + "\n" for case in cases)
    path.write_bytes(gzip.compress(lines.encode(), mtime=0))


# -- Tokenizer ----------------------------------------------------------------------------------


class _RoughEncoder(Encoder):
    """Stands in for the encoder before there is a tokenizer: about three characters a token."""

    def __init__(self) -> None:
        pass

    def lengths(self, texts: list[str]) -> list[int]:
        return [len(text) // 3 for text in texts]


def tokenizer_texts(seed: int = TOKENIZER_SEED, count: int = 12_000) -> Iterator[str]:
    """Training chats to train the tokenizer on."""
    rng, rough = Random(seed), _RoughEncoder()
    for _ in range(count):
        drawn = conversation(rng, rough, rng.choice(("short", "medium", "medium")))
        yield render(drawn.messages, drawn.tools)


def write_tokenizer(folder: Path) -> Encoder:
    """Trains the tokenizer and writes tokenizer.json and tokenizer_config.json."""
    tokenizer = train_tokenizer(tokenizer_texts())
    assert tokenizer.get_vocab_size() <= VOCAB_SIZE
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = json.dumps(tokenizer_config(tokenizer), indent=2) + "\n"
    (folder / "tokenizer_config.json").write_text(config)
    return Encoder(tokenizer)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of the model")
    folder: Path = parser.parse_args().out
    encoder = write_tokenizer(folder)
    cases = eval_cases(encoder)
    write_cases(folder / "eval.jsonl.gz", cases)
    print(f"{len(cases)} evaluation cases and a tokenizer written to {folder}")


if __name__ == "__main__":
    main()
