"""The definition of sampling, in plain JAX, without a full sort.

Each row has its own parameters. Its random numbers depend only on (seed, position), so other rows
of the step never change its choice. Work that no row of the step needs is skipped.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxserve_kernels.sampler.adjust import RowAdjustments, SlotTables, adjust, count

RADIX_BITS = 2
"""Bits of a threshold that one pass over the row finds, with 3 comparisons per element."""

MIN_TEMPERATURE = 1e-6
"""Lower bound of the temperature. It is greedy for logits that differ by more than float32 noise;
lower values could overflow."""


type Largest = Callable[[Array, int], tuple[Array, Array]]
"""Function like `jax.lax.top_k`: the largest values of each row, falling, and their indices."""


class RowSampling(NamedTuple):
    """Sampling parameters of each row, all [rows]. Rows that do not sample are not active."""

    active: Array  # bool
    temperature: Array  # float32, 0 is greedy
    top_k: Array  # int32, 0 keeps all
    top_p: Array  # float32
    min_p: Array  # float32
    seed: Array  # int32
    position: Array  # int32: of the token to be sampled


class Logprobs(NamedTuple):
    """Natural logarithms of probabilities, before adjustments, temperature and truncation."""

    sampled: Array  # float32 [rows]
    top_ids: Array  # int32 [rows, alternatives], most likely first
    top: Array  # float32 [rows, alternatives]


class TokenScores(NamedTuple):
    """Logprobs and ranks of given tokens, and the most likely tokens at their positions."""

    logprob: Array  # float32 [rows]
    rank: Array  # int32 [rows]: 1 for the most likely token
    top_ids: Array  # int32 [rows, alternatives], most likely first
    top: Array  # float32 [rows, alternatives]


class Sample(NamedTuple):
    """The result of `sample`."""

    tokens: Array  # int32 [rows]
    logprobs: Logprobs
    tables: SlotTables
    """The tables, with the tokens of penalised rows counted."""


def largest(values: Array, count: int) -> tuple[Array, Array]:
    """Like `jax.lax.top_k`, with ties in the order of their indices.

    Takes maxima one by one, because XLA's sort cannot be part of a CUDA graph.
    """
    rows = values.shape[0]
    row = jnp.arange(rows)

    def take(index: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        left, found, ids = carry
        best = jnp.argmax(left, axis=-1).astype(jnp.int32)
        found = found.at[:, index].set(left[row, best])
        return left.at[row, best].set(-jnp.inf), found, ids.at[:, index].set(best)

    start = jnp.zeros((rows, count), values.dtype), jnp.zeros((rows, count), jnp.int32)
    return lax.fori_loop(0, count, take, (values, *start))[1:]


def sample(
    logits: Array,
    rows: RowSampling,
    adjustments: RowAdjustments,
    tables: SlotTables,
    wanted: Array,
    *,
    vocab: int,
    alternatives: int,
    largest: Largest = largest,
) -> Sample:
    """The next token of each row, and its logprobs::

        logits[:, vocab:] = -inf
        tokens = choose(adjust(logits, rows.position, adjustments, tables), rows)
        tables = count(tokens, rows.active, adjustments, tables)
        return tokens, logprobs(logits, tokens, wanted), tables

    Rows that are not active and want no logprobs cost nothing. Their token and logprob are 0.

    Args:
      logits: float32 [rows, padded vocab].
      rows: parameters of each row.
      adjustments: each row's penalties, biases and masks, which refer to `tables` [slots, ...].
      wanted: bool [rows]: rows whose most likely `alternatives` tokens are wanted.
      vocab: only token ids below it are sampled; the rest of the logits is padding.
      largest: see `logprobs`.

    Returns:
      Tokens, logprobs and tables. Logprobs are the model's, before adjustments. `top` and `top_ids`
      are undefined for rows that do not want them.
    """
    logits = jnp.where(jnp.arange(logits.shape[1]) < vocab, logits, -jnp.inf)
    used = rows.active | wanted
    tokens = choose(adjust(logits, rows.position, adjustments, tables), rows)
    tokens = jnp.where(used, tokens, 0)
    tables = count(tokens, rows.active, adjustments, tables)
    found = logprobs(logits, tokens, wanted, alternatives=alternatives, largest=largest)
    return Sample(tokens, found._replace(sampled=jnp.where(used, found.sampled, 0.0)), tables)


def choose(logits: Array, rows: RowSampling) -> Array:
    """Draws the next token of each row: int32 [rows] from float32 logits [rows, vocab].

    Applies temperature, then top-k, then top-p to the tokens that top-k keeps, then min-p relative
    to the most likely token. The maximum of scores with Gumbel noise then draws from the
    renormalised distribution. Tokens that tie with the last kept one are kept.
    """
    greedy = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    random = rows.active & (rows.temperature > 0)

    def draw() -> Array:
        temperature = jnp.maximum(rows.temperature, MIN_TEMPERATURE)
        scaled = logits / jnp.where(random, temperature, 1.0)[:, None]
        truncates = random & ((rows.top_k > 0) | (rows.top_p < 1) | (rows.min_p > 0))
        kept = lax.cond(jnp.any(truncates), lambda: truncate(scaled, rows), lambda: scaled)
        noisy = kept + _gumbel(rows, logits.shape[-1])
        return jnp.where(random, jnp.argmax(noisy, axis=-1).astype(jnp.int32), greedy)

    return lax.cond(jnp.any(random), draw, lambda: greedy)


def logprobs(
    logits: Array,
    sampled: Array,
    wanted: Array,
    *,
    alternatives: int,
    largest: Largest = largest,
) -> Logprobs:
    """Logprobs of the sampled tokens and, if any row wants them, of the most likely ones.

    Args:
      logits: float32 [rows, vocab].
      sampled: int32 [rows].
      wanted: bool [rows].
      largest: finds the most likely tokens.
    """
    norm = jax.nn.logsumexp(logits, axis=-1)
    chosen = jnp.take_along_axis(logits, sampled[:, None], axis=-1)[:, 0] - norm

    def most_likely() -> tuple[Array, Array]:
        values, ids = largest(logits, alternatives)
        return ids, values - norm[:, None]

    def none() -> tuple[Array, Array]:
        shape = (logits.shape[0], alternatives)
        return jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.float32)

    return Logprobs(chosen, *lax.cond(jnp.any(wanted), most_likely, none))


def score(
    logits: Array, tokens: Array, *, vocab: int, alternatives: int, largest: Largest = largest
) -> TokenScores:
    """Scores of given tokens: int32 [rows] under float32 logits [rows, padded vocab]."""
    logits = jnp.where(jnp.arange(logits.shape[1]) < vocab, logits, -jnp.inf)
    wanted = jnp.ones(tokens.shape, bool)
    found = logprobs(logits, tokens, wanted, alternatives=alternatives, largest=largest)
    chosen, top_ids, top = found
    return TokenScores(chosen, ranks(logits, tokens), top_ids, top)


def ranks(logits: Array, tokens: Array) -> Array:
    """int32 [rows]: 1 + the number of tokens with a larger logit."""
    value = jnp.take_along_axis(logits, tokens[:, None], axis=-1)
    return 1 + jnp.sum(logits > value, axis=-1, dtype=jnp.int32)


def truncate(scaled: Array, rows: RowSampling) -> Array:
    """Sets tokens that top-k, top-p or min-p exclude to -inf; float32 [rows, vocab]."""
    vocab = scaled.shape[-1]
    keys = _ordered(scaled)
    keep_count = jnp.where(rows.top_k > 0, rows.top_k, vocab).astype(jnp.float32)
    kth = _largest_threshold(keys, jnp.ones_like(scaled), keep_count)
    kept = jnp.where(keys >= kth[:, None], scaled, -jnp.inf)

    weights = jnp.exp(kept - kept.max(-1, keepdims=True))
    # If top_p underflows to 0, the most likely token, whose weight is 1, is still kept.
    mass = jnp.maximum(rows.top_p * weights.sum(-1), jnp.finfo(jnp.float32).tiny)
    nucleus = _largest_threshold(keys, weights, mass)
    in_nucleus = (keys >= nucleus[:, None]) | (rows.top_p >= 1)[:, None]
    likely = weights >= rows.min_p[:, None]
    return jnp.where(in_nucleus & likely, kept, -jnp.inf)


def _largest_threshold(keys: Array, weights: Array, target: Array) -> Array:
    """Per row the largest t with sum(weights where keys >= t) >= target: uint32 [rows].

    Radix search from the top bits down: every pass reads the row once and fixes RADIX_BITS bits.
    0 (keep everything) where rounding leaves the whole sum below target.
    """

    def fix_digit(index: Array, threshold: Array) -> Array:
        shift = (32 - RADIX_BITS * (index + 1)).astype(jnp.uint32)
        best = threshold
        for digit in range(1, 1 << RADIX_BITS):
            candidate = threshold | (jnp.uint32(digit) << shift)
            mass = jnp.sum(jnp.where(keys >= candidate[:, None], weights, 0.0), axis=-1)
            best = jnp.where(mass >= target, candidate, best)
        return best

    start = jnp.zeros(keys.shape[:1], jnp.uint32)
    return lax.fori_loop(0, 32 // RADIX_BITS, fix_digit, start)


def _ordered(x: Array) -> Array:
    """Maps float32 values to uint32 keys of the same order."""
    bits = lax.bitcast_convert_type(x, jnp.int32)
    flipped = bits ^ ((bits >> 31) & jnp.int32(0x7FFFFFFF))
    return lax.bitcast_convert_type(flipped, jnp.uint32) ^ jnp.uint32(0x80000000)


def _gumbel(rows: RowSampling, vocab: int) -> Array:
    """Gumbel noise [rows, vocab] from a threefry key (seed, position) per row."""
    words = jnp.stack([rows.seed, rows.position], axis=-1)
    keys = jax.random.wrap_key_data(
        lax.bitcast_convert_type(words, jnp.uint32), impl="threefry2x32"
    )
    bits = jax.vmap(lambda key: jax.random.bits(key, (vocab,), jnp.uint32))(keys)
    # 23 random bits plus half a step: never 0 or 1, for which the noise is infinite.
    uniform = ((bits >> 9).astype(jnp.float32) + 0.5) * 2.0**-23
    return -jnp.log(-jnp.log(uniform))
