"""Matches a checkpoint's tensors with the leaves of the parameter tree, checked in both directions.

A leaf's path is `jax.tree_util.keystr(path, simple=True, separator=".")`: "layers.3.qkv". A tree
may stack all layers' weights of a kind in one leaf: "layers.qkv" then consists of the parts
"layers.0.qkv", "layers.1.qkv", ... If only some layers have such a weight, a dictionary's key has
their numbers: "layers.(3, 7).qkv" consists of "layers.3.qkv" and "layers.7.qkv". Experts are always
stacked: "layers.3.experts.down" consists of the parts "layers.3.experts.0.down", ..., and so may
"layers.experts.down" of all layers.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np

from jaxserve_checkpoints.reader import AnyArray, CheckpointError
from jaxserve_checkpoints.rules import (
    WORD,
    AnyRule,
    Element,
    Ignore,
    Repeat,
    Rule,
    Split,
    Transform,
)

_MAX_PROBLEMS = 20
_SOME = re.compile(r"\blayers\.\(([0-9, ]+)\)\.")
_STACKED = re.compile(r"\b(layers|experts)\.(?=[A-Za-z_])")
_NUMBERED = re.compile(r"\b(layer|expert)s\.([0-9]+)\.")
_NUMBER = re.compile(r"\b(layers|experts)\.[0-9]+\.")


class Tensors(Protocol):
    """The part of a checkpoint's interface that this module uses."""

    @property
    def folder(self) -> Path: ...
    @property
    def names(self) -> tuple[str, ...]: ...
    def __contains__(self, name: object) -> bool: ...
    def shape(self, name: str) -> tuple[int, ...]: ...
    def dtype(self, name: str) -> np.dtype[Any]: ...
    def read(self, name: str) -> AnyArray: ...


class LeafPart(NamedTuple):
    """A leaf, or one layer's or expert's part of a stacked leaf."""

    path: str
    leaf: jax.ShapeDtypeStruct
    """Shape, dtype and, if given, sharding of this part."""
    owner: str
    """The path of the tree's leaf."""
    place: tuple[int, ...]
    """Indices on the leaf's leading axes; empty if the leaf is not stacked."""

    @property
    def numbers(self) -> dict[str, str]:
        """The numbers that the braced words of a rule stand for: the path's "layer" and
        "expert"."""
        return {match[1]: match[2] for match in _NUMBERED.finditer(self.path)}

    @property
    def layer(self) -> int | None:
        """The part's layer; None if it belongs to no layer."""
        number = self.numbers.get("layer")
        return None if number is None else int(number)


@dataclass(frozen=True, kw_only=True)
class LeafSource:
    """One part of the tree and the tensors that fill it."""

    part: LeafPart
    tensors: tuple[str, ...]
    rule: Rule

    @property
    def axis(self) -> int:
        """The axis along which the tensors are joined."""
        return self.rule.axis

    @property
    def transforms(self) -> tuple[Transform, ...]:
        """The transforms of the tensors, in order."""
        return self.rule.transforms

    @property
    def share(self) -> Split | Element | None:
        """The part of its tensors that the leaf takes; None: all."""
        parts = (each for each in self.transforms if isinstance(each, Split | Element))
        return next(parts, None)

    @property
    def path(self) -> str:
        """The part's path in the tree."""
        return self.part.path

    @property
    def leaf(self) -> jax.ShapeDtypeStruct:
        """Shape and dtype of the part."""
        return self.part.leaf


@dataclass
class _Findings:
    sources: list[LeafSource] = field(default_factory=list[LeafSource])
    problems: list[str] = field(default_factory=list[str])


