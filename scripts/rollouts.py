"""Samples, scores and updates in a loop in one process: a model learns to avoid the letter e.

python scripts/rollouts.py 20
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jaxserve.flax
from jaxserve.library import Engine, SamplingParams
from jaxserve_checkpoints.resolve import embedded_model

PROMPT = "The weather report of the harbour"
SAMPLES, LENGTH = 8, 64


@nnx.jit
def learn(
    model: jaxserve.flax.CausalLM, optimizer: nnx.Optimizer, ids: jax.Array, weights: jax.Array
) -> None:
    """One step of REINFORCE: tokens [samples, length] with a positive weight become likelier."""

    def loss(model: jaxserve.flax.CausalLM) -> jax.Array:
        logprobs = jax.nn.log_softmax(model(ids))[:, :-1]
        chosen = jnp.take_along_axis(logprobs, ids[:, 1:, None], axis=-1)[..., 0]
        return -(chosen * weights[:, 1:]).mean()

    optimizer.update(model, nnx.grad(loss)(model))


model = jaxserve.flax.load(embedded_model())
optimizer = nnx.Optimizer(model, optax.adam(1e-4), wrt=nnx.Param)
params = [SamplingParams(max_tokens=24, temperature=2.0, seed=seed) for seed in range(SAMPLES)]
with Engine(max_model_len=128, kv_cache_memory_bytes="8Mi") as engine:
    for _ in range(int(sys.argv[1])):
        outputs = engine.generate([PROMPT] * SAMPLES, params)
        rewards = np.array([-output.text.count("e") for output in outputs], np.float32)
        ids = np.zeros((SAMPLES, LENGTH), np.int32)
        weights = np.zeros((SAMPLES, LENGTH), np.float32)
        for row, (output, reward) in enumerate(zip(outputs, rewards, strict=True)):
            begin, end = len(output.prompt), len(output.prompt) + len(output.tokens)
            ids[row, :end] = (*output.prompt, *output.tokens)
            weights[row, begin:end] = reward - rewards.mean()
        best = outputs[rewards.argmax()]
        both, length = [*best.prompt, *best.tokens], len(best.tokens)
        before = sum(engine.score([both])[0][-length:])
        learn(model, optimizer, jnp.asarray(ids), jnp.asarray(weights))
        version = engine.update_weights(jaxserve.flax.parameters(model)).version
        after = sum(engine.score([both])[0][-length:])
        print(f"weights {version}: reward {rewards.mean()}, best {before:.1f} to {after:.1f}")
