"""Presents a quantised checkpoint under the tensor names of the plain one, and decodes its
modules."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from jaxserve_checkpoints.quantized.format import (
    AnyFormat,
    Codes,
    Expected,
    Format,
    Inconsistent,
    TensorInfo,
    expect,
)
from jaxserve_checkpoints.quantized.mxfp4 import Mxfp4, Mxfp4Experts
from jaxserve_checkpoints.reader import AnyArray, Checkpoint, CheckpointError
from jaxserve_checkpoints.rules import Transform
from jaxserve_kernels.weights import Int4Weight, OrderedInt4Weight, Weight, layout

_MAX_PROBLEMS = 20


@dataclass(frozen=True, kw_only=True)
class Module:
    """A quantised linear layer of a checkpoint."""

    name: str
    format: Format
    size: tuple[int, int]
    """(out, in)"""
    tensors: tuple[str, ...]
    """Suffixes of the tensors that it is decoded from."""
    order: AnyArray | None
    """See Format.order."""
    experts: int | None = None
    """Number of experts that each tensor stacks on a leading axis; None: not stacked."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The plain weight's shape: [out, in], with a leading axis of experts if stacked."""
        return self.size if self.experts is None else (self.experts, *self.size)


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("tensors", "order"),
    meta_fields=("format", "sizes"),
)
@dataclass(frozen=True, kw_only=True)
class PackedModules:
    """Modules that are stacked along the outputs into one weight, as stored in the files."""

    tensors: tuple[dict[str, Any], ...]
    """The tensors of each module by suffix: arrays or ShapeDtypeStructs."""
    order: Any
    """int32 [in], the same for all modules, or None."""
    format: Format
    sizes: tuple[tuple[int, int], ...]

    @property
    def abstract(self) -> PackedModules:
        """The same with ShapeDtypeStructs in place of arrays."""
        return jax.tree.map(lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype), self)

    def decode(self) -> Weight:
        """Returns the weight in the engine's format. Compiled once per shape."""
        return _decode(self)


@jax.jit
def _decode(packed: PackedModules) -> Weight:
    modules = [
        packed.format.decode(tensors, size, packed.order)
        for tensors, size in zip(packed.tensors, packed.sizes, strict=True)
    ]
    codes: Codes = jax.tree.map(lambda *parts: jnp.concatenate(parts), *modules)
    weight = codes.pack()
    if packed.order is None:
        return weight
    assert isinstance(weight, Int4Weight)
    return OrderedInt4Weight(weight.packed, weight.scale, packed.order, weight.zero)


