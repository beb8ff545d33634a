"""Parsers of flag values, with messages for wrong values."""

from __future__ import annotations

import argparse
import json
import math
import re
from typing import Any, cast

from jaxserve.config import TEMPLATE_VARIABLES, ConfigError
from jaxserve.kv_events.config import KVEventsConfig, parse_config
from jaxserve.speculation_config import (
    HEAD_METHODS,
    MTP_METHODS,
    NO_SPECULATION,
    SPECULATION_METHODS,
    SpeculationConfig,
)

_UNITS = {
    "": 1,
    "k": 10**3,
    "m": 10**6,
    "g": 10**9,
    "t": 10**12,
    "ki": 2**10,
    "mi": 2**20,
    "gi": 2**30,
    "ti": 2**40,
}


def size_in_bytes(text: str) -> int:
    """Parses a size in bytes: 512M and 20G are powers of ten, 512Mi and 20Gi powers of two.

    Rejects 0, because aiohttp takes a body limit of 0 as no limit.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]i?)?b?", text.strip().lower())
    size = float(match[1]) * _UNITS[match[2] or ""] if match else 0
    if not 1 <= size < math.inf:
        raise argparse.ArgumentTypeError(f"must be a size such as 512M, 20G or 20Gi, not {text!r}")
    return int(size)


def size_or_0(text: str) -> int:
    """Parses a size in bytes, or 0."""
    return 0 if text.strip() == "0" else size_in_bytes(text)


def tokens(text: str) -> int | None:
    """Parses a length in tokens. 32k is 32 * 1024, as on model cards. None for `auto`: the model's
    own length."""
    if text.strip().lower() == "auto":
        return None
    match = re.fullmatch(r"(\d+)\s*(k?)", text.strip().lower())
    number = int(match[1]) * (1024 if match[2] else 1) if match else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be a length such as 8192 or 32k, not {text!r}")
    return number


def positive(text: str) -> int:
    """Parses a whole number above 0."""
    if (value := _integer(text)) < 1:
        raise argparse.ArgumentTypeError(f"must be a positive integer, not {text!r}")
    return value


def power_of_2(text: str) -> int:
    """Parses a power of two: 1, 2, 4 and so on."""
    if (value := _integer(text)) < 1 or value & (value - 1):
        raise argparse.ArgumentTypeError(f"must be a power of two, not {text!r}")
    return value


def model_name(text: str) -> str:
    """Parses a model name, which must not be empty."""
    if not text.strip():
        raise argparse.ArgumentTypeError("a name must not be empty")
    return text


def whole(text: str) -> int:
    """Parses a whole number of at least 0."""
    if (value := _integer(text)) < 0:
        raise argparse.ArgumentTypeError(f"must be a whole number, at least 0, not {text!r}")
    return value


def port(text: str) -> int:
    """Parses a TCP port. 0 means any free port."""
    if not 0 <= (value := _integer(text)) <= 65535:
        raise argparse.ArgumentTypeError(f"must be a port from 0 to 65535, not {text!r}")
    return value


def objective(text: str) -> tuple[str, int]:
    """Parses NAME=PRIORITY. The priority is a signed 32-bit integer."""
    name, equals, number = text.rpartition("=")
    if not (name and equals and re.fullmatch(r"-?\d{1,10}", number, re.ASCII)):
        raise argparse.ArgumentTypeError(f"must be NAME=PRIORITY such as batch=-10, not {text!r}")
    if not -(2**31) <= int(number) < 2**31:
        raise argparse.ArgumentTypeError(f"the priority must fit into 32 bits: {text!r}")
    return name, int(number)


def seconds(text: str) -> float:
    """Parses a finite number of seconds above 0."""
    if not 0 < (value := _number(text)) < math.inf:
        raise argparse.ArgumentTypeError(f"must be a positive number of seconds, not {text!r}")
    return value


def above_0(text: str) -> float:
    """Parses a number above 0. inf means no limit."""
    if not (value := _number(text)) > 0:
        raise argparse.ArgumentTypeError(f"must be a number above 0, not {text!r}")
    return value


def from_0(text: str) -> float:
    """Parses a finite number of at least 0."""
    if not 0 <= (value := _number(text)) < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number, at least 0, not {text!r}")
    return value


def share(text: str) -> float:
    """Parses a number above 0 and at most 1."""
    if not 0 < (value := _number(text)) <= 1:
        raise argparse.ArgumentTypeError(f"must be above 0 and at most 1, not {text!r}")
    return value


def _integer(text: str) -> int:
    """Returns the integer, or -1 if the text is not an integer."""
    try:
        return int(text)
    except ValueError:
        return -1


def _number(text: str) -> float:
    """Returns the number, or NaN if the text is not a number. NaN fails every range check."""
    try:
        return float(text)
    except ValueError:
        return math.nan


def template_variables(text: str) -> dict[str, Any]:
    """Parses a JSON object of chat template variables. Only variables that requests may set
    pass."""
    try:
        variables = json.loads(text)
    except (ValueError, RecursionError):
        variables = None
    if not isinstance(variables, dict) or not variables.keys() <= TEMPLATE_VARIABLES:
        names = ", ".join(sorted(TEMPLATE_VARIABLES))
        raise argparse.ArgumentTypeError(f"must be a JSON object with keys in {names}: {text!r}")
    return variables


def kv_events(text: str) -> KVEventsConfig:
    """Parses a JSON object in vLLM's format."""
    try:
        return parse_config(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


_SPECULATION = {
    "num_speculative_tokens": "drafts",
    "prompt_lookup_min": "least_match",
    "prompt_lookup_max": "most_match",
    "suffix_decoding_corpus_tokens": "shared_tokens",
}


_MTP_DRAFTS = 3
"""Default number of drafts from MTP weights. Each draft is a pass through the output matrix. A
rule, not measured."""


def speculation(text: str) -> SpeculationConfig:
    """Parses `off`, or a JSON object in vLLM's format."""
    if text.strip().lower() in ("off", "none", "null"):
        return NO_SPECULATION
    try:
        given: object = json.loads(text)
    except (ValueError, RecursionError):
        given = None
    if not isinstance(given, dict):
        raise argparse.ArgumentTypeError(f"must be off or a JSON object, not {text!r}")
    fields = cast(dict[str, object], given)
    model = fields.pop("model", None)
    methods = (*SPECULATION_METHODS, *MTP_METHODS) if model is None else HEAD_METHODS
    method = fields.pop("method", methods[0])
    native = method in MTP_METHODS
    if native:
        fields.setdefault("num_speculative_tokens", _MTP_DRAFTS)
    if method not in methods:
        what = "without a model" if model is None else "with a model"
        raise argparse.ArgumentTypeError(
            f"unsupported method {method!r} {what}; use {' or '.join(methods)}"
        )
    if model is not None and not (isinstance(model, str) and model):
        raise argparse.ArgumentTypeError(f"model is {model!r}, not a folder or a Hub id")
    if unknown := fields.keys() - _SPECULATION.keys():
        raise argparse.ArgumentTypeError(f"unsupported keys: {', '.join(sorted(unknown))}")
    for name, value in fields.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise argparse.ArgumentTypeError(f"{name} must be a positive integer, not {value!r}")
    try:
        values = {_SPECULATION[name]: value for name, value in fields.items()}
        return SpeculationConfig(model=model, native=native, **values)  # pyright: ignore[reportArgumentType]
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def root_path(text: str) -> str:
    """Parses a path and removes a slash at its end. `/` alone gives no path."""
    path = text.rstrip("/")
    if path and not re.fullmatch(r"(/[\w.~-]+)+", path, re.ASCII):
        raise argparse.ArgumentTypeError(f"must be a path such as /llm, not {text!r}")
    return path


def url(text: str) -> str:
    """Parses the http or https URL of a server."""
    if not re.fullmatch(r"https?://[^\s/]+(/\S*)?", text):
        raise argparse.ArgumentTypeError(f"must be an http:// or https:// URL, not {text!r}")
    return text


def sizes(text: str) -> tuple[int, ...]:
    """Parses whole numbers separated by commas. Sorts them and removes duplicates."""
    return tuple(sorted({positive(part) for part in text.split(",")}))
