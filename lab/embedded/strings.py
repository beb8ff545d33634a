"""The split between training and evaluation, and the strings that both are made of.

Whether an instance (an operand pair, a word, a fact in one phrasing, a list) belongs to training
or to evaluation is decided by its hash alone, so no seed can move it across.
"""

import json
import re
import zlib
from collections.abc import Callable
from random import Random
from typing import Literal

from lab.embedded import tables, tool_tables

Split = Literal["train", "eval"]


def held_out(kind: str, instance: object) -> bool:
    """Whether an instance is kept for evaluation: one in ten, by its hash."""
    return zlib.crc32(f"{kind}:{instance}".encode()) % 10 == 0


def draw[T](split: Split, kind: str, sample: Callable[[], T], key: Callable[[T], object]) -> T:
    """Samples until an instance falls on the wanted side of the split."""
    while True:
        instance = sample()
        if held_out(kind, key(instance)) == (split == "eval"):
            return instance


# Words that training draws from, and words kept out of it: two of them still stand in a template
# (a room, an animal), and chance invents one now and then, but none is spelled or listed.
KNOWN_WORDS = tuple(word for word in tables.WORDS if not held_out("word", word))
UNSEEN_WORDS = tuple(word for word in tables.WORDS if held_out("word", word))

_ONSETS = tables.split(
    "b c d f g h j k l m n p r s t v w z br ch cl dr fl gr kr pl sh sk st th tr qu"
)
_VOWELS = tables.split("a e i o u a e i o u ai ea ee oo ou y")
_CODAS = ("", "", "", *tables.split("l m n r s t d k x nd ng rt sk lm st ck"))


def _template_words() -> tuple[str, ...]:
    """Words of the questions and answers themselves, which the tokenizer mostly keeps whole."""
    texts = (
        tables.CAPITALS,
        tables.CAPITAL_QUESTIONS,
        tables.FACTS,
        tables.FACT_QUESTIONS,
        tables.CHATS,
        tables.UNKNOWN_QUESTIONS,
        tables.SYSTEM_PROMPTS,
        tables.FILLERS,
        tool_tables.TOOLS,
        tables.ADJECTIVES,
        tool_tables.JOBS,
        tool_tables.DAYS,
        tool_tables.ROOMS,
        tool_tables.SKIES,
        tables.KINDS,
        tool_tables.TOOL_VERBS,
        tool_tables.TOOL_FIELDS,
    )
    words = set(re.findall(r"[A-Za-z]{2,}", json.dumps(texts).replace("\\n", " ")))
    return tuple(sorted(words - set(UNSEEN_WORDS)))


TEMPLATE_WORDS = _template_words()


def invented_word(rng: Random) -> str:
    """A word of no language, or two halves of known words."""
    if rng.random() < 0.3:
        first, second = rng.sample(KNOWN_WORDS, 2)
        return first[: rng.randint(2, 4)] + second[-rng.randint(2, 4) :]
    if rng.random() < 0.15:
        return "".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(3, 8)))
    parts = [rng.choice(_ONSETS) + rng.choice(_VOWELS) for _ in range(rng.randint(1, 3))]
    return "".join(parts) + rng.choice(_CODAS)


def word(rng: Random) -> str:
    return rng.choice(KNOWN_WORDS) if rng.random() < 0.5 else invented_word(rng)


def word_to_spell(rng: Random, split: Split) -> str:
    """A known or invented word to train on; an unseen or an invented one to evaluate with."""
    if rng.random() < 0.5:
        invented = draw(split, "word", lambda: invented_word(rng), str)
        return invented.capitalize() if rng.random() < 0.1 else invented
    if split == "eval":
        return rng.choice(UNSEEN_WORDS)
    return rng.choice(KNOWN_WORDS if rng.random() < 0.4 else TEMPLATE_WORDS)


def name(rng: Random) -> str:
    return invented_word(rng).capitalize()


def full_name(rng: Random) -> str:
    return " ".join(name(rng) for _ in range(rng.choice((1, 2, 2))))


def city(rng: Random) -> str:
    return rng.choice(tables.CAPITALS)[1] if rng.random() < 0.5 else name(rng)


def number(rng: Random, low: int = 2, high: int = 6) -> str:
    """A number of `low` to `high` digits."""
    digits = rng.randint(low, high)
    return str(rng.randrange(10 ** (digits - 1), 10**digits))


def code(rng: Random) -> str:
    letters = "".join(rng.choices("ABCDEFGHJKLMNPQRSTUVWXYZ", k=rng.randint(1, 3)))
    return f"{letters}-{number(rng)}"


def phrase(rng: Random, low: int = 2, high: int = 4) -> str:
    """`low` to `high` words, known or invented."""
    return " ".join(word(rng) for _ in range(rng.randint(low, high)))
