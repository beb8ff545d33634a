"""Draft heads: their files, and what they compute against the papers' formulas in NumPy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.config import ConfigError
from jaxserve.model_spec import ModelSpec
from jaxserve.models import decoder
from jaxserve.models.drafts import block, eagle3, layouts
from jaxserve.models.drafts.block import BlockParams
from jaxserve.models.drafts.eagle3 import Eagle3Params
from jaxserve.models.drafts.loading import abstract, open_draft
from jaxserve.models.drafts.spec import BlockDraft, Eagle3Draft
from jaxserve.models.layer import Caches, StepTokens
from jaxserve_checkpoints.dummy import dummy_params
from jaxserve_checkpoints.naming import leaf_parts
from jaxserve_checkpoints.reader import CheckpointError
from jaxserve_checkpoints.rules import Rule
from jaxserve_kernels.kv_format import AttentionStep, CacheShape, Dense
from jaxserve_kernels.paged_attention import QueryTiles
from jaxserve_kernels.target import CPU
from tests import draft_files
from tests.draft_files import Tensors, block_states, block_tensors, eagle3_passes, eagle3_tensors
from tests.tiny_model import tiny_spec

TARGET = tiny_spec(num_layers=8)
TOLERANCE = 2e-5
"""Of states and scores of about 1 to 5 in float32; 3e-6 is the worst measured."""
PAGE, PAGES_PER_SEQ, SLOTS = 4, 6, 3
WRITE_CONTEXT, BLOCK_HIDDEN = (
    jax.jit(each, static_argnums=1, static_argnames="target")
    for each in (block.write_context, block.block_hidden)
)
"""One program for each shape takes less time than one for each operation."""
RNG = np.random.default_rng(5)
EMBEDDING = RNG.standard_normal((TARGET.vocab_size, TARGET.embed)).astype(np.float32)
TABLE = np.concatenate(
    [1 + RNG.permutation(SLOTS * PAGES_PER_SEQ).reshape(SLOTS, -1), np.zeros((1, PAGES_PER_SEQ))]
).astype(np.int32)
"""Pages of the slots in any order; the last row is of padding."""

OTHER_HEADS = {"num_key_value_heads": 1, "head_dim": 16}
"""Than those of the target."""
CONFIGS: dict[str, tuple[dict[str, Any], Callable[[dict[str, Any]], Tensors]]] = {
    "dflash": (draft_files.dflash(TARGET), block_tensors),
    "dspark": (draft_files.dspark(TARGET), block_tensors),
    "dspark, no confidence": (draft_files.dspark(TARGET, confidence=False), block_tensors),
    "dflash of DeepSpec": (draft_files.dspark(TARGET, rank=0, confidence=False), block_tensors),
    "dspark, confidence alone": (draft_files.dspark(TARGET, rank=0), block_tensors),
    "eagle3": (draft_files.eagle3(TARGET), eagle3_tensors),
    "eagle3, all tokens": (draft_files.eagle3(TARGET, vocab=TARGET.vocab_size), eagle3_tensors),
    "speculators": (draft_files.speculators(TARGET), eagle3_tensors),
    "dspark of other heads": (draft_files.dspark(TARGET) | OTHER_HEADS, block_tensors),
    "eagle3 of other heads": (draft_files.eagle3(TARGET) | OTHER_HEADS, eagle3_tensors),
}


class Head(NamedTuple):
    config: dict[str, Any]
    tensors: Tensors
    spec: Any
    params: Any


@pytest.fixture
def head(request: pytest.FixtureRequest, tmp_path: Path) -> Head:
    config, make = CONFIGS[request.param]
    tensors = make(config)
    opened = open_draft(draft_files.write(tmp_path, config, tensors), TARGET, jnp.float32)
    return Head(config, tensors, opened.spec, opened.load())


def heads(*names: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("head", names, indirect=True)


def empty_cache(body: ModelSpec) -> jax.Array:
    """Full of what makes every sum NaN that reads it, but for the padding page."""
    shape = CacheShape(
        layers=body.num_layers,
        pages=1 + SLOTS * PAGES_PER_SEQ,
        kv_heads=body.kv_heads,
        page_size=PAGE,
        head_dim=body.head_dim,
        slots=SLOTS + 1,
    )
    kv = Dense().allocate(shape, jnp.float32)
    return kv.at[:, 1:].set(jnp.nan)


def chunk(slot: int, start: int, ids: Sequence[int]) -> StepTokens:
    """Consecutive tokens of one sequence, one query tile."""
    positions = np.arange(start, start + len(ids))
    first, length, slots, position = (
        jnp.asarray([each], jnp.int32) for each in (0, len(ids), slot, start)
    )
    step = AttentionStep(
        slots=jnp.full(len(ids), slot),
        positions=jnp.asarray(positions),
        pages=jnp.asarray(TABLE[slot, positions // PAGE]),
        offsets=jnp.asarray(positions % PAGE),
        tiles=QueryTiles(first, length, slots, position),
        page_table=jnp.asarray(TABLE),
    )
    return StepTokens(jnp.asarray(ids, jnp.int32), (step,))


def taps_of(head: Head, tokens: int, seed: int = 1) -> np.ndarray:
    """Hidden states of a target: [tokens, taps, embed]."""
    rng = np.random.default_rng(seed)
    return rng.standard_normal((tokens, len(head.spec.taps), TARGET.embed)).astype(np.float32)


def flat(taps: np.ndarray) -> np.ndarray:
    return taps.reshape(taps.shape[0], -1).astype(np.float64)


def apart(taps: np.ndarray) -> list[Any]:
    return [jnp.asarray(taps[:, tap]) for tap in range(taps.shape[1])]


# What the files are.


def test_published_configs_are_read_as_their_authors_mean_them() -> None:
    flash, spark = (layouts.spec_of(CONFIGS[name][0], TARGET) for name in ("dflash", "dspark"))
    assert isinstance(flash, BlockDraft) and isinstance(spark, BlockDraft)
    assert (flash.num_drafts, flash.predicts_next, flash.taps) == (3, False, (0, 2))
    assert (spark.num_drafts, spark.predicts_next, spark.taps) == (4, True, (0, 2, 3))
    assert (spark.markov_rank, spark.confidence) == (6, "hidden and markov")
    deep = layouts.spec_of(CONFIGS["dflash of DeepSpec"][0], TARGET)
    assert isinstance(deep, BlockDraft) and deep.predicts_next and not deep.confidence
    eagle = layouts.spec_of(CONFIGS["eagle3"][0], TARGET)
    assert isinstance(eagle, Eagle3Draft) and eagle.reduced_vocab
    assert not eagle.norm_before_residual and not eagle.body.attention.qk_norm
    other = layouts.spec_of(CONFIGS["speculators"][0], TARGET)
    assert isinstance(other, Eagle3Draft) and other.norm_before_residual
    assert other.taps == (0, 2, 3)


@pytest.mark.parametrize(
    ("layers", "taps"), [(36, (1, 17, 32)), (32, (1, 15, 28)), (64, (1, 31, 60))]
)
def test_eagle3_reads_what_layers_2_the_middle_and_the_last_but_two_are_given(
    layers: int, taps: tuple[int, ...]
) -> None:
    target = tiny_spec(num_layers=layers)
    assert layouts.spec_of(draft_files.eagle3(target), target).taps == taps


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("stacked", [False, True])
def test_the_rules_fill_each_leaf_once(name: str, stacked: bool) -> None:
    spec = layouts.spec_of(CONFIGS[name][0], TARGET)
    shapes = abstract(spec, jnp.float32, stacked=stacked)
    leaves = {part.path for part in leaf_parts(shapes)} - {"token_ids"}
    rules = [each.leaf for each in layouts.rules(spec) if isinstance(each, Rule)]
    filled = {
        leaf.replace("{layer}", str(index))
        for leaf in rules
        for index in range(spec.body.num_layers)
    }
    assert filled == leaves and len(set(rules)) == len(rules)


@heads(*CONFIGS)
def test_every_tensor_is_used(head: Head, tmp_path: Path) -> None:
    """One more, one less and one of another shape are named together."""
    tensors = dict(head.tensors)
    del tensors["fc.weight"]
    tensors["strange.weight"] = np.zeros(3, np.float32)
    tensors["norm.weight"] = np.zeros(TARGET.embed + 1, np.float32)
    folder = draft_files.write(tmp_path / "wrong", head.config, tensors)
    with pytest.raises(CheckpointError) as error:
        open_draft(folder, TARGET, jnp.float32)
    for name in ("fc.weight", "strange.weight", "norm.weight", "3 problems"):
        assert name in str(error.value)


def test_all_that_is_wrong_with_a_config_is_said_at_once() -> None:
    wrong = {
        "hidden_size": 48,
        "target_layer_ids": [0, 7],
        "markov_head_type": "rnn",
        "attention_bias": True,
        "mask_token_id": None,
    }
    with pytest.raises(ConfigError) as error:
        layouts.spec_of(draft_files.dspark(TARGET) | wrong, TARGET)
    for part in (
        "hidden_size is 48, the target model's is 32",
        "after layers [7]",
        "markov_head_type is 'rnn'",
        "attention_bias is true",
        "mask_token_id is None",
    ):
        assert part in str(error.value)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"architectures": ["Qwen3ForCausalLM"]}, "is no draft head"),
        (draft_files.dflash(TARGET) | {"dflash_config": {}}, "target_layer_ids is None"),
        (draft_files.dflash(TARGET) | {"block_size": 1}, "block_size is 1"),
        (draft_files.eagle3(TARGET, vocab=98), "draft_vocab_size is 98, more than"),
        (draft_files.speculators(TARGET) | {"speculators_model_type": "mtp"}, "is 'mtp'"),
        (draft_files.speculators(TARGET, norm_before_fc=True), "norm_before_fc is True"),
        (draft_files.eagle3(tiny_spec(vocab_size=64, num_layers=8)), "vocab_size is 64"),
    ],
)
def test_what_is_no_head_of_this_model_is_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace("[", r"\[")):
        layouts.spec_of(config, TARGET)


def test_a_folder_without_a_config_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json is missing"):
        open_draft(tmp_path, TARGET, jnp.float32)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("t2d", np.zeros(TARGET.vocab_size, np.bool_), "contradict each other"),
        ("d2t", np.zeros(7, np.int64), r"d2t is \[7\], the head needs \[50\]"),
        ("t2d", None, "t2d is missing"),
    ],
)
def test_maps_of_the_vocabulary_are_checked(
    tmp_path: Path, name: str, value: np.ndarray | None, message: str
) -> None:
    config = draft_files.eagle3(TARGET)
    tensors = eagle3_tensors(config)
    tensors.pop(name)
    tensors |= {} if value is None else {name: value}
    with pytest.raises(CheckpointError, match=message):
        open_draft(draft_files.write(tmp_path, config, tensors), TARGET, jnp.float32)


# What they compute.


@heads("dflash", "dspark", "dflash of DeepSpec", "dspark of other heads")
def test_blocks_see_all_of_themselves_and_the_target_before_them(head: Head) -> None:
    """Rows of different lengths; contexts written in pieces, with rejected positions that are
    written again; blocks that are cut where their pages end."""
    spec, params = head.spec, head.params
    assert isinstance(params, BlockParams)
    cache = empty_cache(spec.body)
    lengths, counts, slots = (9, 1, 6), (spec.block, spec.block, 2), (2, 0, 1)
    taps = {slot: taps_of(head, n, seed=slot) for slot, n in zip(slots, lengths, strict=True)}
    for slot, length in zip(slots, lengths, strict=True):
        wrong = taps_of(head, length + 2, seed=99)[: PAGES_PER_SEQ * PAGE]
        for begin, some in ((0, wrong), (0, taps[slot][:5]), (5, taps[slot][5:])):
            if len(some):
                tokens = chunk(slot, begin, [0] * len(some))
                own = (params, spec, cache, apart(some), tokens)
                cache = WRITE_CONTEXT(*own, target=CPU)
    last = np.array([3, 90, 17], np.int32)
    tokens = block.block_tokens(
        spec, jnp.asarray(last), jnp.asarray(slots), jnp.asarray(lengths), jnp.asarray(counts),
        jnp.asarray(TABLE), page_size=PAGE,
    )  # fmt: skip
    own = (params, spec, jnp.asarray(EMBEDDING), cache, tokens)
    hidden, _ = BLOCK_HIDDEN(*own, target=CPU)
    got = np.asarray(hidden).reshape(3, spec.block, -1)
    for row, slot in enumerate(slots):
        ids = [last[row], *[spec.mask_token] * (counts[row] - 1)]
        expected = block_states(head.config, head.tensors, EMBEDDING, flat(taps[slot]), ids)
        np.testing.assert_allclose(got[row, : counts[row]], expected, atol=TOLERANCE)


@heads("dspark", "dflash of DeepSpec")
def test_each_draft_adds_the_markov_scores_of_the_one_before(head: Head) -> None:
    params, vocab = head.params, TARGET.vocab_size
    scores = np.random.default_rng(3).standard_normal((2, 4, vocab)).astype(np.float32)
    last = np.array([7, 40], np.int32)
    seen: list[np.ndarray] = []

    def draw(each: Any, number: int) -> Any:
        assert number == len(seen)
        seen.append(np.asarray(each))
        return jnp.argmax(each, axis=-1).astype(jnp.int32)

    drafts = np.asarray(block.propose(params, jnp.asarray(scores), jnp.asarray(last), draw))
    for number in range(4):
        expected = scores[:, number].astype(np.float64)
        if head.spec.markov_rank:
            w1, w2 = (head.tensors[f"markov_head.markov_w{n}.weight"] for n in (1, 2))
            expected = expected + w1[last].astype(np.float64) @ w2.T
        np.testing.assert_allclose(seen[number], expected, atol=TOLERANCE)
        last = expected.argmax(-1)
        np.testing.assert_array_equal(drafts[:, number], last)


@heads("dspark", "dspark, confidence alone")
def test_the_confidence_is_a_logistic_function_of_state_and_token_before(head: Head) -> None:
    hidden = np.random.default_rng(2).standard_normal((5, TARGET.embed)).astype(np.float32)
    previous = np.array([1, 5, 96, 0, 33], np.int32)
    got = block.acceptance(head.params, jnp.asarray(hidden), jnp.asarray(previous))
    features = hidden.astype(np.float64)
    if head.spec.markov_rank:
        w1 = head.tensors["markov_head.markov_w1.weight"]
        features = np.concatenate([features, w1[previous]], -1)
    weight, bias = (head.tensors[f"confidence_head.proj.{each}"] for each in ("weight", "bias"))
    expected = 1 / (1 + np.exp(-(features @ weight[0] + bias[0])))
    np.testing.assert_allclose(np.asarray(got), expected, atol=TOLERANCE)


@heads("eagle3", "eagle3, all tokens", "speculators", "eagle3 of other heads")
def test_eagle3_passes_go_on_with_their_own_states(head: Head) -> None:
    """The target's entries in two chunks, then one draft after the other."""
    spec, params = head.spec, head.params
    assert isinstance(params, Eagle3Params)
    length, slot, drafts = 7, 1, (12, 96, 3)
    taps = taps_of(head, length)
    ids = [5, 80, 33, 2, 2, 61, 9]
    expected = eagle3_passes(head.config, head.tensors, EMBEDDING, flat(taps), ids, drafts)
    cache, got = empty_cache(spec.body), list[np.ndarray]()
    all_states = eagle3.states(params, apart(taps), target=CPU)
    state, hidden = all_states[:0], all_states[:0]
    steps: list[tuple[int, Sequence[int], Any]] = [
        (0, ids[:4], all_states[:4]),
        (4, ids[4:], all_states[4:]),
    ]
    for number in range(2 + len(drafts)):
        begin, tokens, given = (
            steps[number] if number < 2 else (length + number - 2, [drafts[number - 2]], state[-1:])
        )
        hidden, state, cache = eagle3.extend(
            params, spec, jnp.asarray(EMBEDDING), cache, chunk(slot, begin, tokens), given,
            tile_size=max(len(tokens), 2), target=CPU,
        )  # fmt: skip
        if number > 0:
            got.append(np.asarray(eagle3.scores(params, spec, hidden[-1:], target=CPU))[0])
    listed = np.arange(spec.body.vocab_size) + (head.tensors["d2t"] if spec.reduced_vocab else 0)
    for one, other in zip(got, expected, strict=True):
        np.testing.assert_allclose(one[listed], other, atol=TOLERANCE)
        rest = np.delete(one, listed)
        assert rest.size == TARGET.vocab_size - len(listed) and np.isneginf(rest).all()


