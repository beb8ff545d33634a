"""Drafts that the host never sees: what is proposed, and what is learned."""

from __future__ import annotations

import argparse
from types import SimpleNamespace
from typing import Any

import pytest

from jaxserve.cli.flag_values import speculation
from jaxserve.scheduler.speculation.head import HeadDrafts


def sequences(*drafted: bool) -> Any:
    return [
        SimpleNamespace(id=number, drafts_on_device=each) for number, each in enumerate(drafted)
    ]


def test_a_sequence_without_drafts_computes_one_position_to_get_some() -> None:
    found = HeadDrafts(drafts=3)(sequences(True, False))
    assert (found[0].positions, found[1].positions) == (4, 1)
    assert found[0].drafts is found[1].drafts is None
    assert found[0].survival == found[1].survival == pytest.approx((0.6, 0.36, 0.216))


def test_how_often_each_draft_is_accepted_is_learned_if_those_before_it_are() -> None:
    head = HeadDrafts(drafts=3)
    for number in range(4000):
        head.observe(3, (0, 1, 3, 3)[number % 4])
    (found,) = head(sequences(True)).values()
    # Of four rows three have the first draft right, two the second, and all of those the third.
    assert found.survival == pytest.approx((0.75, 0.5, 0.5), abs=0.02)
    for _ in range(4000):
        head.observe(1, 0)
    assert head(sequences(True))[0].survival[0] < 0.02, "what was long ago is forgotten"


def test_a_row_of_fewer_drafts_says_nothing_of_those_it_had_not() -> None:
    head = HeadDrafts(drafts=2)
    for _ in range(500):
        head.observe(0, 0)
        head.observe(1, 1)
    first, both = head(sequences(True))[0].survival
    assert first > 0.95 and both == pytest.approx(0.6 * first)


def test_a_head_that_was_given_up_is_tried_again_some_time() -> None:
    head, asked = HeadDrafts(drafts=2), sequences(True)
    for _ in range(1000):
        head.observe(2, 0)
    before = head(asked)[0].survival[0]
    for _ in range(8000):
        head(asked)
    assert head(asked)[0].survival[0] == before < 0.02
    for _ in range(20_000):
        head(asked)
    assert 0.2 < head(asked)[0].survival[0] < 0.6


def test_the_flag_takes_a_head_in_the_form_of_vllm() -> None:
    chosen = speculation('{"model": "org/head", "method": "dspark", "num_speculative_tokens": 5}')
    assert (chosen.model, chosen.drafts) == ("org/head", 5)
    assert speculation('{"model": "folder"}').model == "folder"
    assert speculation("{}").model is None
    for text, message in (
        ('{"method": "eagle3"}', "without a model; use ngram or suffix"),
        ('{"method": "ngram", "model": "folder"}', "with a model; use dflash or dspark or eagle3"),
        ('{"method": "medusa", "model": "folder"}', "unsupported method .medusa. with a model"),
        ('{"model": 3}', "not a folder"),
        ('{"model": ""}', "not a folder"),
    ):
        with pytest.raises(argparse.ArgumentTypeError, match=message):
            speculation(text)
