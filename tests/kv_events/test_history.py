"""Numbers, the ring, and what is answered for batches that have left it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from jaxserve.kv_events.events import CacheEvent, Cleared, Removed, Stored
from jaxserve.kv_events.history import History
from tests.kv_events.engines import PAGE, learn, prompt, stored
from tests.kv_events.router import Index, Numbered
from tests.kv_events.wire_schema import AllBlocksCleared, decode


def answered(history: History, start: int) -> list[Numbered]:
    return [Numbered(number, decode(payload)) for number, payload in history.since(start)]


def test_numbers_count_from_0_and_batches_come_as_they_were() -> None:
    history = History(10)
    sent = [history.append(each) for each in ([Cleared()], [stored(1)], [stored(2)])]
    assert [each[0] for each in sent if each is not None] == [0, 1, 2]
    assert [*history.since(1)] == sent[1:] and [*history.since(0)] == sent
    assert [*history.since(3)] == [*history.since(99)] == []


def test_who_asks_for_what_has_left_the_ring_gets_all_pages_and_no_number_is_missing() -> None:
    history = History(2)
    for number in range(6):
        history.append([stored(number, 3)])
    history.append([Removed(stored(0, 3).hashes[1:], None)])
    for start in (0, 3, 4):
        batches = answered(history, start)
        assert [each.number for each in batches] == list(range(start, 7))
        assert isinstance(batches[0].events[0], AllBlocksCleared)
        assert not any(each.events for each in batches[1:])
        index = Index(page_size=PAGE)
        learn(index, batches)
        assert index.predict([*prompt(0, 3), 9]) == PAGE
        assert all(index.predict([*prompt(n, 3), 9]) == 3 * PAGE for n in range(1, 6))
    assert len(answered(history, 5)) == 2 and answered(history, 5)[0].events[0] != batches[0]


def test_what_follows_a_page_is_told_again_behind_it_even_if_other_pages_came_between() -> None:
    history = History(1)
    first = stored(1, 3)
    tail = first._replace(hashes=first.hashes[1:], parent=first.hashes[0], start=PAGE)
    head = first._replace(hashes=first.hashes[:1])
    for each in (head, stored(2, salt="s"), tail, stored(3)):
        history.append([each])
    index = Index(page_size=PAGE)
    learn(index, answered(history, 0))
    assert index.predict([*prompt(1, 3), 9]) == 3 * PAGE
    assert (index.predict([*prompt(2, 1), 9], "s"), index.predict([*prompt(2, 1), 9])) == (PAGE, 0)


def test_events_that_cannot_be_right_are_left_out() -> None:
    """They come only after the events of a step were lost."""
    history, lost = History(10), stored(1, 2)
    orphan = lost._replace(hashes=lost.hashes[1:], parent=lost.hashes[0], start=PAGE)
    assert history.append([orphan]) is None
    assert history.append([Removed(lost.hashes, None)]) is None
    assert history.num_batches == 0
    assert history.append([orphan, stored(2), Removed([*lost.hashes, *stored(2).hashes], None)])
    index = Index(page_size=PAGE)
    learn(index, answered(history, 0))
    assert index.names == [set()] and history.num_pages == 0


def test_of_a_window_pages_are_kept_without_the_page_before() -> None:
    history, some = History(1), stored(1, 2)
    windowed = Stored(some.hashes[1:], some.hashes[0], some.tokens, PAGE, PAGE, "", 0, 3)
    assert history.append([windowed]) and history.append([stored(2)])
    assert history.num_pages == 2


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(1, 3)), max_size=20), st.integers(1, 4))
def test_an_index_of_any_answer_is_the_index_of_all_batches(
    steps: list[tuple[int, int]], ring: int
) -> None:
    """Each step stores what is missing of a prompt's first pages, or else removes the last one."""
    history, everything, have = History(ring), Index(page_size=PAGE), dict[int, int]()
    for number, pages in steps:
        full, before = stored(number, 3), have.get(number, 0)
        events: list[CacheEvent]
        if before < pages:
            parent = full.hashes[before - 1] if before else None
            hashes = full.hashes[before:pages]
            events = [full._replace(hashes=hashes, parent=parent, start=before * PAGE)]
            have[number] = pages
        else:
            events = [Removed([full.hashes[before - 1]], None)]
            have[number] = before - 1
        batch = history.append(events)
        assert batch is not None
        learn(everything, [Numbered(batch[0], decode(batch[1]))])
    for start in range(len(steps)):
        batches = answered(history, start)
        assert [each.number for each in batches] == list(range(start, len(steps)))
        if start == 0 or start < len(steps) - ring:
            index = Index(page_size=PAGE)
            learn(index, batches)
            assert index.names == everything.names
