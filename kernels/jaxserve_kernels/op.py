"""An operation: a definition in plain JAX, and faster implementations of it.

An operation asks its implementations in order. Each one returns a configuration, or refuses and
says why. The first one that accepts the arguments, and whose kernels compile for the target, runs.
The definition comes last and accepts everything.

`jaxserve kernels` prints which implementations a model's steps use: see `Target.observe`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from jaxserve_kernels.fallback import why_not
from jaxserve_kernels.target import Target


class Refusal(NamedTuple):
    """An implementation does not accept some arguments."""

    reason: str
    """A few words, e.g. "more than 16 tokens"."""


@dataclass(frozen=True, kw_only=True)
class Implementation:
    """One way to compute an operation."""

    name: str
    """The name of its file: `triton`, `hopper`, `reference`."""
    configure: Callable[..., Any]
    """Called as `configure(*args, target=target, **options)`. Arrays may be abstract. Returns a
    hashable configuration, or a `Refusal`."""
    run: Callable[..., Any]
    """Called as `run(config, *args, target=target, **options)`. Returns the result."""
    kernels: bool = True
    """Whether it runs kernels of this package. Those may fail to compile."""
    label: str | None = None
    """Replaces the operation's name in reports of kernels that do not compile."""


class Choice(NamedTuple):
    """Which implementation serves a call of an operation, and why."""

    operation: str
    what: str
    """The call's sizes, for people to read."""
    implementation: Implementation
    config: Any
    refused: tuple[tuple[str, str], ...]
    """Names of the earlier implementations, and why each refused."""
    pdl: bool
    """Whether the call was traced for programmatic dependent launch."""


@dataclass(frozen=True, kw_only=True)
class Op:
    """An operation: a function of arrays, options and a target."""

    name: str | Callable[..., str]
    """The name, or a function that makes it from the arguments and options. The metric
    `jaxserve_kernel_fallback` uses it as a label."""
    implementations: tuple[Implementation, ...]
    describe: Callable[..., str] = lambda *_args, **_options: ""
    """Returns the sizes of a call, for people to read, from its arguments and options."""
    per_layer: bool = False
    """Whether there is an option `layer`, which has no influence on the choice."""
    probe: Callable[..., tuple[Any, ...]] | None = None
    """Maps the arguments to the ones that the test compilation uses in their place."""

    def choose(self, *args: Any, target: Target, **options: Any) -> Choice:
        """Returns the first implementation that accepts the arguments, and why others refused.

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
                    launched = target.pdl or (target.joined and each.kernels)
                    return Choice(name, what, each, config, tuple(refused), launched)
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
    """`configure` of kernels that accept all arguments and have one configuration."""
    return None if target.uses_triton() else NO_KERNELS


def anything(*_: Any, **__: Any) -> None:
    """`configure` of a definition, which accepts all arguments."""


NO_KERNELS = Refusal("there are no kernels")
NOT_HOPPER = Refusal("written for GPUs of compute capability 9.0")
NOT_PDL = Refusal("only with programmatic dependent launch")
