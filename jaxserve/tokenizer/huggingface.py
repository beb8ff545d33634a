"""A BPE tokenizer read from the files that Hugging Face models ship: byte-level, or SentencePiece's
with byte fallback."""

from __future__ import annotations

import re
import threading
from array import array
from collections import OrderedDict
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec
import tokenizers

from jaxserve.config import ConfigError
from jaxserve.setting_files import read_json_object, read_text
from jaxserve.tokenizer.pieces import Progress, nothing, pieces
from jaxserve.tokenizer.spelling import merge, spelling_of

CACHE_MIN_CHARS = 256
CACHE_TOTAL_CHARS = 4 * 1024 * 1024
"""Bound on the text kept with its ids: under 32 MiB in all."""


class HfTokenizer:
    """`tokenizers` does the merges; markers are split off and put back here.

    That way a marker's spelling in a user's text can be encoded as plain text, which the library
    offers only for the markers flagged `special`, and decoding costs one table look-up per token.
    """

    def __init__(
        self,
        full: tokenizers.Tokenizer,
        *,
        eos_token_ids: frozenset[int] = frozenset(),
        chat_template: str | None = None,
        template_tokens: Mapping[str, str] = MappingProxyType({}),
    ):
        self._full = full
        added = full.get_added_tokens_decoder()
        _check_supported(added)
        self._spelling = spelling_of(full)
        self._prefix = _prefix(full)
        self.markers: Mapping[str, int] = {str(t.content): i for i, t in added.items()}
        self.vocab_size = 1 + max([full.get_vocab_size(with_added_tokens=False) - 1, *added])
        self.special_ids = frozenset(i for i, t in added.items() if t.special)
        self.eos_token_ids = eos_token_ids
        self.chat_template = chat_template
        self.template_tokens = template_tokens
        by_length = sorted(self.markers, key=len, reverse=True)
        self._split = re.compile(
            f"({'|'.join(map(re.escape, by_length))})" if by_length else "(?!)"
        )
        self._bytes = {i: text.encode() for text, i in self.markers.items()}
        self._cache = _SegmentCache()
        self._tenant = ""

    @classmethod
    def from_folder(cls, folder: Path) -> HfTokenizer:
        """Read tokenizer.json and, where present, the configs and the template beside it.

        ConfigError: one of them cannot be read, or asks for what would be encoded wrongly.
        """
        file = folder / "tokenizer.json"
        try:
            full = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises no other type
            raise ConfigError(f"{file}: cannot be read: {error}") from None
        _check_ids(file, full)
        config, generation = (
            read_json_object(each) if (each := folder / f"{name}_config.json").is_file() else {}
            for name in ("tokenizer", "generation")
        )
        return cls(
            full,
            eos_token_ids=_eos_token_ids(full, config, generation),
            chat_template=_chat_template(folder, config),
            template_tokens=_template_tokens(config),
        )

    def __reduce__(self) -> tuple[Any, ...]:
        """Without the texts that it has seen."""
        made = partial(
            HfTokenizer,
            eos_token_ids=self.eos_token_ids,
            chat_template=self.chat_template,
            template_tokens=dict(self.template_tokens),
        )
        return made, (self._full,)

    def for_tenant(self, tenant: str) -> HfTokenizer:
        own = object.__new__(HfTokenizer)
        own.__dict__.update(self.__dict__, _tenant=tenant)
        return own

    def encode(
        self,
        text: str,
        breaker: str = "",
        progress: Progress = nothing,
        *,
        prefix: bool = True,
    ) -> list[int]:
        ids: list[int] = []
        for position, piece in enumerate(self._split.split(text)):
            if position % 2:
                ids.append(self.markers[piece])
            elif piece:
                plain = piece.replace(breaker, "") if breaker else piece
                spelling = self._spelling
                self._encode_plain(
                    plain, spelling.first if position == 0 else spelling.later, ids, progress
                )
                progress(len(ids))
        if not prefix or ids[: len(self._prefix)] == self._prefix:  # a template writes it itself
            return ids
        return self._prefix + ids

    def encode_part(self, text: str) -> list[int]:
        ids: list[int] = []
        for position, piece in enumerate(self._split.split(text)):
            ids += [self.markers[piece]] if position % 2 else merge(self._spelling.inner, piece)
        return ids

    def spell(self, text: str) -> list[int]:
        return self._spelling.exact(text)

    def token_bytes(self, token: int) -> bytes:
        known = self._bytes.get(token)
        if known is None:
            spelling = self._spelling.inner.id_to_token(token)
            known = b"" if spelling is None else self._spelling.token_bytes(spelling)
            self._bytes[token] = known
        return known

    def _encode_plain(
        self, text: str, at_start: tokenizers.Tokenizer, ids: list[int], progress: Progress
    ) -> None:
        """Adds the text's to `ids`; `at_start` is for its beginning."""
        if len(text) < CACHE_MIN_CHARS:
            ids.extend(merge(at_start, text))
            return
        # A text at the beginning of everything may have other tokens than elsewhere.
        owner = self._tenant if at_start is self._spelling.later else f"{self._tenant} first"
        if (kept := self._cache.get(owner, text)) is not None:
            ids.extend(kept)
            return
        first = len(ids)
        for piece in pieces(text, self._spelling.words):
            ids.extend(merge(at_start, piece))
            at_start = self._spelling.inner
            progress(len(ids))
        if len(text) <= CACHE_TOTAL_CHARS:
            self._cache.put(owner, text, array("I", ids[first:]))


