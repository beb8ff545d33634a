"""A device made of lists, and the same generation without any device.

`FakeRunner` does what `jaxserve.plan` promises and nothing more: state per slot, keys and values
where the page tables say. In each cache group the "key and value" of a position is a hash of its
token and of the positions before it that its window covers, read back through the page table, as in
a real model; the next token is a hash of what is seen in all groups and the sampling parameters. A
wrong page, a stale entry, a missed write or the parameters of somebody else therefore change the
output.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from jaxserve.api import Ahead, FinishReason, Request, SamplingParams
from jaxserve.config import CacheConfig, SchedulerConfig
from jaxserve.plan import PageMoves, Row, Sampled, StepPlan

STATE_LAYERS = 2
VOCAB = 4
"""Small, so that stop tokens and equal prefixes happen."""


def attend(seen: list[int], position: int, token: int) -> int:
    """What a group's cache holds for a token that sees this (tuples of ints hash reproducibly)."""
    return hash((*seen, position, token))


def as_computed(token: int, position: int, prompt: int, block: int) -> int:
    """A token, told from the same one that is computed in the other form: in blocks of `block`
    tokens, into which the first `prompt` ones are cut, or by itself."""
    in_blocks = block > 1 and position < prompt - (prompt % block == 1)
    return token + VOCAB * in_blocks


def next_token(seen: list[int], params: SamplingParams, mask: bytes | None) -> int:
    mixed = hash((*seen, params.seed, params.top_k, int(params.temperature * 8)))
    allowed = [token for token in range(VOCAB) if mask is None or mask[0] >> token & 1]
    return allowed[(mixed >> 20) % len(allowed)]


def first_seen(window: int | None, position: int) -> int:
    """The first position that a query sees."""
    return 0 if window is None else max(position - window + 1, 0)


@dataclass(frozen=True)
class FakeGuide:
    """Allows two tokens at a time; which ones depends on all before, or with `ahead` on all but the
    last. A mask is there when it has been waited for `delay` times."""

    delay: int
    ahead: bool = False

    def start(self) -> FakeGuideState:
        return FakeGuideState(self.delay, ahead=self.ahead)


class FakeGuideState:
    error = None

    def __init__(self, delay: int, *, ahead: bool):
        self._delay, self._left, self._ahead = delay, 0, ahead
        self._tokens: list[int] = []
        self._guesses: list[int] = []

    @property
    def ready(self) -> bool:
        return self._left == 0

    @property
    def mask(self) -> bytes:
        assert self.ready, "a mask that is not there was used"
        return self._mask(self._tokens[:-1] if self._ahead else self._tokens)

    @property
    def following(self) -> bytes | None:
        return self._mask(self._tokens) if self._ahead else None

    def _mask(self, tokens: list[int]) -> bytes:
        return bytes([0b11 << hash((*tokens,)) % (VOCAB - 1)])

    def advance(self, *tokens: int, drafts: Sequence[int] = (), most: int = 0) -> None:
        for token in tokens:
            self._left = 0
            assert self.mask[0] >> token & 1, "a token that its mask forbids"
            self._tokens.append(token)
        self._left = self._delay
        self._guesses = list(drafts)[: 0 if self._ahead else most]

    @property
    def ahead(self) -> Ahead:
        """Drafts up to the first that is forbidden."""
        assert self.ready, "masks that are not there were used"
        allowed: list[int] = []
        masks: list[bytes] = []
        for draft in self._guesses:
            if not self._mask([*self._tokens, *allowed])[0] >> draft & 1:
                break
            allowed.append(draft)
            masks.append(self._mask([*self._tokens, *allowed]))
        return Ahead(tuple(allowed), 0, tuple(masks))

    def wait(self, timeout: float) -> bool:
        self._left = max(self._left - 1, 0)
        return self.ready


class Pending(NamedTuple):
    """A launched step: executed, but its results are not yet on the host."""

    number: int
    sampled: list[Sampled | None]


