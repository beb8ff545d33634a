"""The engine as a library: samples, scores and weights from arrays of the same process."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import jaxserve
import jaxserve.flax
from jaxserve.api import SamplingParams, WeightChange, WeightsRefused
from jaxserve.library import Engine, Output
from jaxserve_checkpoints.resolve import embedded_model
from tests.models.test_golden import GOLDEN, load_golden
from tests.tiny_model import COMPILES
from tests.weights.test_formats import larger_model
from tests.weights.test_formats import run as run_convert

GREEDY = SamplingParams(max_tokens=16, temperature=0.0, logprobs=1)
PROMPTS = [prompt.tolist() for prompt, _ in load_golden("qwen2").continuations]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    flags = {
        "tokenizer": embedded_model(),
        "max_model_len": 128,
        "kv_cache_memory_bytes": "4Mi",
        "dtype": "float32",
        "decode_buckets": 4,
        "prefill_buckets": 128,
        "cache_dir": tmp_path_factory.mktemp("cache"),
    }
    with Engine(str(GOLDEN / "qwen2"), **flags) as engine:
        yield engine


def tokens_of(outputs: list[Output]) -> list[list[int]]:
    return [list(output.tokens) for output in outputs]


def test_it_generates_and_scores_as_transformers(engine: Engine) -> None:
    golden = load_golden("qwen2")
    outputs = engine.generate(PROMPTS, GREEDY)
    for output, (_, expected) in zip(outputs, golden.continuations, strict=True):
        known = expected[: len(output.tokens)].tolist()
        assert list(output.tokens) == known and output.weights == (engine.weights.version,)
    tokens, logits = golden.sequences[-1]
    expected = jax.nn.log_softmax(logits)[np.arange(len(tokens) - 1), tokens[1:]]
    np.testing.assert_allclose(engine.score([tokens.tolist()])[0], expected, atol=1e-3)


def test_weights_come_from_arrays_of_the_process(engine: Engine) -> None:
    first, version = engine.generate(PROMPTS, GREEDY), engine.weights.version
    model = jaxserve.flax.load(GOLDEN / "qwen2")
    tree = jaxserve.flax.parameters(model)
    other = jax.tree.map(lambda array: array * 1.3 if array.ndim == 2 else array, tree)
    assert engine.update_weights(other).version == version + 1
    second = engine.generate(PROMPTS, GREEDY)
    assert tokens_of(second) != tokens_of(first)
    assert {output.weights for output in second} == {(version + 1,)}
    ids = jax.numpy.asarray([[*second[2].prompt, *second[2].tokens]])
    jaxserve.flax.files.nnx.update(model, other)
    scores = jax.nn.log_softmax(model(ids))[0, np.arange(ids.shape[1] - 1), ids[0, 1:]]
    np.testing.assert_allclose(engine.score([ids[0].tolist()])[0], scores, atol=1e-3)
    engine.update_weights(tree)
    assert tokens_of(engine.generate(PROMPTS, GREEDY)) == tokens_of(first)


def test_trees_that_do_not_fit_are_refused(engine: Engine) -> None:
    version = engine.weights.version
    tree = jaxserve.flax.parameters(jaxserve.flax.load(GOLDEN / "qwen2"))
    norm = tree.pop("norm")
    with pytest.raises(WeightsRefused, match=r"does not fit: 'model\.norm\.weight'"):
        engine.update_weights(tree)
    with pytest.raises(WeightsRefused, match="final_norm is"):
        engine.update_weights(tree | {"norm": {"scale": norm["scale"][:3]}})
    assert engine.weights.version == version


async def test_events_come_one_by_one(engine: Engine) -> None:
    events = [event async for event in engine.stream(PROMPTS[0], GREEDY)]
    assert [event.token for event in events] == list(engine.generate(PROMPTS[:1], GREEDY)[0].tokens)


def test_it_sleeps_and_wakes(engine: Engine) -> None:
    first = engine.generate(PROMPTS, GREEDY)
    engine.sleep()
    assert engine.weights.sleeping
    engine.wake()
    assert tokens_of(engine.generate(PROMPTS, GREEDY)) == tokens_of(first)


QUANTISED: dict[str, dict[str, Any]] = {
    "at load": {"quantization": "int4", "keep_converted": False},
    "at load and kept": {"quantization": "int4"},
    "compressed-tensors": {},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", QUANTISED)
def test_weights_that_were_quantised_at_the_start_come_back_after_sleep(
    name: str, tmp_path: Path
) -> None:
    model, flags = larger_model(tmp_path / "model"), QUANTISED[name]
    if not flags:
        out = tmp_path / "public"
        run_convert(model, out, "--to", "safetensors", "--quantization", "int4")
        model = out
    flags |= {"tokenizer": embedded_model(), "cache_dir": tmp_path / "cache"}
    flags |= {"max_model_len": 64, "kv_cache_memory_bytes": "4Mi"}
    flags |= {"decode_buckets": 4, "prefill_buckets": 128}
    with Engine(str(model), **flags) as engine:
        first = engine.generate([[5, 7, 11]], GREEDY)
        compiled = COMPILES.count
        engine.sleep(drop_weights=True)
        engine.wake()
        assert tokens_of(engine.generate([[5, 7, 11]], GREEDY)) == tokens_of(first)
        assert COMPILES.count == compiled


@pytest.mark.slow
def test_quantised_weights_change_to_others_that_were_converted(tmp_path: Path) -> None:
    """From the engine's own and from Orbax; damaged ones, and other layouts, are refused."""
    flags: dict[str, Any] = {"tokenizer": embedded_model(), "cache_dir": tmp_path / "cache"}
    flags |= {"max_model_len": 64, "kv_cache_memory_bytes": "4Mi"}
    flags |= {"decode_buckets": 4, "prefill_buckets": 128}
    prompt, quantised = [[5, 7, 11]], ("--quantization", "int4")
    for name in ("one", "other"):
        model = larger_model(tmp_path / name)
        if name == "other":
            tensors = {name: -each for name, each in load_file(model / "model.safetensors").items()}
            save_file(tensors, model / "model.safetensors")
        for to in ("native", "orbax", "safetensors"):
            run_convert(model, tmp_path / f"{name}-{to}", "--to", to, *quantised)
    with Engine(str(tmp_path / "other-native"), **flags) as engine:
        expected = tokens_of(engine.generate(prompt, GREEDY))
    with Engine(str(tmp_path / "one-native"), **flags) as engine:
        first, compiled = tokens_of(engine.generate(prompt, GREEDY)), COMPILES.count
        assert first != expected
        for folder, wanted in (("other-native", expected), ("one-orbax", first)):
            for in_place in (False, True):
                engine.load_weights(WeightChange(str(tmp_path / folder), in_place=in_place))
                assert tokens_of(engine.generate(prompt, GREEDY)) == wanted
        damaged = tmp_path / "other-native" / "jaxserve.safetensors"
        content = bytearray(damaged.read_bytes())
        content[-5] ^= 1
        damaged.write_bytes(content)
        for folder, message in (
            ("other-native", "damaged: the checksums of 1 of"),
            ("other-safetensors", "convert it first, with jaxserve convert"),
            ("other", "another structure"),
        ):
            with pytest.raises(WeightsRefused, match=message):
                engine.load_weights(WeightChange(str(tmp_path / folder)))
            assert tokens_of(engine.generate(prompt, GREEDY)) == first
        assert COMPILES.count == compiled


def test_its_name_is_in_the_package() -> None:
    assert jaxserve.Engine is Engine
    with pytest.raises(AttributeError, match="no attribute 'Motor'"):
        _ = jaxserve.Motor


@pytest.mark.slow
def test_the_example_runs() -> None:
    script = Path(__file__).parents[1] / "scripts" / "rollouts.py"
    command = [sys.executable, str(script), "3"]
    result = subprocess.run(
        command, check=True, capture_output=True, text=True, env={"PYTHONPATH": ":".join(sys.path)}
    )
    lines = result.stdout.splitlines()
    assert [line.split(":")[0] for line in lines] == ["weights 1", "weights 2", "weights 3"]
    before, after = lines[0].split("best ")[1].split(" to ")
    assert float(after) > float(before), "what was rewarded is likelier"
    assert len(script.read_text().splitlines()) < 60
