"""Questions of one turn: each task draws a question with its answer from a random generator."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

from lab.embedded import tables, tool_tables
from lab.embedded.strings import (
    KNOWN_WORDS,
    Split,
    city,
    code,
    draw,
    full_name,
    invented_word,
    name,
    number,
    phrase,
    word,
    word_to_spell,
)


@dataclass(frozen=True)
class Exchange:
    """One question with its answer, the reasoning that leads there, and how to check an answer."""

    user: str
    answer: str
    thinking: str = ""
    check: str = "equals"
    expect: Any = None


# -- Arithmetic ---------------------------------------------------------------------------------

_PLACES = ("ones", "tens", "hundreds")


def _ask_result(rng: Random, expression: str, words: str) -> str:
    return rng.choice(
        (
            f"What is {expression}?",
            f"{expression}",
            f"{expression} =",
            f"Compute {expression}.",
            f"Calculate {expression}",
            f"What is {words}?",
            f"How much is {words}?",
        )
    )


def _small_operands(rng: Random) -> tuple[int, int]:
    top = 10 if rng.random() < 0.2 else 100
    return rng.randrange(top), rng.randrange(top)


def add_subtract(rng: Random, split: Split) -> Exchange:
    """A sum or a difference of numbers below 100; an unordered pair is on one side of the split."""
    return _sum_or_difference(rng, *draw(split, "operands", lambda: _small_operands(rng), sorted))


def add_subtract_3_digits(rng: Random, split: Split) -> Exchange:
    """A sum or a difference of numbers below 1000, the first above 99."""

    def sample() -> tuple[int, int]:
        return rng.randrange(100, 1000), rng.randrange(1000)

    return _sum_or_difference(rng, *draw(split, "operands", sample, sorted))


def _sum_or_difference(rng: Random, a: int, b: int) -> Exchange:
    if rng.random() < 0.5:
        question = _ask_result(rng, f"{a} + {b}", f"{a} plus {b}")
        return Exchange(question, f"{a} + {b} = {a + b}", _add_columns(a, b), "number", a + b)
    if a < b and rng.random() < 0.7:
        a, b = b, a
    thinking = _subtract_columns(max(a, b), min(a, b))
    if a < b:
        thinking = f"{a} is less than {b}: the result is negative\n{thinking}"
    question = _ask_result(rng, f"{a} - {b}", f"{a} minus {b}")
    return Exchange(question, f"{a} - {b} = {a - b}", thinking, "number", a - b)


def _columns(a: int, b: int) -> list[tuple[str, int, int]]:
    """(place, digit of a, digit of b) from the ones up."""
    width = max(2, len(str(max(a, b))))
    pairs = zip(f"{a:0{width}}"[::-1], f"{b:0{width}}"[::-1], strict=True)
    return [(place, int(x), int(y)) for place, (x, y) in zip(_PLACES, pairs, strict=False)]


def _add_columns(a: int, b: int) -> str:
    lines: list[str] = []
    carry = 0
    for place, x, y in _columns(a, b):
        total = x + y + carry
        lines.append(f"{place}: {x} + {y}{' + 1' if carry else ''} = {total}")
        carry = total // 10
    return "\n".join(lines)


def _subtract_columns(a: int, b: int) -> str:
    lines: list[str] = []
    borrow = 0
    for place, x, y in _columns(a, b):
        lend = x - borrow < y
        taken = " - 1" if borrow else ""
        result = x - borrow - y + 10 * lend
        lines.append(f"{place}: {x}{' + 10' if lend else ''} - {y}{taken} = {result}")
        borrow = int(lend)
    return "\n".join(lines)


def times_table(rng: Random, split: Split) -> Exchange:
    """A product of numbers up to 10. A table to know by heart: nothing of it is held out."""
    a, b = rng.randint(0, 10), rng.randint(0, 10)
    question = _ask_result(rng, f"{a} * {b}", f"{a} times {b}")
    return Exchange(question, f"{a} * {b} = {a * b}", f"{a} * {b} = {a * b}", "number", a * b)


def product(rng: Random, split: Split) -> Exchange:
    """A product of a two-digit and a one-digit number."""
    a, b = draw(split, "product", lambda: (rng.randint(11, 99), rng.randint(2, 9)), str)
    tens, ones = a // 10 * 10, a % 10
    thinking = (
        f"{tens} * {b} = {tens * b}\n{ones} * {b} = {ones * b}\n{tens * b} + {ones * b} = {a * b}"
    )
    question = _ask_result(rng, f"{a} * {b}", f"{a} times {b}")
    return Exchange(question, f"{a} * {b} = {a * b}", thinking, "number", a * b)


# -- Words --------------------------------------------------------------------------------------


def spell(rng: Random, split: Split) -> Exchange:
    """A word, letter by letter."""
    text = word_to_spell(rng, split)
    question = rng.choice(
        ("Spell {}.", "Spell the word {}.", "How do you spell {}?", "Spell {} letter by letter.")
    ).format(text)
    answer = "-".join(text)
    return Exchange(question, answer, "", "equals", answer)


def reverse_letters(rng: Random, split: Split) -> Exchange:
    """The letters of a word from last to first."""
    text = word_to_spell(rng, split)
    question = rng.choice(
        ("Reverse {}.", "Reverse the word {}.", "Spell {} backwards.", "Write {} backwards.")
    ).format(text)
    answer = "-".join(reversed(text))
    return Exchange(question, answer, "", "equals", answer)


def _known_list(rng: Random, split: Split) -> list[str]:
    def sample() -> list[str]:
        return rng.sample(KNOWN_WORDS, rng.randint(3, 6))

    return draw(split, "list", sample, sorted)


def sort_words(rng: Random, split: Split) -> Exchange:
    """Known words in alphabetical order."""
    words = _known_list(rng, split)
    listed = rng.choice((", ", " ")).join(words)
    question = rng.choice(
        (
            f"Sort these words: {listed}",
            f"Sort: {listed}",
            f"Put these words in alphabetical order: {listed}",
            f"Sort alphabetically: {listed}",
        )
    )
    answer = ", ".join(sorted(words))
    return Exchange(question, answer, "", "equals", answer)


def reverse_words(rng: Random, split: Split) -> Exchange:
    """Words, known or not, from last to first."""
    words = _known_list(rng, split)
    if rng.random() < 0.5:
        words = [invented_word(rng) for _ in words]
    listed = rng.choice((", ", " ")).join(words)
    question = rng.choice(
        (
            f"Reverse these words: {listed}",
            f"Reverse the list: {listed}",
            f"Put these words in reverse order: {listed}",
        )
    )
    answer = ", ".join(reversed(words))
    return Exchange(question, answer, "", "equals", answer)


def _repeat(rng: Random, split: Split, low: int, high: int) -> Exchange:
    def sample() -> str:
        makers = (word, name, number, code)
        return " ".join(rng.choice(makers)(rng) for _ in range(rng.randint(low, high)))

    text = draw(split, "repeat", sample, str)
    question = rng.choice(("Repeat: {}", "Say {}", "Repeat after me: {}", "Echo: {}")).format(text)
    return Exchange(question, text, "", "equals", text)


def repeat(rng: Random, split: Split) -> Exchange:
    """A few words, names, numbers and codes to say again."""
    return _repeat(rng, split, 1, 8)


def repeat_long(rng: Random, split: Split) -> Exchange:
    """The same with 20 to 45 of them: about 100 to 250 tokens without a slip."""
    return _repeat(rng, split, 20, 45)


# -- Facts and talk -----------------------------------------------------------------------------


def fact(rng: Random, split: Split) -> Exchange:
    """An entry of a fixed table. The split is over (entry, phrasing): every entry is trained on."""
    if rng.random() < 0.6:
        phrasing, (country, capital) = draw(
            split,
            "capital",
            lambda: (rng.choice(tables.CAPITAL_QUESTIONS), rng.choice(tables.CAPITALS)),
            str,
        )
        answer = f"The capital of {country} is {capital}."
        return Exchange(phrasing.format(country), answer, "", "contains", capital)
    phrasing, (topic, answer, key) = draw(
        split,
        "fact",
        lambda: (rng.choice(tables.FACT_QUESTIONS), rng.choice(tables.FACTS)),
        str,
    )
    return Exchange(phrasing.format(topic), answer, "", "contains", key)


def _casual(rng: Random, text: str) -> str:
    """The text as written, or without its capital, or without its last mark."""
    if rng.random() < 0.2:
        text = text[0].lower() + text[1:]
    return text.rstrip("?.!") if rng.random() < 0.2 else text


def chat(rng: Random, split: Split) -> Exchange:
    """Greetings, who the model is, thanks and so on; every phrasing is trained on."""
    questions, answers = tables.CHATS[rng.choice(tuple(tables.CHATS))]
    answer = rng.choice(answers)
    return Exchange(_casual(rng, rng.choice(questions)), answer, "", "equals", answer)


def unknown(rng: Random, split: Split) -> Exchange:
    """Something that the model cannot know, answered by saying so."""
    question = rng.choice(tables.UNKNOWN_QUESTIONS).format(word_to_spell(rng, split), name(rng))
    return Exchange(_casual(rng, question), tables.UNKNOWN, "", "equals", tables.UNKNOWN)


# -- JSON ---------------------------------------------------------------------------------------

# What a text may tell: (field -> value, sentences that put the values in words).
_JSON_KINDS: tuple[tuple[dict[str, Callable[[Random], Any]], tuple[str, ...]], ...] = (
    (
        {
            "name": full_name,
            "age": lambda rng: rng.randint(1, 99),
            "city": city,
            "job": lambda rng: rng.choice(tool_tables.JOBS),
        },
        (
            "{name} is {age} years old, lives in {city} and works as a {job}.",
            "My name is {name}. I am {age}, I live in {city} and I am a {job}.",
            "The {job} {name}, {age}, comes from {city}.",
        ),
    ),
    (
        {
            "product": word,
            "quantity": lambda rng: rng.randint(1, 99),
            "customer": full_name,
            "order": code,
        },
        (
            "{customer} ordered {quantity} pieces of {product}. The order is {order}.",
            "Order {order}: {quantity} x {product} for {customer}.",
            "Please send {quantity} {product} to {customer} under order {order}.",
        ),
    ),
    (
        {
            "title": lambda rng: phrase(rng, 1, 3),
            "day": lambda rng: rng.choice(tool_tables.DAYS),
            "hour": lambda rng: rng.randint(1, 23),
            "place": city,
        },
        (
            "The event {title} takes place on {day} at {hour} in {place}.",
            "On {day} at {hour} we meet in {place} for {title}.",
            "{title} - {day}, {hour} h, {place}",
        ),
    ),
    (
        {
            "name": full_name,
            "phone": lambda rng: number(rng, 6, 8),
            "email": lambda rng: f"{invented_word(rng)}@{invented_word(rng)}.com",
        },
        (
            "{name} can be reached at {email} or by phone: {phone}.",
            "Contact {name}, phone {phone}, email {email}",
            "Call {phone} or write to {email} and ask for {name}.",
        ),
    ),
)


def json_object(rng: Random, split: Split) -> Exchange:
    """Some fields of a short text as a JSON object, in the order asked for."""

    def sample() -> tuple[str, dict[str, Any]]:
        makers, texts = rng.choice(_JSON_KINDS)
        values = {field: make(rng) for field, make in makers.items()}
        return rng.choice(texts).format(**values), values

    text, values = draw(split, "json", sample, lambda drawn: drawn[0])
    fields = rng.sample(list(values), rng.randint(1, len(values)))
    wanted = {field: values[field] for field in fields}
    listed = ", ".join(fields)
    question = rng.choice(
        (
            f"Extract {listed} as JSON: {text}",
            f"Return a JSON object with {listed}.\n{text}",
            f"{text}\nGive {listed} as JSON.",
        )
    )
    return Exchange(question, json.dumps(wanted), "", "json", wanted)