class _SegmentCache:
    """Ids of the long texts seen last: the earlier turns of a chat, a shared system prompt.

    In a prefix hit of 16,000 tokens encoding would otherwise be the longest part (25 ms). A tenant
    finds its own texts only.
    """

    def __init__(self) -> None:
        self._entries: OrderedDict[tuple[str, str], array[int]] = OrderedDict()
        self._chars = 0
        self._lock = threading.Lock()

    def get(self, tenant: str, text: str) -> array[int] | None:
        with self._lock:
            ids = self._entries.get((tenant, text))
            if ids is not None:
                self._entries.move_to_end((tenant, text))
            return ids

    def put(self, tenant: str, text: str, ids: array[int]) -> None:
        with self._lock:
            if (tenant, text) in self._entries:
                return
            self._entries[tenant, text] = ids
            self._chars += len(text)
            while self._chars > CACHE_TOTAL_CHARS:
                (_, evicted), _ = self._entries.popitem(last=False)
                self._chars -= len(evicted)


class _AddedToken(msgspec.Struct):
    id: int
    content: str


class _Added(msgspec.Struct):
    added_tokens: list[_AddedToken] = []


def _check_ids(file: Path, full: tokenizers.Tokenizer) -> None:
    """The library numbers added tokens as it likes where the file's numbers leave gaps: the model
    would read others than it was trained with. ConfigError names the first."""
    try:
        listed = msgspec.json.decode(file.read_bytes(), type=_Added).added_tokens
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{file}: cannot be read: {error}") from None
    for token in listed:
        if (used := full.token_to_id(token.content)) != token.id:
            raise ConfigError(
                f"{file}: the added token {token.content!r} has id {token.id}, where {used} would "
                "be next: ids must go on from the vocabulary's without a gap"
            )


def _check_supported(added: Mapping[int, Any]) -> None:
    problems = [
        f"added token {token.content!r} strips or needs word borders"
        for token in added.values()
        if token.lstrip or token.rstrip or token.single_word
    ]
    if problems:
        raise ConfigError("tokenizer.json: " + "; ".join(problems))


def _prefix(full: tokenizers.Tokenizer) -> list[int]:
    """What the post-processor puts before every text: Llama's `<|begin_of_text|>`.

    ConfigError: it does more than that.
    """
    if not full.num_special_tokens_to_add(False):
        return []
    probe = "a"
    plain, whole = (full.encode(probe, add_special_tokens=special).ids for special in (False, True))
    before = len(whole) - len(plain)
    if whole[before:] != plain:
        raise ConfigError("tokenizer.json: the post-processor adds tokens after every text")
    return whole[:before]


def _eos_token_ids(
    full: tokenizers.Tokenizer, config: Mapping[str, Any], generation: Mapping[str, Any]
) -> frozenset[int]:
    """generation_config.json lists all that end a turn; the tokenizer's own config names one."""
    ids = generation.get("eos_token_id")
    if ids is not None:
        ids = [ids] if isinstance(ids, int) else ids
        if not (isinstance(ids, list) and all(_is_token_id(each) for each in ids)):
            raise ConfigError(f"generation_config.json: eos_token_id is {ids!r}, no token ids")
        return frozenset(ids)
    spelling = _template_tokens(config).get("eos_token")
    token = full.token_to_id(spelling) if spelling else None
    return frozenset() if token is None else frozenset([token])


def _template_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Those that tokenizer_config.json names, by role; as text or as an object with `content`."""
    found: dict[str, str] = {}
    for role in ("bos_token", "eos_token", "unk_token", "pad_token"):
        value = config.get(role)
        spelling = value.get("content") if isinstance(value, dict) else value
        if isinstance(spelling, str):
            found[role] = spelling
    return found


def _is_token_id(value: Any) -> bool:
    return isinstance(value, int) and 0 <= value < 2**31


def _chat_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return read_text(file)
    template = config.get("chat_template")
    if isinstance(template, list):
        named = [each for each in template if isinstance(each, dict)]
        template = next((e.get("template") for e in named if e.get("name") == "default"), None)
    if not isinstance(template, str | None):
        raise ConfigError(f"tokenizer_config.json: chat_template is {template!r:.100}, no text")
    return template
