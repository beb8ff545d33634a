"""Steps of sequences that decode: their plans, and the bytes that they must move."""

from __future__ import annotations

import jax

from jaxserve.api import SamplingParams
from jaxserve.model_spec import ModelSpec
from jaxserve.models import decoder, delta_net
from jaxserve.models.layer_weights import Experts
from jaxserve.plan import Admission, PageEntry, Row, StepPlan
from jaxserve.runner.programs import RunnerConfig
from jaxserve.startup.memory import tree_bytes
from jaxserve_kernels.matmul import as_read
from jaxserve_kernels.target import Target


def decode_plans(
    config: RunnerConfig, batch: int, context: int, steps: int, temperature: float
) -> list[StepPlan]:
    """Steps of `batch` sequences that hold `context` tokens; the first one admits them. With a
    temperature each samples other tokens, so that experts are those of rows that differ."""
    admissions = tuple(
        Admission(slot, SamplingParams(max_tokens=steps, temperature=temperature, seed=slot))
        for slot in range(batch)
    )
    pages = tuple(
        PageEntry(slot, position, 1 + slot * len(positions) + index, group)
        for group, positions in enumerate(pages_of_groups(config, context, steps))
        for slot in range(batch)
        for index, position in enumerate(positions)
    )
    return [
        StepPlan(
            rows=tuple(Row(slot, slot, context + step, (), True) for slot in range(batch)),
            admissions=() if step else admissions,
            pages=() if step else pages,
        )
        for step in range(steps)
    ]


def pages_of_groups(config: RunnerConfig, context: int, steps: int) -> list[range]:
    """Of each cache group the places in its page table that `steps` steps read or write of a
    sequence with `context` tokens. Other places have the padding page, which may hold NaN."""
    size = config.cache.page_size
    end = -(-(context + steps) // size)
    windows = (group.window for group in config.cache.groups)
    return [range(max(0, context + 1 - window) // size if window else 0, end) for window in windows]


def fits(config: RunnerConfig, batch: int, context: int, steps: int) -> bool:
    """Whether the cache has the pages of `decode_plans`."""
    pairs = zip(config.cache.groups, pages_of_groups(config, context, steps), strict=True)
    return all(batch * len(positions) <= group.usable_pages for group, positions in pairs)


def kv_bytes(config: RunnerConfig, context: int) -> float:
    """Of a sequence's tokens as full pages hold them, in all layers: of those with a window, of as
    many as it has."""
    total = 0.0
    for shape, group in zip(config.kv_shapes, config.spec.cache_groups, strict=True):
        page = config.kv_format.page_bytes(shape, config.dtype)
        total += min(context, group.window or context) * page / config.cache.page_size
    return total


def state_bytes(config: RunnerConfig) -> int:
    """Of a sequence's recurrent layers."""
    return tree_bytes(delta_net.abstract_state(config.spec, config.dtype, slots=1))


def step_bytes(
    config: RunnerConfig,
    params: decoder.Params,
    batch: int,
    context: int,
    touched: float | None = None,
) -> float:
    """What a decode step must move; `touched`: see `weight_bytes`."""
    moved = weight_bytes(params, config.spec, batch, touched) + batch * kv_bytes(config, context)
    return moved + 2 * batch * state_bytes(config)


def weight_bytes(
    params: decoder.Params, spec: ModelSpec, batch: int, touched: float | None = None
) -> int:
    """Returns what a step of so many tokens must read of the weights: of an embedding that is not
    the output matrix, too, a row for each token.

    Args:
      touched: experts of a layer that some token has; None: as many as if each chose at random.
    """
    total = tree_bytes(as_read(params, batch, target=Target.here()))
    if spec.experts:
        count, k = spec.experts.num_experts, spec.experts.top_k
        if touched is None:
            touched = count * (1 - (1 - k / count) ** batch)
        nodes = jax.tree.leaves(params, is_leaf=lambda node: isinstance(node, Experts))
        of_experts = [node for node in nodes if isinstance(node, Experts)]
        total -= round((1 - touched / count) * tree_bytes(of_experts))
    if params.lm_head is None:
        return total
    rows = jax.tree.leaves(params.embedding)[0].shape[0]
    return total - tree_bytes(params.embedding) * (rows - batch) // rows
