"""Settings of a benchmark: flags, or a YAML file of experiments with common defaults."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import yaml


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """One point: one load on one server. Every field is a flag, and a YAML key of the same name."""

    name: str = "run"
    url: str = "http://127.0.0.1:8000"
    server: str | None = None
    """Command that starts the server for this experiment. The server is stopped afterwards."""
    model: str | None = None
    endpoint: str = "completions"
    api_key: str | None = None
    rate: float = 1.0
    rate_end: float | None = None
    rate_steps: tuple[float, ...] = ()
    burstiness: float = 1.0
    concurrency: int | None = None
    duration: float = 60.0
    drain: float = 60.0
    timeout: float = 600.0
    warmup: float | None = None
    cooldown: float | None = None
    traffic: str = "study"
    input_tokens: int = 1024
    output_tokens: int = 128
    length_scale: float = 1.0
    trace: Path | None = None
    prompts: str = "tokens"
    max_token_id: int = 150_000
    shared_prefix_tokens: int = 0
    shared_prefix_share: float = 1.0
    ignore_eos: bool = True
    slo: str = "study"
    slo_headers: bool = False
    arrival_seed: int = 0
    content_seed: int = 0

    def __post_init__(self) -> None:
        problems = list(_problems(self))
        if problems:
            raise ValueError(f"experiment {self.name!r}: " + "; ".join(problems))


_ABOVE_0 = ("rate", "burstiness", "duration", "timeout", "length_scale")
_AT_LEAST = {
    **dict.fromkeys(("drain", "warmup", "cooldown", "rate_end"), 0),
    **dict.fromkeys(("shared_prefix_tokens", "shared_prefix_share"), 0),
    **dict.fromkeys(("arrival_seed", "content_seed"), 0),
    **dict.fromkeys(("concurrency", "input_tokens", "output_tokens", "max_token_id"), 1),
}
_SWITCHES = {"ignore_eos", "slo_headers"}
_OPTIONAL = {"server", "model", "api_key", "rate_end", "concurrency", "warmup", "cooldown", "trace"}


def _problems(experiment: Experiment) -> Iterator[str]:
    values = vars(experiment).items()
    if missing := [name for name, value in values if value is None and name not in _OPTIONAL]:
        yield from (f"{name} has no value" for name in missing)
        return
    choices = {
        "endpoint": ("completions", "chat"),
        "traffic": ("study", "siso", "silo", "liso", "lilo", "fixed"),
        "prompts": ("tokens", "text"),
        "slo": ("study", "strict"),
    }
    for name, allowed in choices.items():
        if getattr(experiment, name) not in allowed:
            yield f"{name} is {getattr(experiment, name)!r}, supported: {', '.join(allowed)}"
    if not re.match("https?://", experiment.url):
        yield f"url is {experiment.url!r}, it must begin with http:// or https://"
    if experiment.endpoint == "chat" and experiment.prompts == "tokens" and not experiment.trace:
        yield "the chat endpoint takes text: use prompts: text"
    for name, value in vars(experiment).items():
        if value is None:
            continue
        if name in _ABOVE_0 and not value > 0:
            yield f"{name} must be above 0, got {value}"
        elif name in _AT_LEAST and not value >= _AT_LEAST[name]:
            yield f"{name} must be at least {_AT_LEAST[name]}, got {value}"
        elif value == math.inf and name not in ("burstiness", "timeout"):
            yield f"{name} must be finite"
    if not all(0 < rate < math.inf for rate in experiment.rate_steps):
        yield f"rate_steps must all be above 0 and finite, got {experiment.rate_steps}"


_HELP = {
    "name": "name of the run in reports",
    "url": "base URL of the server",
    "server": "command that starts the server; it is stopped at the end",
    "model": "model name to ask for (default: the first that the server names)",
    "endpoint": "completions, or chat (needs --prompts text)",
    "api_key": "sent as a bearer token",
    "rate": "requests per second",
    "rate_end": "let the rate ramp in a line to this",
    "rate_steps": "rates one after another, each for an equal part of the duration: 4,8,16",
    "burstiness": "shape of the gaps: 1 Poisson, below 1 burstier, inf evenly spaced",
    "concurrency": "closed loop of this many clients instead of a rate",
    "duration": "seconds in which requests are sent",
    "drain": "seconds that running requests get after that",
    "timeout": "seconds a request may take",
    "warmup": "seconds left out at the start (default: a tenth)",
    "cooldown": "seconds left out at the end (default: a tenth)",
    "traffic": "study (the mix of four classes), one class of it, or fixed",
    "input_tokens": "prompt length of fixed traffic",
    "output_tokens": "output length of fixed traffic",
    "length_scale": "factor on prompt and output lengths of the study's classes",
    "trace": "JSONL file of requests to replay instead",
    "prompts": "tokens (random ids) or text (random words)",
    "max_token_id": "random ids are below it",
    "shared_prefix_tokens": "tokens that prompts of a class have in common (0: unique prompts)",
    "shared_prefix_share": "share of the requests that have them",
    "ignore_eos": "generate exactly the drawn number of tokens",
    "slo": "study (per class) or strict (TTFT 500 ms, TPOT 50 ms)",
    "slo_headers": "tell the server each request's limits (x-slo-ttft-ms, x-slo-tpot-ms) and its "
    "timeout (x-slo-e2e-ms)",
    "arrival_seed": "seed of the arrival times",
    "content_seed": "seed of the prompts; every point of a sweep gets its own from it",
}


def add_flags(parser: argparse._ActionsContainer) -> None:  # pyright: ignore[reportPrivateUsage]
    """Adds one flag per field. Flags that are not given stay out of the namespace."""
    for field in fields(Experiment):
        flag = "--" + field.name.replace("_", "-")
        text = _HELP[field.name]
        if isinstance(field.default, bool):
            parser.add_argument(
                flag, action=argparse.BooleanOptionalAction, default=argparse.SUPPRESS, help=text
            )
            continue
        default = "" if field.default in (None, ()) else f" (default: {field.default})"
        parser.add_argument(
            flag, type=_parser_of(field.name), default=argparse.SUPPRESS, help=text + default
        )


def _parser_of(name: str) -> Any:
    if name == "rate_steps":
        return lambda text: tuple(float(part) for part in text.split(","))
    if name == "trace":
        return Path
    default = {field.name: field.default for field in fields(Experiment)}[name]
    integers = {"concurrency"}
    floats = {"rate_end", "warmup", "cooldown"}
    if name in integers or isinstance(default, int):
        return int
    if name in floats or isinstance(default, float):
        return float
    return str


def from_flags(values: Mapping[str, Any]) -> list[Experiment]:
    """Returns the single experiment of a command line without a configuration file."""
    names = {field.name for field in fields(Experiment)}
    return [Experiment(**{name: value for name, value in values.items() if name in names})]


def read_yaml(path: Path, flags: Mapping[str, Any]) -> list[Experiment]:
    """Reads experiments. `run` has common settings; each of `experiments` changes some.

    A list in place of one value is a sweep: every combination is a point with its own content seed.
    Flags override the file.

    Raises:
      ValueError: a key is unknown or a value is invalid; the message says where.
    """
    common, experiments = _read(path)
    points: list[Experiment] = []
    for number, changes in enumerate(experiments):
        settings = {"name": f"experiment-{number + 1}", **common, **changes}
        for point in _sweep(settings):
            points.append(_experiment({**point, **flags}, path))
    if not points:
        raise ValueError(f"{path}: an empty list leaves no experiment")
    return [
        replace(point, content_seed=point.content_seed + 1_000_003 * number)
        for number, point in enumerate(points)
    ]


def _read(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Returns the common settings, and the changes of each experiment."""
    try:
        document = yaml.safe_load(path.read_text()) or {}
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(document, dict) or not document.keys() <= {"run", "experiments"}:
        raise ValueError(f"{path}: expected the keys run and experiments, found {document!r:.200}")
    common, experiments = document.get("run") or {}, document.get("experiments") or [{}]
    if not isinstance(common, dict):
        raise ValueError(f"{path}: run must hold settings, found {common!r:.200}")
    if not isinstance(experiments, list):
        raise ValueError(f"{path}: experiments must be a list, found {experiments!r:.200}")
    changes = [each or {} for each in experiments]
    for each in changes:
        if not isinstance(each, dict):
            raise ValueError(f"{path}: an experiment must hold settings, found {each!r:.200}")
    return common, changes