class QuantizedCheckpoint:
    """A checkpoint whose quantised modules appear as plain tensors: module `m` as `m.weight`.

    Raises:
      CheckpointError: no module is quantised, or tensors contradict the configuration or each
        other. The message lists every problem.
    """

    def __init__(self, checkpoint: Checkpoint, format: AnyFormat) -> None:
        self.checkpoint = checkpoint
        self.folder = checkpoint.folder
        self.format = format
        self.modules: dict[str, Module] = {}
        self.unused: list[str] = []
        """Tensors that the engine ignores, such as scales of activations and caches."""
        problems: list[str] = []
        for prefix in self._by_module:
            own = format.of(prefix)
            main = f"{prefix}{own.main}" if own else ""
            if own is None or main not in checkpoint or not own.holds(self._info(main)):
                continue
            try:
                self.modules[prefix] = self._module(prefix, own)
            except Inconsistent as error:
                problems.append(f"{prefix}: {error}")
        self.modules |= self._stacks(format, problems)
        if problems or not self.modules:
            raise CheckpointError(self._report(problems))
        ordered = {each.format for each in self.modules.values() if each.order is not None}
        for name, module in self.modules.items():
            if module.format in ordered:
                self.modules[name] = _ordered(module)
        taken = {f"{m.name}{suffix}" for m in self.modules.values() for suffix in m.tensors}
        # Ignored tensors may still describe others: shapes, orders.
        shapes = {
            f"{m.name}{suffix}"
            for m in self.modules.values()
            for suffix in m.format.layout(*m.size)
            if suffix in _DESCRIBING
        }
        self.unused = [
            f"{name}{suffix}"
            for name, module in self.modules.items()
            for suffix in module.format.unused
            if f"{name}{suffix}" in checkpoint
        ]
        self.unused += [name for name in checkpoint.names if name.endswith(_KV_SCALES)]
        hidden = taken | shapes | set(self.unused)
        plain = {name: name for name in checkpoint.names if name not in hidden}
        logical = {f"{name}.weight": name for name in self.modules}
        self.names = tuple(sorted(plain | logical))
        self._known = frozenset(self.names)

    def __contains__(self, name: object) -> bool:
        return name in self._known

    def shape(self, name: str) -> tuple[int, ...]:
        """Returns the shape of a plain tensor, or the plain weight's shape for a quantised
        module."""
        module = self.module(name)
        return self.checkpoint.shape(name) if module is None else module.shape

    def dtype(self, name: str) -> np.dtype[Any]:
        """Returns the dtype of a plain tensor; bfloat16 for a quantised module."""
        if self.module(name) is None:
            return self.checkpoint.dtype(name)
        return np.dtype(ml_dtypes.bfloat16)

    def read(self, name: str) -> AnyArray:
        """Reads a tensor that is not quantised: see Checkpoint.read."""
        assert self.module(name) is None, f"{name} is packed"
        return self.checkpoint.read(name)

    @property
    def main_dtype(self) -> np.dtype[Any]:
        """The dtype of the largest tensor that is not quantised."""
        plain = [name for name in self.names if self.module(name) is None]
        return self.checkpoint.dtype(max(plain, key=self.checkpoint.nbytes))

    def module(self, name: str) -> Module | None:
        """Returns the quantised module behind the tensor `name`; None for a plain tensor."""
        prefix = name.removesuffix(".weight")
        return None if prefix == name else self.modules.get(prefix)

    def packed(
        self,
        names: Sequence[str],
        path: str,
        transforms: Sequence[Transform] = (),
        *,
        abstract: bool = False,
    ) -> PackedModules | None:
        """Returns the modules behind the tensors `names`, on the host; None if all are plain.

        Args:
          names: tensors that make up one parameter.
          path: the parameter's name, for errors.
          transforms: select an expert, and reorder its rows.
          abstract: return ShapeDtypeStructs, and read nothing.

        Raises:
          CheckpointError: only some are quantised, or they cannot form one weight.
        """
        found = [self.module(name) for name in names]
        modules = [module for module in found if module is not None]
        if not modules:
            return None
        if len(modules) < len(found):
            plain = [name for name, module in zip(names, found, strict=True) if module is None]
            raise CheckpointError(
                f"{self.folder}: {path} is one matrix, of which {modules[0].name} is quantised and "
                f"{', '.join(plain)} is not; supported is all or nothing"
            )
        if any(module.format != modules[0].format for module in modules):
            kinds = ", ".join(f"{module.name} {module.format.describe()}" for module in modules)
            raise CheckpointError(
                f"{self.folder}: {path} is one matrix of several formats: {kinds}; supported is one"
            )
        if transforms and any(module.experts is None for module in modules):
            raise CheckpointError(
                f"{self.folder}: {path} is made of {', '.join(names)} by reordering them, which is "
                "not supported for tensors that are quantised"
            )
        out, depth = sum(module.size[0] for module in modules), modules[0].size[1]
        if out % layout.TILE_OUT or (depth % layout.TILE_IN and not modules[0].format.pads):
            raise CheckpointError(
                f"{self.folder}: {path} is [{out}, {depth}]; quantised weights are [out, in] with "
                f"out a multiple of {layout.TILE_OUT} and in a multiple of {layout.TILE_IN}"
            )
        orders = [module.order for module in modules if module.order is not None]
        if any(not np.array_equal(order, orders[0]) for order in orders):
            names_of = ", ".join(module.name for module in modules)
            raise CheckpointError(
                f"{self.folder}: the g_idx of {names_of} differ; they share their inputs and must "
                "have them in one order"
            )
        return PackedModules(
            tensors=tuple(
                {suffix: self._tensor(m, suffix, transforms, abstract) for suffix in m.tensors}
                for m in modules
            ),
            order=orders[0] if orders else None,
            format=modules[0].format,
            sizes=tuple(module.size for module in modules),
        )

    def _tensor(
        self, module: Module, suffix: str, transforms: Sequence[Transform], abstract: bool
    ) -> Any:
        """One of a module's tensors. Transforms of rows apply to codes and scales alike."""
        name = f"{module.name}{suffix}"
        if abstract and module.experts is not None:
            shape = self.checkpoint.shape(name)
            for transform in transforms:
                shape = transform.shape(shape)
            return jax.ShapeDtypeStruct(shape, self.checkpoint.dtype(name))
        array = module.format.prepared(suffix, self.checkpoint.read(name))
        for transform in transforms:
            array = transform.apply(array)
        return array

    def release(self, name: str) -> None:
        """See Checkpoint.release."""
        module = self.module(name)
        if module is None:
            self.checkpoint.release(name)
            return
        for suffix in module.tensors:
            self.checkpoint.release(f"{module.name}{suffix}")

    def _stacks(self, format: AnyFormat, problems: list[str]) -> dict[str, Module]:
        """Finds MXFP4 experts, which are stored in one tensor per layer."""
        found: dict[str, Module] = {}
        experts = Mxfp4Experts()
        for name in self.checkpoint.names if isinstance(format, Mxfp4) else ():
            prefix, shape = name.removesuffix(experts.main), self.checkpoint.shape(name)
            if prefix == name or len(shape) != 4:
                continue
            size = (shape[1], 32 * shape[2])
            for suffix, want in experts.layout(*size).items():
                stacked = expect((shape[0], *want.shapes[0]), dtypes=" ".join(want.dtypes))
                tensor = f"{prefix}{suffix}"
                info = self._info(tensor) if tensor in self.checkpoint else None
                if problem := _mismatch(suffix, stacked, info):
                    problems.append(f"{prefix}: {problem}")
            found[prefix] = Module(
                name=prefix,
                format=experts,
                size=size,
                tensors=tuple(experts.layout(*size)),
                order=None,
                experts=shape[0],
            )
        return found

    def _info(self, name: str) -> TensorInfo:
        return TensorInfo(self.checkpoint.shape(name), self.checkpoint.dtype(name))

    def _module(self, prefix: str, format: Format) -> Module:
        checkpoint = self.checkpoint

        def read(suffix: str) -> AnyArray | None:
            name = f"{prefix}{suffix}"
            return checkpoint.read(name) if name in checkpoint else None

        def must_read(suffix: str) -> AnyArray:
            return checkpoint.read(f"{prefix}{suffix}")

        infos = {name.removeprefix(prefix): self._info(name) for name in self._by_module[prefix]}
        size = format.size(infos, must_read)
        expected = format.layout(*size)
        problems = [
            problem
            for suffix, want in expected.items()
            if (problem := _mismatch(suffix, want, infos.get(suffix)))
        ]
        if ".weight" in infos and ".weight" not in expected:
            problems.append("it has a plain weight, too")
        if problems:
            raise Inconsistent("; ".join(problems))
        format.check(read)
        return Module(
            name=prefix,
            format=format,
            size=size,
            tensors=tuple(
                suffix for suffix in expected if suffix in infos and suffix not in _DESCRIBING
            ),
            order=format.order(read),
        )

    @functools.cached_property
    def _by_module(self) -> dict[str, list[str]]:
        groups: dict[str, list[str]] = {}
        for name in self.checkpoint.names:
            groups.setdefault(name.rpartition(".")[0], []).append(name)
        return groups

    def _report(self, problems: list[str]) -> str:
        what = f"{self.folder}: its settings say {self.format.describe()}"
        if not problems:
            tensor = (
                f"a tensor {self.format.main[1:]}" if isinstance(self.format, Format) else "any"
            )
            return f"{what}, but no module has {tensor} of that kind"
        lines = [f"{what}, but", *problems[:_MAX_PROBLEMS]]
        if len(problems) > _MAX_PROBLEMS:
            lines.append(f"and {len(problems) - _MAX_PROBLEMS} more")
        return "\n  ".join(lines)


_DESCRIBING = (".g_idx", ".weight_g_idx", ".weight_shape", ".shape")
"""Tensors that describe other tensors; read on the host."""


_KV_SCALES = (".self_attn.q_scale", ".self_attn.k_scale", ".self_attn.v_scale")
"""Scales of attention in fp8."""


def _mismatch(suffix: str, want: Expected, found: TensorInfo | None) -> str | None:
    if found is None:
        return None if want.optional else f"it has no {suffix[1:]}"
    if found.shape in want.shapes and found.dtype.name in want.dtypes:
        return None
    shapes = " or ".join(str(list(shape)) for shape in want.shapes)
    return (
        f"{suffix[1:]} is {found.dtype.name} {list(found.shape)}, should be "
        f"{' or '.join(want.dtypes)} {shapes}"
    )


def _ordered(module: Module) -> Module:
    """Returns the module with an explicit order of inputs. Modules are stacked only if all or none
    have one."""
    if module.order is not None:
        return module
    identity = np.arange(module.size[1], dtype=np.int32)
    return replace(module, order=identity)
