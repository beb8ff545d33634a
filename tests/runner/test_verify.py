"""A verify row yields what plain decoding yields, however many of its drafts are right."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import jax
import numpy as np
import pytest

from jaxserve.api import SamplingParams
from jaxserve.plan import Row, Sampled
from jaxserve.runner.runner import Runner
from tests.runner.driver import (
    CONFIG,
    GREEDY,
    OTHER,
    PROMPT,
    SAMPLED,
    SAMPLED_VOCAB,
    Placed,
    assert_same,
    certain,
    generate,
    plan,
    several,
    step,
    tokens_of,
)
from tests.tiny_model import COMPILES

START = len(PROMPT)
"""Position of the first token after the prompt, where the first row begins."""
COUNT = 12
"""Tokens that a test generates at least."""
MOST = CONFIG.scheduler.max_model_len - START
"""Tokens for which a sequence has pages."""
PENALISED = SamplingParams(
    max_tokens=100, temperature=0.0, repetition_penalty=1.4, frequency_penalty=0.8
)
ALL = {
    "greedy": GREEDY,
    "seeded": SAMPLED,
    "penalised": PENALISED,
    "repeats itself": SamplingParams(max_tokens=100, seed=3, frequency_penalty=-1.5, top_p=0.9),
    "presence, and seeded": SamplingParams(max_tokens=100, seed=9, presence_penalty=1.5, top_k=9),
    "biased until a position": SamplingParams(
        max_tokens=100,
        temperature=0.0,
        min_tokens=7,
        stop_token_ids=frozenset(range(20)),
        logit_bias=((30, 3.0), (31, 3.0)),
    ),
    "masked": SamplingParams(max_tokens=100, seed=4, allowed_token_ids=tuple(range(20, 50))),
}
each_params = pytest.mark.parametrize("params", ALL.values(), ids=ALL)


@pytest.fixture
def runner(verifying: Runner) -> Iterator[Runner]:
    verifying.reset()
    before = COMPILES.count
    yield verifying
    assert COMPILES.count == before, "something was compiled while serving"


def wrong(token: int) -> int:
    return (token + 1) % SAMPLED_VOCAB


def drafts_of(tokens: Sequence[int], done: int, count: int, right: int) -> list[int]:
    """Drafts behind the token number `done`, of which the first `right` are what comes."""
    drafts = list(tokens[done + 1 : done + 1 + count])
    return drafts[:right] + [wrong(token) for token in drafts[right:]]


def begin(runner: Runner, seq: Placed, prompt: Sequence[int] = PROMPT) -> Sampled:
    return certain(step(runner, [seq.chunk(prompt)], [seq])[0])


def assert_all_same(got: Sequence[Sampled], expected: Sequence[Sampled]) -> None:
    for one, other in zip(got, expected, strict=True):
        assert_same(one, other)


@each_params
@pytest.mark.parametrize("positions", [2, 4, 8])
def test_what_is_accepted_is_what_plain_decoding_yields(
    runner: Runner, params: SamplingParams, positions: int
) -> None:
    """For every number of right drafts, one row after the other, over several pages of 4 tokens."""
    expected = generate(runner, Placed(params=params), PROMPT, MOST)
    tokens = tokens_of(expected)
    for least in range(positions):
        seq = Placed(slot=1, pages=(20, 21, 22, 23, 24, 25, 26, 27), params=params)
        got = [begin(runner, seq)]
        right = least
        while len(got) < COUNT:
            done = len(got) - 1
            drafts = drafts_of(tokens, done, positions - 1, right)
            row = several(step(runner, [seq.verify(START + done, drafts)])[0])
            assert len(row) == right + 1
            got += row
            right = (right + 1) % positions
        assert_all_same(got, expected[: len(got)])
        done = len(got) - 1
        assert_same(step(runner, [seq.decode(START + done)])[0], expected[done + 1])


@each_params
def test_rows_are_launched_before_it_is_known_where_they_begin(
    runner: Runner, params: SamplingParams
) -> None:
    """The device takes those of the drafts that follow its own length."""
    expected = generate(runner, Placed(params=params), PROMPT, MOST)
    tokens = tokens_of(expected)
    for right in range(4):
        seq = Placed(slot=2, pages=(20, 21, 22, 23, 24, 25, 26, 27), params=params)
        got = [begin(runner, seq)]
        drafts = drafts_of(tokens, 0, 3, right)
        in_flight = runner.launch(plan([seq.verify(START, drafts)]))
        while len(got) < COUNT:
            # The host knows the tokens in `got`, and that one more is in flight at least.
            done = len(got)
            drafts = drafts_of(tokens, done, 6, 6)
            row = seq.verify(START + done, drafts, positions=4, follows=True)
            launched = runner.launch(plan([row]))
            got += several(runner.collect(in_flight)[0])
            in_flight = launched
        got += several(runner.collect(in_flight)[0])
        assert len(got) > COUNT
        assert_all_same(got, expected[: len(got)])


def test_drafts_that_are_left_lie_on_the_device(runner: Runner) -> None:
    """Rows without drafts from the host go on with those of an earlier plan."""
    expected = generate(runner, Placed(params=SAMPLED), PROMPT, MOST)
    tokens = tokens_of(expected)
    seq = Placed(slot=1, pages=(20, 21, 22, 23, 24, 25, 26, 27), params=SAMPLED)
    got = [begin(runner, seq)]
    drafts = drafts_of(tokens, 0, 11, 9)
    first = runner.launch(plan([seq.verify(START, drafts, positions=4)]))
    second = runner.launch(plan([seq.verify(START + 1, None, positions=4, follows=True)]))
    got += several(runner.collect(first)[0])
    third = runner.launch(plan([seq.verify(START + 5, None, positions=4, follows=True)]))
    got += several(runner.collect(second)[0])
    assert len(got) == 9
    got += several(runner.collect(third)[0])
    assert len(got) == 11, "two of the three are right"
    for why in ("the last draft is wrong", "none is left"):
        before = len(got)
        got += several(step(runner, [seq.verify(START + before - 1, None, positions=8)])[0])
        assert len(got) == before + 1, why
    assert_all_same(got, expected[: len(got)])


def test_drafts_go_with_the_positions_they_are_for(runner: Runner) -> None:
    """Shifted by one they are wrong, and change nothing; so do tokens that do not exist."""
    expected = generate(runner, Placed(), PROMPT, MOST)
    tokens = tokens_of(expected)
    seq = Placed(slot=1, pages=(20, 21, 22, 23, 24))
    for drafts in (tokens[2:9], [10**6] * 7, [SAMPLED_VOCAB + 1] * 7):
        begin(runner, seq)
        assert_all_same(several(step(runner, [seq.verify(START, drafts)])[0]), expected[1:2])


def test_decode_rows_and_verify_rows_share_a_step(runner: Runner) -> None:
    """Of different lengths and numbers of drafts, in any order."""
    prompts = {0: PROMPT, 1: OTHER, 3: PROMPT[:5]}
    params = {0: GREEDY, 1: SAMPLED, 3: PENALISED}
    expected = {
        slot: generate(runner, Placed(params=params[slot]), prompt, MOST)
        for slot, prompt in prompts.items()
    }
    seqs = {
        slot: Placed(slot=slot, pages=tuple(range(first, first + 8)), params=params[slot])
        for slot, first in ((0, 10), (1, 20), (3, 30))
    }
    got = {slot: [begin(runner, seqs[slot], prompts[slot])] for slot in (3, 0, 1)}
    for turn in range(6):
        rows: list[Row] = []
        order = [0, 1, 3] if turn % 2 else [3, 1, 0]
        for slot in order:
            done = len(got[slot]) - 1
            start = len(prompts[slot]) + done
            right = (slot + turn) % 4
            drafts = drafts_of(tokens_of(expected[slot]), done, right, right)
            plain = not drafts
            rows.append(seqs[slot].decode(start) if plain else seqs[slot].verify(start, drafts))
        for slot, result in zip(order, step(runner, rows), strict=True):
            got[slot] += several(result)
    for slot, results in got.items():
        assert_all_same(results, expected[slot][: len(results)])


def masks_of(allowed: Sequence[Sequence[int]]) -> tuple[bytes, ...]:
    bits = np.zeros((len(allowed), 128), np.uint8)
    for row, tokens in zip(bits, allowed, strict=True):
        row[list(tokens)] = 1
    return tuple(np.packbits(row, bitorder="little").tobytes() for row in bits)


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "seeded"])
def test_each_position_has_a_mask_of_its_own(runner: Runner, params: SamplingParams) -> None:
    masks = masks_of([range(first, first + 9) for first in (3, 40, 21, 10, 50, 0, 33)])
    seq = Placed(params=params)
    expected = [begin(runner, seq)]
    for index, mask in enumerate(masks):
        row = seq.decode(START + index)._replace(mask=mask)
        expected.append(certain(step(runner, [row])[0]))
    tokens = tokens_of(expected)
    for right in range(4):
        seq = Placed(slot=1, pages=(20, 21, 22, 23, 24), params=params)
        got = [begin(runner, seq)]
        drafts = drafts_of(tokens, 0, 3, right)
        row = seq.verify(START, drafts, masks=masks[:4])
        beside = Placed(slot=0).decode(START)._replace(mask=masks[6])  # of a slot's own
        got += several(step(runner, [row, beside])[0])
        assert len(got) == right + 2
        while len(got) < len(masks):
            row = seq.decode(START + len(got) - 1)._replace(mask=masks[len(got) - 1])
            got.append(certain(step(runner, [row])[0]))
        assert_all_same(got, expected[: len(got)])


def test_positions_from_the_end_on_are_not_computed(runner: Runner) -> None:
    """The entry behind its pages is that of a former holder, and the page somebody else's now."""
    expected = generate(runner, Placed(), PROMPT, MOST)
    tokens = tokens_of(expected)
    before = Placed(slot=1, pages=(1, 2, 3, 4, 5, 6, 7, 8))
    begin(runner, before)
    neighbour = Placed(slot=2, pages=(4, 5, 6, 7, 8))
    others = generate(runner, neighbour, OTHER, 3)
    seq = Placed(slot=1, pages=(30, 31, 32))  # room for 12 tokens
    begin(runner, seq)
    got = several(step(runner, [seq.verify(START, tokens[1:8], end=12)])[0])
    assert_all_same(got, expected[1:2])
    after = certain(step(runner, [neighbour.decode(len(OTHER) + 2)])[0])
    assert_all_same([after], generate(runner, Placed(slot=3, pages=(9, 10, 11)), OTHER, 4)[3:])
    assert len(others) == 3


