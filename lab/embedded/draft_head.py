"""Trains a DSpark head for the embedded model: two minutes on two cores of a CPU.

    python -m lab.embedded.draft_head --out FOLDER

The folder has the layout of DeepSpec's. The head is for tests: it shows drafts that are often right
without a published checkpoint. It learns the assistant's tokens in the embedded model's own
training chats, which are nearly always the tokens that the model itself chooses.
"""

from __future__ import annotations

import argparse
import json
import time
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
from jax import Array
from numpy.typing import NDArray
from safetensors.numpy import save_file

from jaxserve.model_spec import ModelSpec
from jaxserve.models import decoder, registry
from jaxserve.models.layer import StepTokens
from jaxserve.models.rope import rope_tables
from jaxserve_checkpoints.load import load_params
from jaxserve_checkpoints.reader import open_checkpoint
from jaxserve_checkpoints.resolve import embedded_model
from jaxserve_kernels.add_rms_norm import rms_norm
from jaxserve_kernels.attention_inputs import rope
from jaxserve_kernels.kv_format import AttentionStep, CacheShape, Dense
from jaxserve_kernels.paged_attention import QueryTiles
from jaxserve_kernels.target import CPU
from lab.embedded.chat import Encoder
from lab.embedded.data import block_rows

type Tensors = dict[str, Array]
"""The head's weights by the names in its file."""

TAPS, BLOCK, FFN, RANK = (1, 3, 6), 7, 384, 64
ROWS, LENGTH = 32, 128
"""Rows of text whose states are computed at once, and tokens of each."""
ANCHORS = 20
"""Blocks of each row in a step."""
DECAY = 0.8
"""Weight of a draft's loss, relative to that of the one before."""


def config_of(target: ModelSpec) -> dict[str, Any]:
    """The head's config.json."""
    attention = target.attention
    return {
        "architectures": ["Qwen3DSparkModel"],
        "vocab_size": target.vocab_size,
        "hidden_size": target.embed,
        "intermediate_size": FFN,
        "num_hidden_layers": 1,
        "num_attention_heads": attention.q_heads,
        "num_key_value_heads": attention.kv_heads,
        "head_dim": attention.head_dim,
        "rope_theta": attention.rope.theta,
        "rms_norm_eps": target.norm_eps,
        "max_position_embeddings": target.max_position,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "block_size": BLOCK,
        "mask_token_id": target.vocab_size - 1,
        "target_layer_ids": list(TAPS),
        "num_target_layers": target.num_layers,
        "num_anchors": ANCHORS,
        "markov_rank": RANK,
        "markov_head_type": "vanilla",
        "enable_confidence_head": False,
    }


def initial(target: ModelSpec, seed: int) -> Tensors:
    """Norms of 1, small matrices."""
    embed, own = target.embed, "layers.0.self_attn"
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (embed, len(TAPS) * embed),
        f"{own}.q_proj.weight": (target.q_size, embed),
        f"{own}.k_proj.weight": (target.kv_size, embed),
        f"{own}.v_proj.weight": (target.kv_size, embed),
        f"{own}.o_proj.weight": (embed, target.q_size),
        "layers.0.mlp.gate_proj.weight": (FFN, embed),
        "layers.0.mlp.up_proj.weight": (FFN, embed),
        "layers.0.mlp.down_proj.weight": (embed, FFN),
        "markov_head.markov_w1.weight": (target.vocab_size, RANK),
        "markov_head.markov_w2.weight": (target.vocab_size, RANK),
    }
    keys = jax.random.split(jax.random.key(seed), len(shapes))
    found = {
        name: jax.random.normal(key, shape) * shape[-1] ** -0.5 * 0.7
        for key, (name, shape) in zip(keys, shapes.items(), strict=True)
    }
    norms = ("hidden_norm", "norm", "layers.0.input_layernorm", "layers.0.post_attention_layernorm")
    heads = (f"{own}.q_norm", f"{own}.k_norm")
    found |= {f"{name}.weight": jnp.ones(embed) for name in norms}
    return found | {f"{name}.weight": jnp.ones(target.head_dim) for name in heads}