def _sweep(settings: dict[str, Any]) -> Iterator[dict[str, Any]]:
    lists = {
        key: value
        for key, value in settings.items()
        if isinstance(value, list) and key != "rate_steps"
    }
    for values in itertools.product(*lists.values()):
        point = dict(zip(lists, values, strict=True))
        suffix = "".join(f" {key}={value}" for key, value in point.items())
        yield {**settings, **point, "name": f"{settings['name']}{suffix}"}


def _experiment(settings: dict[str, Any], path: Path) -> Experiment:
    known = {field.name for field in fields(Experiment)}
    if unknown := settings.keys() - known:
        raise ValueError(f"{path}: unknown keys {sorted(unknown)}; known: {sorted(known)}")
    converted: dict[str, Any] = {
        key: None if value is None else _converted(key, value, path)
        for key, value in settings.items()
    }
    return Experiment(**converted)


def _converted(key: str, value: Any, path: Path) -> Any:
    try:
        if key == "rate_steps":
            return tuple(float(rate) for rate in value)
        if key in _SWITCHES and isinstance(value, bool):
            return value
        return _parser_of(key)(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"{path}: {key} is {value!r}: {error}") from error


def as_json(experiment: Experiment) -> dict[str, Any]:
    """For the result file; without the key, and with infinity as a word."""
    values = dataclasses.asdict(replace(experiment, api_key=None))
    values["trace"] = str(experiment.trace) if experiment.trace else None
    for name in ("burstiness", "timeout"):
        if math.isinf(values[name]):
            values[name] = "inf"
    return values
