"""The device state of running sequences: one int32 row per slot.

    column 0              last sampled token
    columns 1..5          temperature, top_k, top_p, min_p, seed (float32 as their bits)
    column 6              features: which tables of `slot_tables` the sampler reads
    columns 7..9          presence, frequency and repetition penalty; read only if in use
    column 10             length of the prompt in tokens
    column 11             position + 1 of the token whose state is kept for the head; 0: none
    columns PAGES..       page tables of the cache groups, one after the other

A step changes the matrix by a list of (address, value) pairs, which travel in the one small array
that the host sends per step. The last row belongs to padding.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

import jax.numpy as jnp
from jax import Array, lax

from jaxserve.api import SamplingParams
from jaxserve_kernels.sampler import BIASED, MASKED, PENALISED

LAST_TOKEN, TEMPERATURE, TOP_K, TOP_P, MIN_P, SEED = range(6)
FEATURES, PRESENCE, FREQUENCY, REPETITION, PROMPT, HEAD_STATE = range(6, 12)
PAGES = 16
"""First column of the page table: the columns before it are padded to 64 bytes."""


def shape(slots: int, pages_per_seq: int, groups: int = 1) -> tuple[int, int]:
    """Returns the shape of the matrix for `slots` sequences and the padding row.

    Args:
      pages_per_seq: entries of each page table.
      groups: cache groups.
    """
    return slots + 1, PAGES + groups * pages_per_seq


def columns(params: SamplingParams) -> Iterator[tuple[int, int]]:
    """Yields the (column, int32 value) pairs of a sequence's sampling parameters."""
    yield TEMPERATURE, _float_bits(params.temperature)
    yield TOP_K, params.top_k
    yield TOP_P, _float_bits(params.top_p)
    yield MIN_P, _float_bits(params.min_p)
    yield SEED, struct.unpack("<i", struct.pack("<I", params.seed & 0xFFFFFFFF))[0]
    yield FEATURES, features(params)
    if params.penalised:
        yield PRESENCE, _float_bits(params.presence_penalty)
        yield FREQUENCY, _float_bits(params.frequency_penalty)
        yield REPETITION, _float_bits(params.repetition_penalty)


def features(params: SamplingParams) -> int:
    """Returns flags for the slot tables that the sampler must read for the sequence."""
    biased = params.logit_bias or (params.min_tokens and params.stop_token_ids)
    return (
        PENALISED * params.penalised
        | BIASED * bool(biased)
        | MASKED * bool(params.allowed_token_ids)
    )


def apply(state: Array, addresses: Array, values: Array) -> Array:
    """Writes `values` [updates] at flat `addresses` [updates]; drops addresses out of range."""
    flat = state.reshape(-1).at[addresses].set(values, mode="drop", unique_indices=True)
    return flat.reshape(state.shape)


def float_column(state: Array, slots: Array, column: int) -> Array:
    """Returns a float32 column of the given slots [rows]."""
    return lax.bitcast_convert_type(state[slots, column], jnp.float32)


def page_tables(state: Array, groups: int) -> list[Array]:
    """Returns the page table of each cache group: int32 [slots + 1, pages_per_seq]."""
    width = (state.shape[1] - PAGES) // groups
    return [state[:, PAGES + width * each : PAGES + width * (each + 1)] for each in range(groups)]


def pages_at(state: Array, groups: int, slots: Array, entries: Array) -> list[Array]:
    """Returns entries [tokens] of the page tables of slots [tokens], for each cache group.

    The same as an index into `page_tables`, which XLA copies for the kernels. So it would read them
    in a kernel of its own, after that copy.
    """
    width = (state.shape[1] - PAGES) // groups
    return [state[slots, PAGES + width * each + entries] for each in range(groups)]


def _float_bits(value: float) -> int:
    return struct.unpack("<i", struct.pack("<f", value))[0]