def leaf_paths(tree: Any) -> list[tuple[str, Any]]:
    """Returns (path, leaf) of every leaf, in the order of `jax.tree.leaves`."""
    return [
        (jax.tree_util.keystr(path, simple=True, separator="."), leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    ]


def leaf_nbytes(leaf: Any) -> int:
    """Returns the bytes of an array, or of anything with a shape and a dtype."""
    return math.prod(leaf.shape) * np.dtype(leaf.dtype).itemsize


def leaf_parts(tree: Any) -> list[LeafPart]:
    """Returns the parts of a tree of ShapeDtypeStructs in leaf order, stacked leaves by layer and
    expert."""
    parts: list[LeafPart] = []
    for path, leaf in leaf_paths(tree):
        some, whole = _SOME.search(path), _SOME.sub("layers.", path)
        axes = len(_STACKED.findall(whole))
        if not axes:
            parts.append(LeafPart(path, leaf, path, ()))
            continue
        numbered = _STACKED.sub(r"\1.{}.", whole)
        each = jax.ShapeDtypeStruct(leaf.shape[axes:], leaf.dtype, sharding=leaf.sharding)
        layers = [int(number) for number in re.findall("[0-9]+", some[1])] if some else None
        for place in np.ndindex(leaf.shape[:axes]):
            numbers = place if layers is None else (layers[place[0]], *place[1:])
            parts.append(LeafPart(numbered.format(*numbers), each, path, place))
    return parts


def generic(path: str) -> str:
    """Returns the path of a part without its numbers, "layers.experts.down". It is the same for all
    parts that may be stacked together."""
    return _NUMBER.sub(r"\1.", path)


def with_words(path: str) -> str:
    """Returns the path of a part as in rules, "layers.{layer}.experts.{expert}.down"."""
    return _NUMBERED.sub(r"\1s.{\1}.", path)


def resolve_rules(rules: Sequence[AnyRule], abstract: Any, checkpoint: Tensors) -> list[LeafSource]:
    """Returns the sources of every leaf of `abstract` (ShapeDtypeStructs), in leaf order.

    Exactly one Rule fills each leaf. Every tensor fills one place, unless an Ignore or Repeat
    allows otherwise. Shapes and kinds of dtype must agree.

    Raises:
      CheckpointError: leaves and tensors do not match. The message lists every problem.
    """
    found = _Findings()
    fills = [rule for rule in rules if isinstance(rule, Rule)]
    for part in leaf_parts(abstract):
        _resolve_part(fills, part, checkpoint, found)
    _check_usage(rules, checkpoint, found)
    if found.problems:
        raise CheckpointError(_report(checkpoint, found.problems))
    return found.sources


def _resolve_part(
    rules: Sequence[Rule], part: LeafPart, checkpoint: Tensors, found: _Findings
) -> None:
    path = part.path
    matches = [(rule, match) for rule in rules if (match := _pattern(rule.leaf).fullmatch(path))]
    if len(matches) != 1:
        what = " and ".join(repr(rule.leaf) for rule, _ in matches) or "no rule"
        found.problems.append(f"{path}: filled by {what}, needs exactly one rule")
        return
    rule, match = matches[0]
    first = source = _source(part, rule, match.groupdict())
    while rule.otherwise and not any(name in checkpoint for name in source.tensors):
        rule = rule.otherwise
        source = _source(part, rule, match.groupdict())
    if not any(name in checkpoint for name in source.tensors):
        source = first
    found.sources.append(source)
    missing = [name for name in source.tensors if name not in checkpoint]
    if missing:
        found.problems.append(f"{path}: not in the checkpoint: {', '.join(missing)}")
        return
    found.problems.extend(_mismatches(source, checkpoint))


def _source(part: LeafPart, rule: Rule, numbers: Mapping[str, str]) -> LeafSource:
    """Applies a rule to a part: replaces the words in the rule's sources by the part's numbers."""
    transforms = tuple(
        replace(each, index=int(numbers[str(each.index)])) if isinstance(each, Element) else each
        for each in rule.transforms
    )
    tensors = tuple(substitute(source, numbers) for source in rule.sources)
    return LeafSource(part=part, tensors=tensors, rule=replace(rule, transforms=transforms))


def _pattern(leaf: str) -> re.Pattern[str]:
    return re.compile(re.sub(r"\\{(\w+)\\}", r"(?P<\1>[0-9]+)", re.escape(leaf)))


def substitute(source: str, numbers: Mapping[str, str]) -> str:
    """Replaces the braced words in a tensor's name by numbers."""
    return WORD.sub(lambda match: numbers[match[1]], source)


def _mismatches(source: LeafSource, checkpoint: Tensors) -> list[str]:
    """Returns the differences between a leaf and its tensors."""
    problems: list[str] = []
    try:
        shapes = [_transformed(checkpoint.shape(name), source) for name in source.tensors]
    except ValueError as error:
        return [f"{source.path}: of {', '.join(source.tensors)}: {error}"]
    expected = tuple(source.leaf.shape)
    if _concatenated(shapes, source.axis) != expected:
        parts = " + ".join(
            f"{name} {list(shape)}" for name, shape in zip(source.tensors, shapes, strict=True)
        )
        along = f" along axis {source.axis}" if len(shapes) > 1 else ""
        along += " after what its rule does to them" if source.transforms else ""
        problems.append(f"{source.path}: the model needs {list(expected)}, found {parts}{along}")
    problems += [
        f"{source.path}: {name} is {checkpoint.dtype(name)}, cannot become {source.leaf.dtype}"
        for name in source.tensors
        if not _castable(checkpoint.dtype(name), source.leaf.dtype)
    ]
    return problems


def _transformed(shape: tuple[int, ...], source: LeafSource) -> tuple[int, ...]:
    """Returns the shape after the transforms. ValueError if a transform does not fit."""
    for transform in source.transforms:
        shape = transform.shape(shape)
    return shape


def _concatenated(shapes: list[tuple[int, ...]], axis: int) -> tuple[int, ...] | None:
    """Returns the shape of the concatenation; None if the shapes do not fit."""
    first = shapes[0]
    if len(shapes) == 1:
        return first
    if any(len(shape) <= axis for shape in shapes):
        return None
    if any(
        shape[:axis] + shape[axis + 1 :] != first[:axis] + first[axis + 1 :] for shape in shapes
    ):
        return None
    return (*first[:axis], sum(shape[axis] for shape in shapes), *first[axis + 1 :])


def _castable(source: np.dtype[Any], target: Any) -> bool:
    """Returns whether a dtype may be cast to another. Plain weights may be cast between float
    dtypes; codes (integers, float8) are never cast."""
    floats = ("float16", "bfloat16", "float32", "float64")
    target = np.dtype(target)
    return source == target or (source.name in floats and target.name in floats)


def _check_usage(rules: Sequence[AnyRule], checkpoint: Tensors, found: _Findings) -> None:
    """Checks that each tensor is used once, or in all its parts, or may stay unused."""
    used: dict[str, list[Split | Element | None]] = {}
    for source in found.sources:
        for name in source.tensors:
            used.setdefault(name, []).append(source.share)
    found.problems += [
        f"{name}: {problem}"
        for name in sorted(used)
        if name in checkpoint and (problem := _misuse(used[name], checkpoint.shape(name)))
    ]
    ignored = [rule for rule in rules if isinstance(rule, Ignore)]
    originals = {rule.tensor: rule.original for rule in rules if isinstance(rule, Repeat)}
    for name in checkpoint.names:
        if name in used or any(_allows(rule, name, checkpoint) for rule in ignored):
            continue
        original = originals.get(name)
        if original is None:
            found.problems.append(f"{name}: no leaf of the model takes this tensor")
        elif original in checkpoint and checkpoint.shape(name) != checkpoint.shape(original):
            found.problems.append(
                f"{name}: {list(checkpoint.shape(name))}, should repeat {original} "
                f"{list(checkpoint.shape(original))}"
            )


def _allows(rule: Ignore, name: str, checkpoint: Tensors) -> bool:
    if not fnmatchcase(name, rule.pattern):
        return False
    return not (rule.only_zeros and np.any(checkpoint.read(name)))


def _misuse(shares: list[Split | Element | None], shape: tuple[int, ...]) -> str | None:
    """Returns the problem with the use of one tensor of this shape, given the part that each leaf
    takes; None if there is none."""
    first = shares[0]
    if first is None or any(share is None for share in shares):
        return f"used {len(shares)} times" if len(shares) > 1 else None
    parts = first.parts if isinstance(first, Split) else (*shape, 1)[first.axis]
    every = {replace(first, index=index) for index in range(parts)}
    if set(shares) == every and len(shares) == len(every):
        return None
    return f"used in {len(shares)} parts, which are not each of its {parts} once"


def _report(checkpoint: Tensors, problems: list[str]) -> str:
    count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
    lines = [f"{checkpoint.folder}: does not fit the model, {count}:"]
    lines += problems[:_MAX_PROBLEMS]
    if len(problems) > _MAX_PROBLEMS:
        lines.append(f"and {len(problems) - _MAX_PROBLEMS} more")
    return "\n  ".join(lines)
