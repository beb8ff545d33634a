"""How a BPE vocabulary spells text, and where words of a long text may be cut."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import tokenizers
from tokenizers import decoders, normalizers, pre_tokenizers

from jaxserve.config import ConfigError
from jaxserve.tokenizer.pieces import Split

SPACE = "▁"
"""SentencePiece's character for a space, U+2581."""


class Spelling(NamedTuple):
    """The model without its added tokens, for each position of a text."""

    first: tokenizers.Tokenizer
    """For text at the beginning of everything."""
    later: tokenizers.Tokenizer
    """For text after a marker."""
    inner: tokenizers.Tokenizer
    """For text in the middle of a text, without a prefix."""
    exact: Callable[[str], list[int]]
    """Returns tokens whose bytes are exactly those of the text."""
    token_bytes: Callable[[str], bytes]
    """Returns the bytes of a token, given its spelling."""
    words: Split
    """Splits text into words that no token crosses."""


def spelling_of(full: tokenizers.Tokenizer) -> Spelling:
    """Returns the spelling of a tokenizer. Raises ConfigError if its scheme is not supported."""
    if isinstance(full.decoder, decoders.ByteLevel):
        return _byte_level(full)
    if _turns_stand_ins_back(_state(full.decoder)):
        return _sentence_piece(full)
    raise ConfigError(
        f"tokenizer.json: the decoder is {_kinds(full.decoder)}, supported: ByteLevel, and "
        "Replace of ▁ with ByteFallback"
    )


def merge(tokenizer: tokenizers.Tokenizer, text: str) -> list[int]:
    """Returns the tokens of a text without markers."""
    # The only call of the library that releases the interpreter lock. On 369,000 characters,
    # `encode`
    # held the lock for all of its 147 ms; this call holds it for 0.6 ms.
    return tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids


def _byte_level(full: tokenizers.Tokenizer) -> Spelling:
    """GPT-2's scheme: a character for each byte, words by a regular expression."""
    plain = _plain(full, full.normalizer, full.pre_tokenizer)
    # Without the normaliser, which changes some characters: Qwen3 has NFC.
    exact = _plain(full, None, full.pre_tokenizer)
    words = full.pre_tokenizer.pre_tokenize_str if full.pre_tokenizer else _one_word
    return Spelling(plain, plain, plain, partial(merge, exact), _of_byte_level, words)


def _sentence_piece(full: tokenizers.Tokenizer) -> Spelling:
    """SentencePiece's scheme: ▁ for a space and before a text, `<0x0A>` for bytes without a
    token."""
    problems = [
        *_problems_of_bytes(full),
        *(f"the normalizer is {kind}" for kind in _others(_state(full.normalizer), _NORMALIZERS)),
        *(
            f"the pre-tokenizer is {kind}"
            for kind in _others(_state(full.pre_tokenizer), ("Metaspace",))
        ),
    ]
    if problems:
        raise ConfigError("tokenizer.json: " + "; ".join(problems))
    first = _plain(full, full.normalizer, full.pre_tokenizer)
    metaspace = full.pre_tokenizer
    if isinstance(metaspace, pre_tokenizers.Metaspace):
        never = pre_tokenizers.Metaspace(prepend_scheme="never", split=metaspace.split)
        inner = _plain(full, None, never)
    else:
        inner = _plain(full, normalizers.Replace(" ", SPACE), None)
    # A normaliser prepends a space to every text; the other scheme only to the first text.
    prepends = any(each["type"] == "Prepend" for each in _flat(_state(full.normalizer)))
    later = inner if getattr(metaspace, "prepend_scheme", "") == "first" and not prepends else first
    vocabulary = full.get_vocab(False)
    crossing = any(SPACE in token.lstrip(SPACE) for token in vocabulary)
    words = _one_word if crossing else _words_before_spaces
    stand_in = [vocabulary[_byte_token(byte)] for byte in SPACE.encode()]

    def exact(text: str) -> list[int]:
        ids: list[int] = []
        for index, part in enumerate(text.split(SPACE)):  # a ▁ in the text itself is not a space
            ids += stand_in if index else []
            ids += merge(inner, part) if part else []
        return ids

    return Spelling(first, later, inner, exact, _of_sentence_piece, words)


