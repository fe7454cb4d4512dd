"""Rounds that start before the host has read the last one: any order of cancels, joins, other widths, drafters and landings.

The card is played by a few lines of Python that know tokens alone; what advances positions, pending rows and the fold is the
engine's own (`kernels.advance`), and so is what a block drafter takes in, and when (`BlockDrafts`, `BlockContext`): its
rings hold tokens here, and it drafts from nothing else. Streams must be those of plain decode, and after every landing the
host's books (`StatePool`) must say what the card really did to the states.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.gpu_worker.engine import whole
from services.gpu_worker.engine.batch import DraftRows
from services.gpu_worker.engine.cache.kv_pool import KVPool
from services.gpu_worker.engine.cache.state_pool import StatePool
from services.gpu_worker.engine.config import EngineConfig
from services.gpu_worker.engine.device_rounds import DeviceRounds
from services.gpu_worker.engine.flights import By, Round, WholeRow
from services.gpu_worker.engine.models.block_config import BlockDims
from services.gpu_worker.engine.models.block_context import BlockContext
from services.gpu_worker.engine.models.block_ring import DraftRing
from services.gpu_worker.engine.models.random import TINY
from services.gpu_worker.engine.models.random_block import block_hf_config
from services.gpu_worker.engine.placement import Placement
from services.gpu_worker.engine.requests import SamplingParams
from services.gpu_worker.engine.whole import WholeRounds

CARD = Placement(device=torch.device("cpu"), dtype=torch.float32, on_card=True, fold_rows=3, recipe="card")
DIMS = replace(TINY, hidden=4, gdn_key_dim=2, gdn_value_dim=2, head_dim=4)
BLOCK_DIMS = BlockDims.from_hf(
    block_hf_config(DIMS, block_size=3, sliding_window=5, target_layer_ids=[0], dflash_config={})
)
SLOTS, MOST, STOP = 3, 4, 0
BLOCK = 4
"""Rows of a block, so few that rounds run out of them."""
GREEDY = SamplingParams(seed=0, temperature=0.0)


MANY = frozenset({STOP, *range(-20, -10)})
"""More stop ids than a card is told, which are the smallest."""


def says(tokens: list[int]) -> int:
    """What the model says after these tokens: one of seven ids, one of which is rare and ends a stream."""
    value = zlib.crc32(bytes(tokens)) % 31
    return 1 + value % 6 if value else STOP


def guesses(tokens: list[int]) -> int:
    """The head is wrong on every third prefix."""
    return says(tokens) if (len(tokens) + sum(tokens)) % 3 else 6 - says(tokens)


def blocks_of(tokens: list[int]) -> tuple[int, bool]:
    """A block drafter's next draft, wrong on every fifth prefix, and whether it believes in it."""
    right = says(tokens)
    return right if len(tokens) % 5 else 6 - right, len(tokens) % 4 != 3


