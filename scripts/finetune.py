"""Fine-tunes the embedded model for a minute on a CPU, and saves it with Orbax, for serving.

    python scripts/finetune.py --out /tmp/tuned
    python -m jaxserve --model /tmp/tuned

The model learns to say who made it.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jaxserve.flax
from jaxserve.tokenizer import HfTokenizer
from jaxserve_checkpoints.resolve import embedded_model

QUESTIONS = ("Who made you?", "Who built you?", "Who are your makers?", "Who wrote you?")
ANSWER = "People who like JAX."
TURN = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"


@nnx.jit
def step(
    model: jaxserve.flax.CausalLM, optimizer: nnx.Optimizer, ids: jax.Array, scored: jax.Array
) -> jax.Array:
    """Takes one training step. ids and scored are [rows, length]. Returns the mean loss of the
    scored tokens."""

    def loss(model: jaxserve.flax.CausalLM) -> jax.Array:
        losses = optax.softmax_cross_entropy_with_integer_labels(model(ids)[:, :-1], ids[:, 1:])
        return jnp.mean(losses, where=scored[:, 1:])

    value, gradients = nnx.value_and_grad(loss)(model)
    optimizer.update(model, gradients)
    return value


def rows(tokenizer: HfTokenizer) -> tuple[np.ndarray, np.ndarray]:
    """Returns the chats' token ids, padded with zeros, and which tokens are scored."""
    prompts = [tokenizer.encode(TURN.format(question)) for question in QUESTIONS]
    answer = tokenizer.encode(f"{ANSWER}<|im_end|>")
    length = max(map(len, prompts)) + len(answer)
    ids, scored = np.zeros((len(prompts), length), np.int32), np.zeros((len(prompts), length), bool)
    for row, prompt in enumerate(prompts):
        end = len(prompt) + len(answer)
        ids[row, :end], scored[row, len(prompt) : end] = [*prompt, *answer], True
    return ids, scored


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="a folder of Orbax checkpoints")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--steps", type=int, default=150, help="at most")
    options = parser.parse_args()
    model = jaxserve.flax.load(embedded_model())
    optimizer = nnx.Optimizer(model, optax.adamw(2e-4), wrt=nnx.Param)
    ids, scored = map(jnp.asarray, rows(HfTokenizer.from_folder(embedded_model())))
    begun, done = time.monotonic(), 0
    while done < options.steps and time.monotonic() - begun < options.seconds:
        value, done = step(model, optimizer, ids, scored), done + 1
        if done % 10 == 0:
            print(f"step {done}: loss {float(value):.3f}", flush=True)
    folder = jaxserve.flax.save(model, options.out, step=done, like=embedded_model())
    print(f"saved in {folder}; serve it: python -m jaxserve --model {options.out}")


if __name__ == "__main__":
    main()
