"""The requests of `bench_speculation.py`: synthetic ones for a model with known output, or text."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from chain_weights import successors

ROOT = Path(__file__).parents[1]
EDIT_EVERY, PIECE, PASSAGE = 24, 6, 32
"""Tokens: one in EDIT_EVERY is changed in `made-edit`, pieces of `made-misleading` have PIECE,
passages of `made-quotes` have PASSAGE."""


MADE = ("made-edit", "made-quotes", "made-fresh", "made-misleading")
FOLLOWING = successors()


def made(name: str, rng: random.Random, prompt_tokens: int, output_tokens: int) -> dict[str, Any]:
    """A request whose answer is known: each token is followed by its successor."""
    token = rng.randrange(len(FOLLOWING))
    prompt = [token]
    answer = [token := FOLLOWING[token] for _ in range(output_tokens)]

    def other() -> int:
        return rng.randrange(len(FOLLOWING))

    filler = [other() for _ in range(prompt_tokens - 1)]
    if name == "made-edit":
        shown = [other() if n % EDIT_EVERY == EDIT_EVERY - 1 else t for n, t in enumerate(answer)]
        filler[-len(shown) - 8 : -8] = [prompt[0], *shown[:-1]]
    elif name in ("made-misleading", "made-quotes"):
        size = PIECE if name == "made-misleading" else PASSAGE
        pieces = [answer[n : n + size] for n in range(0, len(answer), size)]
        rng.shuffle(pieces)
        shown = [each for piece in pieces for each in (*piece, other(), other())]
        filler[-len(shown) - 8 : -8] = shown
    return {"prompt": (filler + prompt)[-prompt_tokens:]}


def _edit(rng: random.Random) -> dict[str, Any]:
    file = rng.choice(sorted((ROOT / "jaxserve" / "scheduler").glob("*.py")))
    lines = file.read_text(encoding="utf-8").splitlines()
    first = rng.randrange(max(len(lines) - 60, 1))
    text = "\n".join(lines[first : first + 60])
    name = rng.choice(sorted(set(re.findall(r"\b[a-z]{4,12}\b", text))) or ["self"])
    return _chat(
        f"Rename `{name}` to `{name}_{rng.randrange(100)}` in this code. Answer with the whole "
        f"code and nothing else.\n\n```python\n{text}\n```"
    )


def _quotes(rng: random.Random) -> dict[str, Any]:
    pages = sorted((ROOT / "docs").glob("*.md"))
    text = rng.choice(pages).read_text(encoding="utf-8")[:8000]
    parts = [part for part in text.split("\n\n") if len(part) > 80]
    subject = rng.choice(re.findall(r"\b[a-z]{5,12}\b", rng.choice(parts or [text])) or ["it"])
    return _chat(
        f"Answer from this page alone. Quote, word for word, the three passages that say most on "
        f"{subject}, each with one sentence of your own before it.\n\n{text}"
    )


def _essay(rng: random.Random) -> dict[str, Any]:
    subjects = "rivers bridges bread clocks maps glass paper wool salt tea ships stars soil bees"
    one, other = rng.sample(subjects.split(), 2)
    return _chat(f"Write a short essay, number {rng.randrange(1000)}, on {one} and {other}.")


def _chat(text: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}]}


TEXTS: dict[str, Callable[[random.Random], dict[str, Any]]] = {
    "text-edit": _edit,
    "text-quotes": _quotes,
    "text-chat": _essay,
}


def body(name: str, seed: str, prompt_tokens: int, output_tokens: int) -> dict[str, Any]:
    """A request of a workload, determined by the seed."""
    rng = random.Random(seed)
    text = name in TEXTS
    return {
        "model": "served",
        **(TEXTS[name](rng) if text else made(name, rng, prompt_tokens, output_tokens)),
        "max_tokens": output_tokens,
        "temperature": 0,
        "ignore_eos": not text,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