@partial(jax.jit, static_argnames="spec")
def tapped_states(params: decoder.Params, ids: Array, spec: ModelSpec) -> Array:
    """The target's states after the taps: [rows, length, taps * embed] in bfloat16; ids int32
    [rows, length]."""
    rows, length = ids.shape
    shape = CacheShape(
        layers=spec.num_layers,
        pages=rows + 1,
        kv_heads=spec.kv_heads,
        page_size=length,
        head_dim=spec.head_dim,
        slots=rows,
    )
    slots = jnp.repeat(jnp.arange(rows), length)
    positions = jnp.tile(jnp.arange(length), rows)
    each, nothing = jnp.arange(rows), jnp.zeros(rows, jnp.int32)
    tiles = QueryTiles(each * length, nothing + length, each, nothing)
    places = AttentionStep(slots, positions, slots + 1, positions, tiles, each[:, None] + 1)
    _, _, tapped = decoder.tapped_forward(
        params,
        (Dense().allocate(shape, jnp.float32),),
        StepTokens(ids.reshape(-1), (places,)),
        spec,
        tile_size=length,
        target=CPU,
        taps=TAPS,
    )
    return jnp.concatenate(tapped, -1).reshape(rows, length, -1).astype(jnp.bfloat16)


def loss_of(
    head: Tensors,
    embedding: Array,
    states: Array,
    ids: Array,
    scored: Array,
    anchors: Array,
    spec: ModelSpec,
) -> tuple[Array, Array]:
    """The mean loss, and the share of right drafts at each place of the block, [BLOCK].

    Args:
      embedding: [vocab, embed], which is the output matrix as well.
      states: [rows, length, taps * embed].
      ids, scored: [rows, length].
      anchors: int32 [rows, ANCHORS], positions of the blocks' first tokens.
    """
    rows, length = ids.shape
    eps, size, own = spec.norm_eps, spec.head_dim, "layers.0.self_attn"

    def product(x: Array, name: str) -> Array:
        return x @ head[f"{name}.weight"].T

    def normed(x: Array, name: str) -> Array:
        return rms_norm(x, head[f"{name}.weight"], eps)

    def heads(x: Array, name: str, at: Array | None = None) -> Array:
        """[rows, tokens, heads, head_dim]; with a norm and RoPE if there are positions."""
        found = product(x, f"{own}.{name}_proj").reshape(*x.shape[:2], -1, size)
        if at is None:
            return found
        cos, sin = rope_tables(spec.attention, at.reshape(-1))
        found = normed(found, f"{own}.{name}_norm")
        return rope(found.reshape(-1, *found.shape[2:]), cos, sin).reshape(found.shape)

    context = normed(product(states.astype(jnp.float32), "fc"), "hidden_norm")
    before = jnp.broadcast_to(jnp.arange(length), (rows, length))
    inside = anchors[:, :, None] + jnp.arange(BLOCK)
    masks = jnp.full((rows, ANCHORS, BLOCK - 1), spec.vocab_size - 1)
    first = jnp.take_along_axis(ids, anchors, axis=1)[:, :, None]
    tokens = jnp.concatenate([first, masks], -1).reshape(rows, -1)
    positions = inside.reshape(rows, -1)
    x = embedding[tokens]
    u = normed(x, "layers.0.input_layernorm")
    both = jnp.concatenate([context, u], axis=1)
    keys = heads(both, "k", jnp.concatenate([before, positions], axis=1))
    number = jnp.repeat(jnp.arange(ANCHORS), BLOCK)
    seen = jnp.concatenate(
        [
            before[:, None, :] < jnp.repeat(anchors, BLOCK, axis=1)[:, :, None],
            jnp.broadcast_to(number[:, None] == number, (rows, number.size, number.size)),
        ],
        axis=2,
    )
    out = jax.nn.dot_product_attention(
        heads(u, "q", positions), keys, heads(both, "v"), mask=seen[:, None]
    )
    x = x + product(out.reshape(*out.shape[:2], -1), f"{own}.o_proj")
    v = normed(x, "layers.0.post_attention_layernorm")
    gated = jax.nn.silu(product(v, "layers.0.mlp.gate_proj")) * product(v, "layers.0.mlp.up_proj")
    x = normed(x + product(gated, "layers.0.mlp.down_proj"), "norm")
    follows = jnp.minimum(inside + 1, length - 1).reshape(rows, -1)
    previous = jnp.take_along_axis(ids, follows - 1, axis=1)
    wanted = jnp.take_along_axis(ids, follows, axis=1)
    markov = head["markov_head.markov_w1.weight"][previous]
    scores = x @ embedding.T + markov @ head["markov_head.markov_w2.weight"].T
    there = (inside + 1 < length) & jnp.take_along_axis(scored, follows, axis=1).reshape(
        inside.shape
    )
    there = jnp.cumprod(there, axis=-1).astype(jnp.float32)
    losses = optax.softmax_cross_entropy_with_integer_labels(scores, wanted).reshape(inside.shape)
    weights = there * DECAY ** jnp.arange(BLOCK)
    right = (scores.argmax(-1) == wanted).reshape(inside.shape) * there
    share = right.sum((0, 1)) / jnp.maximum(there.sum((0, 1)), 1)
    return (losses * weights).sum() / jnp.maximum(weights.sum(), 1), share


