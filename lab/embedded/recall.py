"""Long lists of entries among filler, and questions about single entries."""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from lab.embedded import tables
from lab.embedded.chat import Encoder, Message, assistant, system, turn, user
from lab.embedded.strings import KNOWN_WORDS, Split, code, draw, invented_word, name, number, word
from lab.embedded.tasks import Exchange

_LINES = ("{0}: {1}", "{0} = {1}", "- {0}: {1}", "The {2} of {0} is {1}.", "{0} has {2} {1}.")


def _keys(rng: Random) -> Callable[[], str]:
    """One way of making keys for a list; the last makes keys that differ in three digits only."""
    only = rng.choice((rng.choice(KNOWN_WORDS), invented_word(rng)))
    return rng.choice(
        (
            lambda: f"{rng.choice(tables.ADJECTIVES)}-{rng.choice(KNOWN_WORDS)}",
            lambda: name(rng),
            lambda: f"{rng.choice(KNOWN_WORDS)} {rng.randint(10, 999)}",
            lambda: code(rng),
            lambda: f"{only} {rng.randint(100, 999)}",
        )
    )


def _values(rng: Random) -> Callable[[], str]:
    return rng.choice(
        (
            lambda: number(rng, 3, 6),
            lambda: number(rng, 3, 6),
            lambda: code(rng),
            lambda: word(rng),
        )
    )


def _filler(rng: Random) -> str:
    things = rng.choice(KNOWN_WORDS), word(rng), rng.choice(tables.ADJECTIVES), name(rng)
    return rng.choice(tables.FILLERS).format(*things)


@dataclass(frozen=True)
class RecallList:
    """A text of entries among filler, what an entry is called, and the entries by key."""

    text: str
    kind: str
    entries: dict[str, str]


def recall_list(rng: Random, encoder: Encoder, split: Split, max_tokens: int) -> RecallList:
    """As many lines as fit into `max_tokens`; an entry is on one side of the split."""
    make_key, make_value = _keys(rng), _values(rng)
    line, kind = rng.choice(_LINES), rng.choice(tables.KINDS)
    filler_share = rng.choice((0.0, 0.0, 0.3, 0.6, 0.85))
    entries: dict[str, str] = {}
    lines: list[str] = []
    used = 0
    while used < max_tokens:
        batch: list[tuple[str, str, str]] = []
        for _ in range(max(1, (max_tokens - used) // 12)):
            if (lines or batch) and rng.random() < filler_share:
                batch.append((_filler(rng), "", ""))
            else:
                key, value = draw(split, "entry", lambda: (make_key(), make_value()), str)
                batch.append((line.format(key, value, kind), key, value))
        lengths = encoder.lengths([text for text, _, _ in batch])
        for (text, key, value), length in zip(batch, lengths, strict=True):
            used += length + 1
            if used >= max_tokens and entries:
                break
            if key not in entries:
                lines.append(text)
                entries |= {key: value} if key else {}
    return RecallList("\n".join(lines), kind, entries)


def recall_question(rng: Random, recall: RecallList, key: str) -> Exchange:
    """Asks for the value of one key."""
    kind, value = recall.kind, recall.entries[key]
    question, answer = rng.choice(
        (
            (f"What is the {kind} of {key}?", f"The {kind} of {key} is {value}."),
            (f"Which {kind} does {key} have?", f"The {kind} of {key} is {value}."),
            (f"Give only the {kind} of {key}.", value),
            (f"Look up {key}.", f"{key}: {value}"),
        )
    )
    return Exchange(question, answer, "", "contains", value)


def recall_messages(
    rng: Random, encoder: Encoder, split: Split, list_tokens: int, num_questions: int
) -> tuple[list[Message], str]:
    """A list of `list_tokens`, questions with their answers, and the last answer's value.

    The list stands in the system turn, before the first question, or in a turn of its own.
    """
    recall = recall_list(rng, encoder, split, list_tokens)
    keys = rng.choices(list(recall.entries), k=num_questions)
    first, *others = [recall_question(rng, recall, key) for key in keys]
    place = rng.randrange(3)
    if place == 0:
        intro = rng.choice(("Answer from this list.", "You know these entries:"))
        messages = [system(f"{intro}\n{recall.text}"), *turn(first.user, first.answer)]
    elif place == 1:
        intro = rng.choice(("Here is a list.", "Read this:", f"Find a {recall.kind}."))
        messages = turn(f"{intro}\n{recall.text}\n\n{first.user}", first.answer)
    else:
        intro = rng.choice(("Remember this.", "Keep this list:"))
        messages = [user(f"{intro}\n{recall.text}"), assistant("I will remember it.")]
        messages += turn(first.user, first.answer)
    for asked in others:
        messages += turn(asked.user, asked.answer)
    return messages, recall.entries[keys[-1]]