class FakeRunner:
    def __init__(self, config: SchedulerConfig, cache: CacheConfig):
        self.config, self.page_size = config, cache.page_size
        self.windows = [group.window for group in cache.groups]
        self.kv: list[list[list[int | None]]] = [
            [[None] * cache.page_size for _ in range(group.num_pages)] for group in cache.groups
        ]
        width = -(-config.max_model_len // cache.page_size)
        slots = config.max_num_seqs
        self.page_table = [[[0] * width for _ in range(slots)] for _ in cache.groups]
        self.params: list[SamplingParams | None] = [None] * slots
        self.last_token: list[int | None] = [None] * slots
        self.launched = self.collected = 0
        self.own_tokens = cache.own_tokens
        self.own: list[dict[tuple[int, int], int]] = [{} for _ in range(slots)]
        """What each slot keeps of its first tokens, by group and position."""
        self.lengths = [0] * slots
        """Where the row after each slot's last verify row begins."""
        self.drafts: list[dict[int, int]] = [{} for _ in range(slots)]
        """Those of each slot, by position."""
        self.store_ring: dict[int, list[int | None]] = {}
        self.load_ring: dict[int, list[int | None]] = {}
        """Pages by ring slot. Copies may touch them at any time."""
        count = slots + 1 + cache.snapshots
        self.states: list[list[list[int | None]]] = [[[]] * STATE_LAYERS for _ in range(count)]
        """By slot, of each recurrent layer: all tokens that went into it."""
        self.has_state = cache.snapshots > 0
        self.block = cache.state_block
        self.most_prompts = cache.most_prompts
        self.prompts = [0] * slots

    def move_pages(self, moves: PageMoves) -> Callable[[], bool]:
        for page, slot, group in moves.restores:
            if group == len(self.kv):
                self.states[page // STATE_LAYERS][page % STATE_LAYERS] = self.load_ring[slot]
                continue
            assert page != 0, "the padding page was given out"
            self.kv[group][page] = list(self.load_ring[slot])
        for page, slot, group in moves.stores:
            if group == len(self.kv):
                self.store_ring[slot] = self.states[page // STATE_LAYERS][page % STATE_LAYERS]
                continue
            self.store_ring[slot] = list(self.kv[group][page])
        return lambda: True

    def launch(self, plan: StepPlan) -> Pending:
        self._check_limits(plan)
        for source, target in plan.states:
            self.states[target] = list(self.states[source])
        for admission in plan.admissions:
            self.params[admission.slot] = admission.params
            self.prompts[admission.slot] = admission.num_prompt
            self.own[admission.slot].clear()
        for slot, position, page, group in plan.pages:
            assert page != 0, "the padding page was given out"
            self.page_table[group][slot][position] = page
        rows = [self._placed(row) for row in plan.rows]
        inputs = [row.tokens or (self.last_token[row.slot],) for row in rows]
        for row, tokens in zip(rows, inputs, strict=True):
            self._write(row, tokens)  # all rows write before any reads, as on the device
        if self.has_state:
            for row, tokens in zip(rows, inputs, strict=True):
                self._advance(row, tokens)
        sampled = [self._sample(row) if row.verify is None else self._accept(row) for row in rows]
        self.launched += 1
        return Pending(self.launched, sampled)

    def is_done(self, pending: Pending) -> bool:
        return True

    def collect(self, pending: Pending) -> list[Sampled | None]:
        self.collected += 1
        assert pending.number == self.collected, "steps are collected in launch order"
        return pending.sampled

    def _placed(self, row: Row) -> Row:
        """A verify row where it begins, with the tokens that it computes."""
        asked = row.verify
        if asked is None:
            return row
        if asked.drafts is not None:
            self.drafts[row.slot] = dict(enumerate(asked.drafts, start=row.start + 1))
        start = self.lengths[row.slot] if asked.follows else row.start
        last = self.last_token[row.slot]
        assert row.start <= start < asked.end and last is not None
        tokens = [last]
        for position in range(start + 1, min(start + asked.positions, asked.end)):
            if position not in self.drafts[row.slot]:
                break
            tokens.append(self.drafts[row.slot][position])
        return row._replace(start=start, tokens=tuple(tokens))

    def _accept(self, row: Row) -> Sampled:
        """Samples at each position of a verify row, as long as the drafts are right."""
        found: list[Sampled] = []
        for count, draft in enumerate([*row.tokens[1:], None], start=1):
            mask = row.verify.masks[count - 1] if row.verify and row.verify.masks else row.mask
            result = self._sample(row._replace(tokens=row.tokens[:count], mask=mask))
            assert result is not None
            found.append(result)
            if result.token != draft:
                break
        self.lengths[row.slot] = row.start + len(found)
        return found[0]._replace(further=tuple(found[1:]))

    def _check_limits(self, plan: StepPlan) -> None:
        assert plan.rows and all(row.num_tokens >= 1 for row in plan.rows)
        assert plan.num_tokens <= self.config.max_num_batched_tokens
        chunks = [bool(row.tokens) for row in plan.rows]
        assert sum(chunks) <= self.most_prompts, "too many prompts in a step"
        assert chunks == sorted(chunks), "decodes come first"
        assert plan.verify == any(row.verify is not None for row in plan.rows)
        assert not (plan.verify and any(chunks)), "a verify step has no chunks"
        ends = [
            row.start + row.num_tokens if row.verify is None else row.verify.end
            for row in plan.rows
            if row.tokens or plan.verify
        ]
        pages = sum(-(-end // self.page_size) for end in ends)
        most = self.config.max_chunk_context
        assert most is None or pages <= -(-most // self.page_size), "chunks see too much"
        slots = [row.slot for row in plan.rows]
        assert len(set(slots)) == len(slots), "two rows in one slot"
        admitted = [admission.slot for admission in plan.admissions]
        assert len(set(admitted)) == len(admitted)
        entries = [(entry.slot, entry.position, entry.group) for entry in plan.pages]
        assert len(set(entries)) == len(entries), "a page table entry is set twice"
        changed = {entry.slot for entry in plan.pages}
        if self.windows == [None]:
            assert changed <= set(slots)
        assert set(admitted) <= set(slots)

    def _write(self, row: Row, tokens: tuple[int | None, ...]) -> None:
        own = len(self.own[row.slot]) // len(self.windows)
        assert row.start <= own or own >= self.own_tokens, "its own tokens come first"
        for position, token in enumerate(tokens, start=row.start):
            assert token is not None, "a decode row without a last token"
            for group in range(len(self.windows)):
                before = self._read(row.slot, group, position, position)
                form = as_computed(token, position, self.prompts[row.slot], self.block)
                self._put(row.slot, group, position, attend(before, position, form))

    def _advance(self, row: Row, tokens: tuple[int | None, ...]) -> None:
        """Recurrent layers: the state says which tokens it has seen, and the cache of a group
        without a window which are right."""
        layers = self.states[row.slot] if row.start else [[]]
        seen = layers[0]
        assert all(each == seen for each in layers), "pieces of several states"
        assert len(seen) == row.start, "state of another position"
        prompt = self.prompts[row.slot]
        end = row.start + len(tokens)
        assert row.start >= prompt or row.start % self.block == 0, "a row begins inside of a block"
        assert end >= prompt or end % self.block == 0, "a row ends inside of a block"
        whole = [group for group, window in enumerate(self.windows) if window is None]
        for group in whole[:1]:
            values = [self._value(row.slot, group, at) for at in range(row.start)]
            right = [attend(values[:at], at, token or 0) for at, token in enumerate(seen)]
            assert values == right, "state of other tokens"
        now = seen + [
            as_computed(token or 0, position, prompt, self.block)
            for position, token in enumerate(tokens, start=row.start)
        ]
        self.states[row.slot] = [now] * STATE_LAYERS
        if row.kept is not None:
            place = row.start + row.kept.tokens
            assert row.start < place <= end and place % self.block == 0, "not the end of a block"
            self.states[row.kept.slot] = [now[:place]] * STATE_LAYERS

    def _put(self, slot: int, group: int, position: int, value: int) -> None:
        if position < self.own_tokens:
            self.own[slot][group, position] = value
            if self.windows[group] is not None:
                return  # the page may be behind the window: it is in nobody's table
        page, offset = self._locate(slot, group, position)
        self.kv[group][page][offset] = value

    def _sample(self, row: Row) -> Sampled | None:
        last = row.start + row.num_tokens - 1
        groups = range(len(self.windows))
        seen = [value for group in groups for value in self._read(row.slot, group, last, last + 1)]
        if not row.samples:
            return None
        params = self.params[row.slot]
        assert params is not None, "a slot samples before its admission"
        token = self.last_token[row.slot] = next_token(seen, params, row.mask)
        return Sampled(token)

    def _read(self, slot: int, group: int, query: int, end: int) -> list[int]:
        """What the query at a position sees up to `end`."""
        first = first_seen(self.windows[group], query)
        return [self._value(slot, group, position) for position in range(first, end)]

    def _value(self, slot: int, group: int, position: int) -> int:
        if position < self.own_tokens:
            return self.own[slot][group, position]
        page, offset = self._locate(slot, group, position)
        value = self.kv[group][page][offset]
        assert value is not None, "read a position that was never written"
        return value

    def _locate(self, slot: int, group: int, position: int) -> tuple[int, int]:
        page = self.page_table[group][slot][position // self.page_size]
        assert page != 0, "a position without a page"
        return page, position % self.page_size


class _Alone:
    """What a sequence that has the device to itself has in its cache."""

    def __init__(self, cache: CacheConfig, prompt: int):
        self._windows = [group.window for group in cache.groups]
        self._kv: list[list[int]] = [[] for _ in self._windows]
        self._prompt, self._block = prompt, cache.state_block

    @property
    def length(self) -> int:
        return len(self._kv[0])

    def seen(self) -> list[int]:
        """What the last token sees, in all groups."""
        last = self.length - 1
        pairs = zip(self._kv, self._windows, strict=True)
        return [value for kv, window in pairs for value in kv[first_seen(window, last) :]]

    def add(self, token: int) -> None:
        position = self.length
        token = as_computed(token, position, self._prompt, self._block)
        for kv, window in zip(self._kv, self._windows, strict=True):
            kv.append(attend(kv[first_seen(window, position) :], position, token))


def solo(
    request: Request, config: SchedulerConfig, cache: CacheConfig
) -> tuple[list[int], FinishReason]:
    """The tokens of a request that has the device to itself, and why it ends."""
    alone = _Alone(cache, len(request.prompt))
    for token in request.prompt:
        alone.add(token)
    outputs: list[int] = []
    guide = request.params.guide.start() if request.params.guide else None
    while True:
        outputs.append(next_token(alone.seen(), request.params, guide.mask if guide else None))
        if guide is not None:
            guide.advance(outputs[-1])
            while not guide.wait(0.0):
                pass
        stops = outputs[-1] in request.params.stop_token_ids
        if stops and len(outputs) >= request.params.min_tokens:
            return outputs, FinishReason.STOP
        if len(outputs) == request.params.max_tokens:
            return outputs, FinishReason.LENGTH
        if alone.length + 1 == config.max_model_len:
            return outputs, FinishReason.LENGTH
        if alone.length == cache.longest:
            return outputs, FinishReason.LENGTH  # no room to compute the token just sampled
        alone.add(outputs[-1])