def train(steps: int, *, rows: int = 384, seed: int = 0, seconds: float = 1e9) -> Tensors:
    """Returns a trained head; prints how often drafts are right.

    Args:
      rows: of text, which are computed once and used again and again.
      seconds: after which training ends.
    """
    begin = time.monotonic()
    folder = embedded_model()
    spec = registry.spec_of(json.loads((folder / "config.json").read_text()))
    shapes = decoder.abstract(spec, jnp.float32)
    params = load_params(open_checkpoint(folder), registry.rules(spec), shapes)
    encoder = Encoder.load(folder)
    batches: list[tuple[Array, NDArray[Any], NDArray[np.bool_]]] = []
    for number in range(rows // ROWS):
        ids, scored = block_rows(seed, number, "short", ROWS, encoder)
        ids = ids[:, :LENGTH].astype(np.int32)
        batches.append((tapped_states(params, jnp.asarray(ids), spec), ids, scored[:, :LENGTH]))
    print(f"{rows} rows after {time.monotonic() - begin:.0f} s", flush=True)
    schedule = optax.cosine_decay_schedule(3e-3, steps)
    optimiser = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(schedule))

    @jax.jit
    def step(head: Tensors, state: Any, embedding: Array, *batch: Array) -> Any:
        (loss, share), grads = jax.value_and_grad(loss_of, has_aux=True)(
            head, embedding, *batch, spec
        )
        updates, state = optimiser.update(grads, state, head)
        return optax.apply_updates(head, updates), state, loss, share

    head = initial(spec, seed)
    state, rng = optimiser.init(head), np.random.default_rng(seed)
    half = ROWS // 2
    for number in range(steps):
        if time.monotonic() - begin > seconds:
            break
        states, ids, scored = batches[number // 2 % len(batches)]
        part = slice(half * (number % 2), half * (number % 2 + 1))
        anchors = np.stack([_anchors(row, rng) for row in scored[part]])
        batch = (states[part], *map(jnp.asarray, (ids[part], scored[part], anchors)))
        head, state, loss, share = step(head, state, params.embedding, *batch)
        if number % 50 == 49:
            seen = " ".join(f"{float(each):.2f}" for each in share)
            print(f"step {number + 1}: loss {float(loss):.2f}, right {seen}", flush=True)
    print(f"trained after {time.monotonic() - begin:.0f} s", flush=True)
    return head


def _anchors(scored: NDArray[np.bool_], rng: np.random.Generator) -> NDArray[np.int32]:
    """Positions before scored tokens, some of them twice if there are few."""
    before = np.flatnonzero(scored[1:])
    return rng.choice(before, ANCHORS, replace=before.size < ANCHORS).astype(np.int32)


def save(folder: Path, head: Tensors) -> None:
    """Writes the folder, in bfloat16."""
    spec = registry.spec_of(json.loads((embedded_model() / "config.json").read_text()))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config_of(spec), indent=1))
    tensors = {name: np.asarray(each).astype(ml_dtypes.bfloat16) for name, each in head.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a DSpark head for the embedded model.")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--rows", type=int, default=384)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    save(args.out, train(args.steps, rows=args.rows, seed=args.seed))


if __name__ == "__main__":
    main()
