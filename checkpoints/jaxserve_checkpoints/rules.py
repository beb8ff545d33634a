"""How tensors of a checkpoint make up the leaves of a parameter tree, as data. Without jax."""

from __future__ import annotations

import re
from dataclasses import dataclass

WORD = re.compile(r"\{(\w+)\}")
"""A braced word in a leaf's path or a tensor's name: it stands for a number."""


@dataclass(frozen=True)
class Rule:
    """The leaf is its sources, concatenated along `axis`.

    `{layer}` (or any other braced word) in `leaf` stands for a number, which replaces the same
    word in `sources`.
    """

    leaf: str
    sources: tuple[str, ...]
    axis: int = 0

    def __post_init__(self) -> None:
        known = set(WORD.findall(self.leaf))
        unknown = {word for source in self.sources for word in WORD.findall(source)} - known
        if unknown or not self.sources:
            what = f"{sorted(unknown)} in its sources only" if unknown else "no sources"
            raise ValueError(f"rule for {self.leaf!r} has {what}")


@dataclass(frozen=True)
class Ignore:
    """Tensors with names like `pattern` (`*`, `?`) may stand in a checkpoint unused."""

    pattern: str


@dataclass(frozen=True)
class Repeat:
    """`tensor` may stand in a checkpoint as a repetition of `original`, with the same shape."""

    tensor: str
    original: str


type AnyRule = Rule | Ignore | Repeat
