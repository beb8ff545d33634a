"""A BPE tokenizer from the files of Hugging Face models: byte-level, or SentencePiece with byte
fallback."""

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
"""Limit on the text that is cached with its ids: under 32 MiB in total."""


class HfTokenizer:
    """The library `tokenizers` does the merges. This class splits off the markers and adds them
    back.

    So a marker's spelling in a user's text can be encoded as plain text; the library offers that
    only for markers flagged `special`. And decoding costs one table look-up per token.
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
        """Reads tokenizer.json and, if present, the configs and the template beside it.

        Raises:
          ConfigError: a file cannot be read, or needs a feature that would be encoded wrongly.
        """
        file = folder / "tokenizer.json"
        try:
            full = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises only this type
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
        """Pickles the tokenizer without its cached texts."""
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
        if not prefix or ids[: len(self._prefix)] == self._prefix:  # the template wrote the prefix
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
        """Appends the text's ids to `ids`. `at_start`: the tokenizer for the beginning of the
        text."""
        if len(text) < CACHE_MIN_CHARS:
            ids.extend(merge(at_start, text))
            return
        # At the beginning of everything, a text may have other tokens than elsewhere.
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
    """Ids of the long texts seen last, such as earlier turns of a chat or a shared system prompt.

    Without it, encoding would be the longest part of a prefix hit of 16,000 tokens (25 ms). A
    tenant finds only its own texts.
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
    """Checks the ids of added tokens. If they leave gaps, the library renumbers them, and the model
    would get other tokens than in its training. Raises ConfigError that names the first one."""
    try:
        listed = msgspec.json.decode(file.read_bytes(), type=_Added).added_tokens
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{file}: cannot be read: {error}") from None
    for token in listed:
        if (used := full.token_to_id(token.content)) != token.id:
            raise ConfigError(
                f"{file}: the added token {token.content!r} has id {token.id}, where {used} would "
                "be next: ids must continue those of the vocabulary without a gap"
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
    """Returns the tokens that the post-processor prepends to every text, such as Llama's
    `<|begin_of_text|>`.

    Raises:
      ConfigError: the post-processor does anything else.
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
    """Returns the end tokens. generation_config.json lists all; the tokenizer's config names
    one."""
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
    """Returns the tokens in tokenizer_config.json by role. They are texts or objects with
    `content`."""
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
        raise ConfigError(f"tokenizer_config.json: chat_template is {template!r:.100}, not a text")
    return template
