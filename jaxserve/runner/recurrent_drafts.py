"""Verify steps of a model with recurrent layers, whose state cannot be rolled back.

The layers of a verify step read the old state and do not write it. The step keeps the layers' state
inputs for all its tokens instead. Once it knows the number of accepted positions, it applies just
those inputs, in the order of plain decoding. So the state has the same bits as without drafts.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from jaxserve.model_spec import ModelSpec
from jaxserve.models import decoder, delta_net
from jaxserve.models.delta_net import Unsettled
from jaxserve.models.layer import Caches, StepTokens
from jaxserve.models.layer_weights import layer_views
from jaxserve_kernels.recurrent_state import RecurrentState, RecurrentStep, Rows
from jaxserve_kernels.target import Target


def unsettled(kv: Caches) -> Caches:
    """Returns the caches with the recurrent state marked as not to be written yet."""
    own = kv[-1]
    return (*kv[:-1], Unsettled(own)) if isinstance(own, RecurrentState) else kv


def located(tokens: StepTokens, slots: Array, begin: Array, length: Array) -> StepTokens:
    """Returns the tokens of a verify step with their places in the state.

    Args:
      slots, begin, length: int32 [rows], see `verify_runs.Runs`.
    """
    rows, total = slots.shape[0], tokens.ids.shape[0]
    first = total // rows * jnp.arange(rows, dtype=jnp.int32)
    place, own = tokens.places[0], Rows(first, length, slots, begin)
    return tokens._replace(recurrent=RecurrentStep(place.slots, place.positions, own))


def settled(
    params: decoder.Params,
    kv: Caches,
    tokens: StepTokens,
    accepted: Array,
    spec: ModelSpec,
    *,
    padding_slot: int,
    target: Target,
) -> Caches:
    """Returns the caches after a verify step.

    Args:
      params: the target model's weights.
      accepted: int32 [rows], number of accepted positions.
    """
    own, step = kv[-1], tokens.recurrent
    if not isinstance(own, Unsettled):
        return kv
    assert step is not None
    nets = [each.delta for each in layer_views(params.layers) if each.delta is not None]
    step = step.cut(accepted, padding_slot)
    return (*kv[:-1], delta_net.settle(nets, own, step, spec, target=target))