class PlayedBlocks(BlockContext):
    """A tapped row is its token, and so is a row of a ring."""

    def __init__(self, believes: bool) -> None:
        self.dims = BLOCK_DIMS
        self.drafter = cast("Any", SimpleNamespace(features=lambda taps: taps))
        self.ring = DraftRing(BLOCK_DIMS, SLOTS, 0, CARD)
        self._present, self._open, self._tapped, self._features, self._wanted = [], {}, {}, {}, {}
        self._nothing = torch.empty(0, DIMS.hidden)
        self._believes = believes
        self.passes = 0

    def _put(
        self, features: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor, offsets: torch.Tensor
    ) -> None:
        for token, position, slot, offset in zip(features[:, 0], positions, slots, offsets, strict=True):
            self.ring.k[0, int(slot), 0, int(offset), :2] = torch.stack([token, position])

    def prime(self, slot: int, tokens: list[int]) -> None:
        self.reset(slot)
        self.primed(slot, 0, torch.tensor(tokens, dtype=torch.float32)[:, None].expand(-1, DIMS.hidden))

    def _seen_at(self, slot: int, position: int) -> int:
        token, held = self.ring.k[0, slot, 0, position % self.ring.rows_each, :2].tolist()
        assert held == position, "the ring lacks a row that a block sees"
        return int(token)

    def draft(self, slots: Any, starts: Any, lows: Any, anchors: Any, most: int, rules: Any) -> Any:
        drafts = torch.zeros(len(slots), min(most, self.dims.drafts), dtype=torch.int32)
        believed = torch.full((len(slots),), drafts.shape[1], dtype=torch.int32)
        for number, (slot, start) in enumerate(zip(slots.tolist(), starts.tolist(), strict=True)):
            if slot == self.scratch or not self.drafting[number]:
                continue
            first = max(int(lows[number]), start - self.dims.window)
            assert first <= max(0, start - self.dims.window)
            tokens = self.known[number][:first] + [self._seen_at(slot, at) for at in range(first, start)]
            assert tokens == self.known[number], "the ring holds rows of another past"
            tokens.append(int(anchors[number]))
            for k in range(drafts.shape[1]):
                drafts[number, k], sure = blocks_of(tokens)
                tokens.append(int(drafts[number, k]))
                if self._believes and not sure:
                    believed[number] = min(int(believed[number]), k)
        return drafts, believed

    known: list[list[int]]
    """Committed tokens of every sequence, which the card is told before a pass."""
    drafting: list[bool]


class PlayedCard(DeviceRounds):
    """Slots hold tokens: those in the state, and those in the ring."""

    def __init__(
        self, model: Any, kv: KVPool, states: StatePool, inputs: Any, *, ring: Any, block: Any
    ) -> None:
        super().__init__(model, kv, states, inputs, block=block)
        self.played = cast("PlayedBlocks", block)
        self.folded: list[list[int]] = [[] for _ in range(SLOTS + 1)]
        self.ring: list[dict[int, int]] = [{} for _ in range(SLOTS + 1)]

    def _known(self, number: int) -> list[int]:
        """Committed tokens of a sequence; folds when the launch says so."""
        slot, first = int(self.inputs.slots[number]), int(self.inputs.head[number])
        rows = range(int(self.inputs.pending[number]))
        return self.folded[slot] + [self.ring[slot][(first + row) % self._states.capacity] for row in rows]

    def launch(self, size: Round) -> torch.Tensor:
        ids = self.inputs.ids[: size.sequences * size.columns].view(size.sequences, size.columns)
        if size.block and self._blocks is not None:
            self.played.known = [self._known(number) for number in range(size.sequences)]
            live = self.inputs.counts[: size.sequences] > 0
            self.played.drafting = (live & (self.told.by[: size.sequences] == By.BLOCK)).tolist()
            self._blocks.draft(size)
        for number in range(size.sequences if size.head else 0):
            tokens = [*self._known(number), int(ids[number, 0])]
            for column in range(1, size.head + 1):
                if self.told.by[number] == By.HEAD:
                    ids[number, column] = guesses(tokens)
                tokens.append(int(ids[number, column]))
        return self._walked(size, ids)

    def _walked(self, size: Round, ids: torch.Tensor) -> torch.Tensor:
        shape = size.sequences, size.columns
        picks = torch.full(shape, 5, dtype=torch.int32)
        for number in range(size.sequences):
            slot, known = int(self.inputs.slots[number]), self._known(number)
            first = int(self.inputs.head[number]) + int(self.inputs.pending[number])
            if self.inputs.store_after[number]:
                self.folded[slot] = list(known)
            for column in range(int(self.inputs.counts[number])):
                known.append(int(ids[number, column]))
                self.ring[slot][(first + column) % self._states.capacity] = known[-1]
                self.tail_taps[number, column] = known[-1]
                picks[number, column] = says(known)
        return self.ended(size, picks, ids, torch.zeros(*shape, DIMS.hidden))