def test_pages_that_verify_rows_filled_are_found_by_others(runner: Runner) -> None:
    """Rejected drafts were in them, too, before they were full."""
    expected = generate(runner, Placed(), PROMPT, MOST)
    tokens = tokens_of(expected)
    seq = Placed(slot=1, pages=(20, 21, 22, 23, 24, 25))
    got = [begin(runner, seq)]
    for right in (1, 2, 0, 3, 1):
        done = len(got) - 1
        got += several(
            step(runner, [seq.verify(START + done, drafts_of(tokens, done, 3, right))])[0]
        )
    cached = (START + len(got) - 1) // 4 * 4
    assert cached >= 20
    text = [*PROMPT, *tokens]
    reader = Placed(slot=3, pages=(20, 21, 22, 23, 24, 30, 31, 32))
    hit = step(runner, [reader.chunk(text[cached : cached + 3], cached)], [reader])
    assert_same(hit[0], expected[cached + 3 - START])


def test_a_row_whose_logits_are_not_numbers_ends_there(runner: Runner) -> None:
    seq = Placed(pages=(1, 2, 3, 4, 5))
    expected = tokens_of(generate(runner, seq, PROMPT, 5))
    begin(runner, seq)
    params = runner.params
    not_numbers = jax.device_put(np.full_like(np.asarray(params.final_norm), np.nan))
    runner.use_params(params._replace(final_norm=not_numbers))
    try:
        assert step(runner, [seq.verify(START, expected[1:4])]) == [Sampled(None)]
    finally:
        runner.use_params(params)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (Placed().verify(START, [1] * 15, positions=4), "15 drafts, a slot keeps 14"),
        (Placed().verify(START, [1, 2], masks=masks_of([[1]])), "one for each position"),
        (
            Placed().verify(START, [1], follows=True, masks=masks_of([[1], [2]])),
            "masks need a known beginning",
        ),
        (
            Placed().verify(START, None, positions=2, masks=masks_of([[1], [2]])),
            "known drafts",
        ),
        (Placed().verify(START, [1] * 8), "no verify bucket"),
        (Placed().chunk([1, 2])._replace(verify=Placed().verify(0, [1]).verify), "no chunks"),
    ],
    ids=["window", "few masks", "unknown beginning", "unknown drafts", "positions", "chunk"],
)
def test_rows_that_the_device_cannot_compute_are_refused(
    runner: Runner, row: Row, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        runner.launch(plan([row]))