# What the target gives them.


@pytest.mark.parametrize("taps", [(1, 3, 4)])
def test_taps_are_the_states_between_layers_and_change_nothing_else(taps: tuple[int, ...]) -> None:
    """A model that ends after the tapped layer, with the same weights, has that state before its
    norm."""
    params = dummy_params(decoder.abstract(TARGET, jnp.float32), 3)
    tokens, kv = chunk(0, 0, [5, 9, 2, 77, 31]), (empty_cache(TARGET),)
    plain, kv_plain = decoder.forward(params, kv, tokens, TARGET, tile_size=5, target=CPU)
    found, kv_tapped, tapped = decoder.tapped_forward(
        params, kv, tokens, TARGET, tile_size=5, target=CPU, taps=taps
    )
    for one, other in zip((*plain, *kv_plain), (*found, *kv_tapped), strict=True):
        np.testing.assert_array_equal(one, other)
    for tap, state in zip(taps, tapped, strict=True):
        np.testing.assert_allclose(state, _after(params, kv, tokens, tap), atol=1e-4)


def _after(params: Any, kv: Caches, tokens: StepTokens, tap: int) -> Any:
    """The state that the layer behind `tap` is given: what a model of the first layers and that one
    adds to."""
    layers = params.layers[: tap + 2]
    spec: ModelSpec = tiny_spec(num_layers=tap + 2)
    cut = params._replace(layers=layers)
    pre_mlp, _ = decoder.forward(cut, kv, tokens, spec, tile_size=5, target=CPU)
    return pre_mlp.x