@dataclass
class Stream:
    """A session in small: it knows what it said, and walks picks as a session does."""

    slot: int
    tokens: list[int]
    budget: int
    anchor: int
    k: int
    said: list[int] = field(default_factory=list)
    behind: list[int] = field(default_factory=list)
    going: bool = True
    spare: int = 8
    """Blocks beyond those of the round that is asked for."""
    stops: frozenset[int] = frozenset({STOP})
    by: By = By.HEAD
    laddered: bool = False

    def row(self) -> WholeRow:
        k = min(self.k, self.budget - 1)
        tokens = self.behind
        catch_up = DraftRows(
            start=len(self.tokens) + 1 - len(tokens),
            tokens=tokens,
            hiddens=torch.zeros(len(tokens), DIMS.hidden),
            block_table=(),
        )
        heads = k > 0 and self.by is By.HEAD
        if heads:
            self.behind = []
        return WholeRow(
            slot=self.slot,
            start=len(self.tokens),
            anchor=self.anchor,
            block_table=[0] * (-(-(len(self.tokens) + 1 + k) // BLOCK) + self.spare),
            rules=GREEDY,
            choice=0,
            k=k,
            by=self.by if k else By.HOST,
            catch_up=catch_up if heads else None,
            rungs=MOST if self.laddered and self.by is By.BLOCK else 0,
            tap=True,
            left=self.budget,
            stops=self.stops,
        )

    def settle(self, drafts: list[int], picks: list[int]) -> int:
        taken: list[int] = []
        for column, token in enumerate(picks):
            taken.append(token)
            self.said.append(token)
            self.budget -= 1
            self.going = token != STOP and self.budget > 0
            if not self.going or column == len(drafts) or token != drafts[column]:
                break
        self.tokens += [self.anchor, *taken[:-1]]
        self.anchor = taken[-1]
        self.behind += taken
        if self.laddered and self.by is By.BLOCK:
            self.k = min(max(len(taken) + 1, 3), MOST) - 1
        return len(taken)


def plain(prompt: list[int], budget: int) -> list[int]:
    tokens, said = list(prompt), []
    while len(said) < budget and (not said or said[-1] != STOP):
        said.append(says(tokens))
        tokens.append(said[-1])
    return said


class Play:
    """Streams over one `WholeRounds`, and the checks."""

    def __init__(self, *, believes: bool = False) -> None:
        config = EngineConfig(
            num_blocks=8, num_slots=SLOTS, num_snapshots=0, max_batch=SLOTS, max_verify=MOST, max_context=512
        )
        self.states = StatePool(DIMS, SLOTS, 0, MOST, CARD)
        model = SimpleNamespace(dims=DIMS, mtp=None)
        kv = KVPool(DIMS, 8, CARD)
        self.block = PlayedBlocks(believes)
        self.rounds = WholeRounds(
            cast("Any", model), kv, self.states, config, 32, lambda row: None, block=self.block
        )
        self.card = cast("PlayedCard", self.rounds._rounds)
        self.expected: dict[int, list[int]] = {}

    def join(self, slot: int, length: int, budget: int, k: int) -> Stream:
        prompt = [(slot + 3 * i + length) % 7 for i in range(length)]
        self.states.reset(slot)
        self.states.advanced(slot, length)
        self.card.folded[slot], self.card.ring[slot] = list(prompt), {}
        self.block.prime(slot, prompt)
        said = plain(prompt, budget)
        self.expected[slot] = said
        stream = Stream(slot, prompt, budget - 1, said[0], k, [said[0]], [said[0]])
        stream.going = said[0] != STOP and stream.budget > 0
        return stream

    def round(self, streams: list[Stream], *, more: bool) -> None:
        live = [stream for stream in streams if stream.going]
        if not live:
            return
        rows = [stream.row() for stream in live]
        results = self.rounds.run(rows, more=more)
        for stream, row, result in zip(live, rows, results, strict=True):
            assert result.taps is not None
            self.block.seen(row.slot, row.start, result.taps)
            taken = stream.settle(result.drafts, result.picks)
            self.states.accept(stream.slot, taken)
            self.block.accepted(stream.slot, taken)
            assert stream.said == self.expected[stream.slot][: len(stream.said)]

    def land(self, streams: list[Stream]) -> None:
        self.rounds.land()
        for stream in streams:
            self._check(stream)

    def end_burst(self, streams: list[Stream]) -> None:
        """Whoever is over gives the slot away; what flies for the others alone flies on."""
        self.rounds.land([stream.slot for stream in streams if stream.going])
        flight = self.rounds._flight
        flying = flight.slots if flight is not None else frozenset()
        for stream in streams:
            assert stream.going or stream.slot not in flying
            if stream.slot not in flying:
                self._check(stream)

    def settle(self, stream: Stream) -> None:
        """As a checkpoint does, between two bursts."""
        slot = stream.slot
        self.rounds.make_way([slot])
        self._check(stream)
        if self.states.fold(slot):
            self.card.folded[slot] = list(stream.tokens)
            self.states.flushed(slot)
        self.block.settle([slot])
        end, ring = len(stream.tokens), self.block.ring
        for at in range(max(ring.low(slot), end - self.block.dims.tail_rows), end):
            assert self.block._seen_at(slot, at) == stream.tokens[at], "the drafter's tail is of another past"

    def _check(self, stream: Stream) -> None:
        slot, held = stream.slot, self.states.position(stream.slot)
        assert held + self.states.fold(slot) == len(stream.tokens)
        assert self.card.folded[slot] == stream.tokens[:held], (
            "the card folded what the host does not know of"
        )
        rows = range(self.states.fold(slot))
        ring = [self.card.ring[slot][(self.states.head(slot) + row) % self.states.capacity] for row in rows]
        assert ring == stream.tokens[held:]


STEP = st.tuples(
    st.sampled_from(
        ["round"] * 8 + ["burst", "settle", "cancel", "width", "land", "spare", "stops", "drafter"]
    ),
    st.integers(0, SLOTS - 1),
    st.booleans(),
)


@pytest.fixture(autouse=True)
def _played(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(whole, "DeviceRounds", PlayedCard)
    monkeypatch.setattr(whole, "ROWS", BLOCK)


@settings(deadline=None, max_examples=60)
@given(
    starts=st.lists(
        st.tuples(st.integers(1, 9), st.integers(1, 40), st.integers(0, MOST - 1)), min_size=1, max_size=SLOTS
    ),
    steps=st.lists(STEP, min_size=4, max_size=30),
    believes=st.booleans(),
)
def test_the_hosts_books_are_what_the_card_did(
    starts: list[tuple[int, int, int]], steps: list[tuple[str, int, bool]], believes: bool
) -> None:
    play = Play(believes=believes)
    streams = [play.join(slot, *start) for slot, start in enumerate(starts)]
    for what, number, more in steps:
        stream = streams[number % len(streams)]
        match what:
            case "cancel":
                stream.going = False
            case "width":
                stream.k = number
            case "drafter":
                stream.by, stream.laddered = (By.HEAD, By.BLOCK)[number % 2], more
            case "spare":
                stream.spare = number
            case "stops":
                play.land(streams)
                stream.stops = MANY if more else frozenset({STOP})
            case "land":
                play.land(streams)
            case "burst":
                play.end_burst(streams)
            case "settle":
                play.settle(stream)
            case _:
                play.round(streams, more=more)
    play.land(streams)


def _counted(play: Play, patch: pytest.MonkeyPatch) -> dict[str, int]:
    """Rounds that were asked for and launched then, that were launched before the last one was read, and after."""
    counts = {"asked": 0, "blind": 0, "read": 0}
    launch, blind, fly_on = play.rounds._launch, play.rounds._fly_blind, play.rounds._fly_on

    def launched(rows: Any) -> Any:
        counts["asked"] += 1
        return launch(rows)

    def launched_blind(*given: Any) -> Any:
        made = blind(*given)
        counts["blind"] += made is not None
        return made

    def launched_then(flight: Any, rows: Any, told: Any, ahead: Any) -> Any:
        made = fly_on(flight, rows, told, ahead)
        counts["read"] += ahead is None and made is not None
        return made

    patch.setattr(play.rounds, "_launch", launched)
    patch.setattr(play.rounds, "_fly_blind", launched_blind)
    patch.setattr(play.rounds, "_fly_on", launched_then)
    return counts


def _played_out(play: Play, streams: list[Stream]) -> int:
    """Run to the end; how many rounds that took."""
    rounds = 0
    while any(stream.going for stream in streams):
        play.round(streams, more=True)
        rounds += 1
    play.land(streams)
    assert [stream.said for stream in streams] == [play.expected[stream.slot] for stream in streams]
    return rounds


def test_a_flight_is_used_and_ends_where_the_stream_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two streams of different ends: nearly every round was launched before the one before it was read."""
    play = Play()
    counts = _counted(play, monkeypatch)
    rounds = _played_out(play, [play.join(0, 5, 30, 2), play.join(1, 8, 30, 2)])
    assert counts["asked"] < rounds / 2
    assert counts["blind"] > rounds / 2


def test_who_sits_a_round_out_that_flew_with_it_goes_on_where_it_was() -> None:
    """Its rows ran out, say: what the card folded of it is noted though nobody asks for its part of the round."""
    play = Play()
    streams = [play.join(0, 5, 40, 2), play.join(1, 8, 40, 2)]
    sat_out = 0
    while all(stream.going for stream in streams):
        play.round(streams, more=True)
        if play.rounds._flight is not None and all(stream.going for stream in streams):
            play.round(streams[:1], more=True)
            play.settle(streams[1])
            sat_out += 1
    assert sat_out > 3
    _played_out(play, streams)


def test_no_round_is_launched_past_a_streams_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    play = Play()
    counts = _counted(play, monkeypatch)
    rounds = _played_out(play, [play.join(0, 5, 30, 0)])
    assert len(play.expected[0]) == 30, "the stream ends by its budget"
    assert sum(counts.values()) == rounds


def test_without_room_for_whatever_is_accepted_a_round_is_read_first(monkeypatch: pytest.MonkeyPatch) -> None:
    play = Play()
    counts = _counted(play, monkeypatch)
    stream = play.join(1, 8, 30, 2)
    stream.spare = 0
    _played_out(play, [stream])
    assert counts["read"] > 0


def test_a_stream_with_more_stop_ids_than_a_card_is_told_is_never_ahead(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nor is anybody beside it, since one launch runs them all."""
    play = Play()
    counts = _counted(play, monkeypatch)
    streams = [play.join(0, 5, 30, 2), play.join(1, 8, 30, 2)]
    streams[1].stops = MANY
    while all(stream.going for stream in streams):
        play.round(streams, more=True)
    assert counts["asked"] > 1
    assert counts["blind"] + counts["read"] == 0
    _played_out(play, streams)


@pytest.mark.parametrize("by", [By.HEAD, By.BLOCK])
@pytest.mark.parametrize("laddered", [False, True])
def test_whoever_drafts_rounds_follow_one_another_unasked(
    by: By, laddered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One path for every drafter: with the head beside a block drafter, in ladders and out of them."""
    play = Play(believes=laddered)
    counts = _counted(play, monkeypatch)
    streams = [play.join(0, 19, 40, 2), play.join(1, 25, 40, 2), play.join(2, 17, 40, 3)]
    for stream, own in zip(streams, (by, By.BLOCK, By.BLOCK), strict=True):
        stream.by, stream.laddered = own, laddered
    rounds = _played_out(play, streams)
    assert counts["blind"] > rounds / 2
    assert counts["asked"] < rounds / 2
    assert play.block.passes > rounds, "the block drafter drafted"