_NORMALIZERS = ("Prepend", "Replace")


def _problems_of_bytes(full: tokenizers.Tokenizer) -> list[str]:
    model: Any = full.model
    if not getattr(model, "byte_fallback", False):
        return ["the model has no byte_fallback: characters without a token would be lost"]
    missing = [byte for byte in range(256) if full.token_to_id(_byte_token(byte)) is None]
    first = _byte_token(missing[0]) if missing else ""
    return [f"{len(missing)} bytes have no token, {first} first"] if missing else []


def _byte_token(byte: int) -> str:
    return f"<0x{byte:02X}>"


def _plain(full: tokenizers.Tokenizer, normalizer: Any, pre_tokenizer: Any) -> Any:
    """Returns the model, shared and not copied, without added tokens and without a prefix."""
    plain = tokenizers.Tokenizer(full.model)
    if normalizer is not None:
        plain.normalizer = normalizer
    if pre_tokenizer is not None:
        plain.pre_tokenizer = pre_tokenizer
    return plain


def _state(part: Any) -> Mapping[str, Any]:
    """Returns a part of the library's tokenizer in the format of tokenizer.json."""
    return {} if part is None else json.loads(part.__getstate__())


def _flat(state: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Returns the parts of a sequence."""
    for inner in ("decoders", "normalizers", "pretokenizers"):
        if inner in state:
            return [part for each in state[inner] for part in _flat(each)]
    return [state] if state else []


def _kinds(part: Any) -> str:
    return ", ".join(each["type"] for each in _flat(_state(part))) or "none"


def _others(state: Mapping[str, Any], known: tuple[str, ...]) -> list[str]:
    """Returns parts of unsupported kinds, and parts that replace anything but spaces."""
    parts = _flat(state)
    return [each["type"] for each in parts if each["type"] not in known or not _of_spaces(each)]


def _of_spaces(part: Mapping[str, Any]) -> bool:
    if part["type"] == "Replace":
        return (part["pattern"], part["content"]) == ({"String": " "}, SPACE)
    return SPACE in (part.get("prepend"), part.get("replacement"))


def _turns_stand_ins_back(decoder: Mapping[str, Any]) -> bool:
    """Returns whether a decoder turns ▁ into spaces and byte tokens into bytes. It does not check
    that the decoder drops the first space of a text, because generated text continues a prompt."""
    parts = _flat(decoder)
    kinds = {each["type"] for each in parts}
    replaces = [each for each in parts if each["type"] == "Replace"]
    back = ({"String": SPACE}, " ")
    known = kinds <= {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}
    spaces = "Metaspace" in kinds or bool(replaces)
    right = all((each["pattern"], each["content"]) == back for each in replaces)
    return known and spaces and right and "ByteFallback" in kinds


def _of_sentence_piece(spelling: str) -> bytes:
    if len(spelling) == 6 and spelling.startswith("<0x") and spelling.endswith(">"):
        return bytes.fromhex(spelling[3:5])
    return spelling.replace(SPACE, " ").encode()


def _byte_alphabet() -> dict[str, int]:
    """Returns GPT-2's printable character for each byte, as in every byte-level BPE vocabulary."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in visible]
    return {chr(b): b for b in visible} | {chr(256 + i): b for i, b in enumerate(hidden)}


_BYTE_OF = _byte_alphabet()


def _of_byte_level(spelling: str) -> bytes:
    try:
        return bytes(_BYTE_OF[char] for char in spelling)
    except KeyError:
        return spelling.encode()


def _one_word(text: str) -> list[tuple[str, tuple[int, int]]]:
    return [(text, (0, len(text)))]


def _words_before_spaces(text: str) -> list[tuple[str, tuple[int, int]]]:
    """Returns the words, each with the spaces before it."""
    starts = [0, *(i for i in range(1, len(text)) if text[i] == " " != text[i - 1]), len(text)]
    return [(text[start:end], (start, end)) for start, end in itertools.pairwise(starts)]
