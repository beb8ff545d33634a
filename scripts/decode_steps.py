"""Plans of decode steps, and the bytes that such steps must move."""

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
    """Plans of decode steps of `batch` sequences with `context` tokens. The first one admits them.
    With a temperature the sequences sample different tokens, so that rows use different experts."""
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
    """For each cache group, the page table entries that `steps` steps of a sequence with `context`
    tokens read or write. Other entries have the padding page, which may contain NaN."""
    size = config.cache.page_size
    end = -(-(context + steps) // size)
    windows = (group.window for group in config.cache.groups)
    return [range(max(0, context + 1 - window) // size if window else 0, end) for window in windows]


def fits(config: RunnerConfig, batch: int, context: int, steps: int) -> bool:
    """Whether the cache has enough pages for `decode_plans`."""
    pairs = zip(config.cache.groups, pages_of_groups(config, context, steps), strict=True)
    return all(batch * len(positions) <= group.usable_pages for group, positions in pairs)


def kv_bytes(config: RunnerConfig, context: int) -> float:
    """Bytes of a sequence's keys and values in all layers, as stored in full pages. Layers with a
    window count only the tokens inside it."""
    total = 0.0
    for shape, group in zip(config.kv_shapes, config.spec.cache_groups, strict=True):
        page = config.kv_format.page_bytes(shape, config.dtype)
        total += min(context, group.window or context) * page / config.cache.page_size
    return total


def state_bytes(config: RunnerConfig) -> int:
    """Bytes of a sequence's state in recurrent layers."""
    return tree_bytes(delta_net.abstract_state(config.spec, config.dtype, slots=1))


def step_bytes(
    config: RunnerConfig,
    params: decoder.Params,
    batch: int,
    context: int,
    touched: float | None = None,
) -> float:
    """Bytes that a decode step must move. `touched`: see `weight_bytes`."""
    moved = weight_bytes(params, config.spec, batch, touched) + batch * kv_bytes(config, context)
    return moved + 2 * batch * state_bytes(config)


def weight_bytes(
    params: decoder.Params, spec: ModelSpec, batch: int, touched: float | None = None
) -> int:
    """Returns the bytes of weights that a step of `batch` tokens must read. An embedding that is
    not also the output matrix counts one row for each token.

    Args:
      touched: number of experts per layer that any token uses; None: the expected number if tokens
        choose at random.
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
