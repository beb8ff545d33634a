"""The loop that trains the embedded model: the stored weights fit its data, and steps lower the
loss of new ones."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lab.embedded import chat, train
from lab.embedded.data import block_rows
from lab.embedded.model import (
    ModelConfig,
    Parameters,
    Qwen3,
    init_parameters,
    load_model,
    save_model,
)

FOLDER = Path(__file__).parents[1] / "checkpoints/jaxserve_checkpoints/embedded"
SMALL = ModelConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=2, head_dim=16)
LENGTH = 128


class SameRows(train.DataPool):
    """The same few rows at every step, without processes."""

    def __init__(self, blocks: dict[str, train.Block]) -> None:
        self._blocks = blocks

    def steps(self, clock: train.Clock) -> Iterator[dict[str, train.Block]]:
        step = 0
        while clock.progress(step) < 1.0:
            yield self._blocks
            step += 1


@pytest.fixture(autouse=True)
def promotion() -> Iterator[None]:
    """What optax needs, in every thread; the engine's tests are stricter."""
    strict = jax.config.jax_numpy_dtype_promotion
    jax.config.update("jax_numpy_dtype_promotion", "standard")
    yield
    jax.config.update("jax_numpy_dtype_promotion", strict)


@pytest.fixture(scope="module")
def rows() -> train.Block:
    ids, scored = block_rows(0, 0, "short", 4, chat.Encoder.load(FOLDER))
    return ids[:, :LENGTH], scored[:, :LENGTH]


def loss_of(model: Qwen3, params: Parameters, rows: train.Block) -> float:
    """Mean negative log likelihood of the scored tokens."""
    ids, scored = map(jnp.asarray, rows)
    total, count, _ = np.asarray(train._loss(params, model, ids, scored)[1])
    return float(total / count)


@pytest.mark.slow
def test_the_stored_weights_fit_the_data(rows: train.Block) -> None:
    model = Qwen3(config=ModelConfig.load(FOLDER), dtype=jnp.float32)
    stored = jax.tree.map(jnp.asarray, load_model(FOLDER))
    assert loss_of(model, stored, rows) < 1.0
    assert loss_of(model, init_parameters(model.config, 0), rows) > 5.0


@pytest.mark.slow
def test_steps_lower_the_loss(
    rows: train.Block, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(train, "BLOCK_LENGTHS", {"short": LENGTH, "medium": LENGTH})
    config = train.TrainConfig(steps=8, warmup_steps=1, short_rows=4, medium_rows=4)
    model = Qwen3(config=SMALL, dtype=jnp.float32)
    params = init_parameters(SMALL, 0)
    before = loss_of(model, params, rows)
    data = SameRows({"short": rows, "medium": rows})
    trained, report = train.train(config, model, params, data, train.Clock(config))
    assert report["steps"] == 8 and report["row_tokens"] == 8 * 2 * 4 * LENGTH
    after = loss_of(model, trained, rows)
    assert after < before - 1.0
    save_model(tmp_path, trained)
    assert loss_of(model, jax.tree.map(jnp.asarray, load_model(tmp_path)), rows) == pytest.approx(
        after, abs=0.05
    ), "bfloat16"
