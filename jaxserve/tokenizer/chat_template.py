"""Renders chat messages to one prompt text with the model's Jinja template, in a sandbox."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from types import MappingProxyType
from typing import Any, NamedTuple, NoReturn

import jinja2
from jinja2.runtime import LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment

from jaxserve.config import ConfigError

MAX_SECONDS = 2.0
MAX_CHARS = 64 * 1024 * 1024

_BREAKERS = tuple(map(chr, range(0xFDD0, 0xFDF0)))
"""Unicode noncharacters, reserved for a program's own use. One that is not in the text is used."""


class TemplateError(ValueError):
    """The template cannot render these messages. The message may be shown to the client."""


class Rendered(NamedTuple):
    """A prompt in which only the template made markers.

    Each marker spelling in the messages is split by `breaker` after its first character.
    `Tokenizer.encode(text, breaker)` removes it.
    """

    text: str
    breaker: str


class ChatTemplate:
    """One model's template.

    `markers`: spellings that client text must not produce. `defaults`: variables for requests that
      do not set them. `tokens`: markers by their role in templates, such as `bos_token`.
    """

    def __init__(
        self,
        source: str,
        markers: Iterable[str] = (),
        defaults: Mapping[str, Any] = MappingProxyType({}),
        tokens: Mapping[str, str] = MappingProxyType({}),
    ):
        """Raises ConfigError if the source is not a template."""
        self._defaults = defaults
        functions = {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
        try:
            known = {**tokens, **functions}
            self._template = _environment().from_string(source, globals=known)
        except jinja2.TemplateSyntaxError as error:
            where = f"line {error.lineno}: {error.message}"
            raise ConfigError(f"not a Jinja template: {where}") from None
        except (RecursionError, MemoryError, SyntaxError):  # Jinja's parser, and Python's
            raise ConfigError("the template is nested too deeply") from None
        except ValueError as error:
            raise ConfigError(f"not a Jinja template: {error}") from None
        self._marker_starts = sorted({marker[0] for marker in markers})

    def render(
        self,
        messages: list[dict[str, Any]],
        *,
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> Rendered:
        """Returns the prompt.

        Args:
          messages: as Hugging Face templates expect them; `content` is a string.
          continue_final: end the text at the end of the last message's content.
          variables: scalars. Strings in them count as client text, too.

        Raises:
          TemplateError: the template refuses the messages, fails, takes too long or makes too
            much text.
        """
        variables = {**self._defaults, **(variables or {})}
        given = {"messages": messages, "tools": tools or None, **variables}
        breaker, end = _absent_from(list(_strings(given)))
        context = {name: self._broken(value, breaker) for name, value in given.items()}
        context["add_generation_prompt"] = add_generation_prompt and not continue_final
        if continue_final:
            context["messages"][-1]["content"] += end
        text = self._limited(context)
        if continue_final:
            text, found, _ = text.rpartition(end)
            if not found:
                raise TemplateError("the chat template does not show the last message as it is")
        return Rendered(text, breaker)

    def _broken(self, value: Any, breaker: str) -> Any:
        """Returns the value with `breaker` after every possible start of a marker in its
        strings."""
        if isinstance(value, str):
            for start in self._marker_starts:
                value = value.replace(start, start + breaker)
            return value
        if isinstance(value, dict):
            fields: dict[Any, Any] = value
            return {
                self._broken(key, breaker): self._broken(item, breaker)
                for key, item in fields.items()
            }
        if isinstance(value, list):
            items: list[Any] = value
            return [self._broken(item, breaker) for item in items]
        return value

    def _limited(self, context: Mapping[str, Any]) -> str:
        deadline = time.monotonic() + MAX_SECONDS
        parts: list[str] = []
        room = MAX_CHARS
        try:
            for part in self._template.generate(**context):
                parts.append(part)
                room -= len(part)
                if room < 0 or time.monotonic() > deadline:
                    raise TemplateError("the chat template produced too much or took too long")
        except jinja2.TemplateError as error:
            raise TemplateError(f"the chat template refused the messages: {error}") from error
        except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
            if isinstance(error, TemplateError):
                raise
            raise TemplateError("the chat template cannot render these messages") from error
        except RecursionError:
            raise TemplateError("the chat template nests too deeply for these messages") from None
        return "".join(parts)


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox with fast paths for fields of messages and loops. The results are those of its
    own attribute checks."""

    def getattr(self, obj: Any, attribute: str) -> Any:
        kind = type(obj)
        if kind is dict and attribute not in _METHODS:
            return obj[attribute] if attribute in obj else self.undefined(obj=obj, name=attribute)
        if kind is LoopContext and attribute in _LOOP_FIELDS:
            return getattr(obj, attribute)
        return super().getattr(obj, attribute)


_METHODS = frozenset(dir(dict))

_LOOP_FIELDS = frozenset({"index", "index0", "first", "last", "length", "previtem", "nextitem"})


def _environment() -> ImmutableSandboxedEnvironment:
    """Returns the environment of transformers' `apply_chat_template`, which published templates
    rely on."""
    environment = _Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _tojson
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Differs from Jinja's own filter: it does not escape HTML or non-ASCII characters."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(layout: str) -> str:
    return datetime.now().strftime(layout)


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        fields: dict[Any, Any] = value
        for key, item in fields.items():
            yield from _strings(key)
            yield from _strings(item)
    elif isinstance(value, list):
        items: list[Any] = value
        for item in items:
            yield from _strings(item)


def _absent_from(texts: list[str]) -> tuple[str, str]:
    """Returns two characters that occur in none of the texts."""
    free = (char for char in _BREAKERS if not any(char in text for text in texts))
    first, second = next(free, None), next(free, None)
    if first is None or second is None:
        raise TemplateError("the messages hold every one of Unicode's noncharacters")
    return first, second
