"""An operation: a definition in plain JAX, and the implementations that may take its place.

An operation asks its implementations in order. Each one answers with a configuration, or refuses
and says why. The first that takes the arguments, and whose kernels compile for the target, serves
them. The definition comes last and takes everything.

`jaxserve kernels` prints the choices of a model's steps: see `Target.observe`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from jaxserve_kernels.fallback import why_not
from jaxserve_kernels.target import Target


class Refusal(NamedTuple):
    """An implementation does not take some arguments."""

    reason: str
    """A few words, e.g. "more than 16 tokens"."""


@dataclass(frozen=True, kw_only=True)
class Implementation:
    """One way to compute an operation."""

    name: str
    """As in file names: `triton`, `hopper`, `reference`."""
    configure: Callable[..., Any]
    """Called as `configure(*args, target=target, **options)`, where arrays may be abstract. Returns
    a hashable configuration, or a `Refusal`."""
    run: Callable[..., Any]
    """Called as `run(config, *args, target=target, **options)`. Returns the result."""
    kernels: bool = True
    """Whether it runs kernels of ours, which may not compile."""
    label: str | None = None
    """In place of the operation's name, where its kernels do not compile."""


class Choice(NamedTuple):
    """Which implementation serves a call of an operation, and why."""

    operation: str
    what: str
    """The call's sizes, in words."""
    implementation: Implementation
    config: Any
    refused: tuple[tuple[str, str], ...]
    """The implementations before it, and why they refused."""
    pdl: bool
    """Traced for programmatic dependent launch."""


@dataclass(frozen=True, kw_only=True)
class Op:
    """An operation. Called with its arguments, options and target, it computes."""

    name: str | Callable[..., str]
    """Or a function of the arguments and options that gives it: also the label of
    `jaxserve_kernel_fallback`."""
    implementations: tuple[Implementation, ...]
    describe: Callable[..., str] = lambda *_args, **_options: ""
    """Sizes of a call, from its arguments and options, for people."""
    per_layer: bool = False
    """It has an option `layer`, a number on which no choice depends."""
    probe: Callable[..., tuple[Any, ...]] | None = None
    """Arguments in whose place others are compiled to see whether kernels can be."""

    def choose(self, *args: Any, target: Target, **options: Any) -> Choice:
        """Returns the first implementation that takes the arguments, and why others did not.

        Args:
          args: trees of arrays, which may be abstract.
          options: hashable values.
        """
        name = self.name if isinstance(self.name, str) else self.name(*args, **options)
        refused: list[tuple[str, str]] = []
        for each in self.implementations:
            config = each.configure(*args, target=target, **options)
            if not isinstance(config, Refusal):
                reason = self._does_not_compile(name, each, config, args, target, options)
                if reason is None:
                    what = self.describe(*args, **options)
                    return Choice(name, what, each, config, tuple(refused), target.pdl)
                config = Refusal(f"does not compile: {reason}")
            refused.append((each.name, config.reason))
        raise AssertionError(f"{name} has no definition")

    def __call__(self, *args: Any, target: Target, **options: Any) -> Any:
        """Returns the result of the chosen implementation."""
        choice = self.choose(*args, target=target, **options)
        if target.observe is not None:
            target.observe(choice)
        return choice.implementation.run(choice.config, *args, target=target, **options)

    def _does_not_compile(
        self,
        name: str,
        implementation: Implementation,
        config: Any,
        args: tuple[Any, ...],
        target: Target,
        options: dict[str, Any],
    ) -> str | None:
        if not implementation.kernels:
            return None
        silent = target.replace(observe=None)
        decisive = options | {"layer": 0} if self.per_layer else options

        def kernels(*args: Any) -> Any:
            return implementation.run(config, *args, target=silent, **decisive)

        static = (implementation.name, config, tuple(sorted(decisive.items())))
        args = self.probe(*args) if self.probe else args
        return why_not(implementation.label or name, kernels, *args, static=static, target=silent)


def on_kernels(*_: Any, target: Target, **__: Any) -> Refusal | None:
    """`configure` of kernels that take everything and have one configuration."""
    return None if target.uses_triton() else NO_KERNELS


def anything(*_: Any, **__: Any) -> None:
    """`configure` of a definition."""


NO_KERNELS = Refusal("there are no kernels")
NOT_HOPPER = Refusal("written for GPUs of compute capability 9.0")
NOT_PDL = Refusal("only with programmatic dependent launch")
