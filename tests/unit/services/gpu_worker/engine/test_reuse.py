"""`reuse = "decode"`: a turn goes on from what the turn before decoded, if both asked for it; the same history gives the
same stream (C1.3)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from services.gpu_worker.engine.batch import DraftRows, PrefillChunk, VerifyRows
from services.gpu_worker.engine.engine import Engine
from services.gpu_worker.engine.events import DrafterOff, DrafterOffReason, FinishReason
from services.gpu_worker.engine.faults import Faults, OutOfMemory, Phase, StreamKey
from services.gpu_worker.engine.limits import EngineLimits
from services.gpu_worker.engine.requests import GenerateRequest
from services.gpu_worker.engine.rounds import DRAFT_BACKLOG
from services.gpu_worker.engine.runner import ModelRunner
from shared.errors import InvalidRequest
from tests.engine_kit import (
    GREEDY,
    WARM,
    Driver,
    Outcome,
    baseline,
    build,
    cold,
    prompt,
    request,
    run_one,
)

FIRST = prompt(70, 5)
NEXT = prompt(90, 6)
SAID = 21
OTHER_ROOT = b"\x08" * 32


def first(name: str = "one", **fields: Any) -> GenerateRequest:
    return request(FIRST, name, **({"max_tokens": SAID, "reuse": "decode"} | fields))


def after(
    said: Sequence[int], name: str = "two", tail: Sequence[int] = NEXT, **fields: Any
) -> GenerateRequest:
    return request((*FIRST, *said, *tail), name, **({"max_tokens": 12, "reuse": "decode"} | fields))


def two_turns(
    engine: Engine, *, company: int = 0, before: dict[str, Any] | None = None, **fields: Any
) -> tuple[Outcome, Outcome]:
    driver = Driver(engine)
    others = [request(prompt(40 + 30 * n, 40 + n), f"other{n}", max_tokens=20) for n in range(company)]
    turn = first(**(before or {}))
    one = driver.run([*others, turn])[turn.key]
    again = after(one.tokens, **fields)
    more = [replace(other, request_id=f"{other.request_id}-again") for other in others]
    two = driver.run([*more, again])[again.key]
    return one, two


def by_hand(
    said: Sequence[int],
    tail: Sequence[int],
    count: int,
    *,
    engine: Engine | None = None,
    table: Sequence[int] = tuple(range(8)),
) -> list[int]:
    """The next turn, greedy, one launch after another: prefill, single rows to the grid, prefill, single rows."""
    engine = engine or build()
    tokens = (*FIRST, *said, *tail)
    hidden = None
    position = 0

    def row(token: int) -> None:
        nonlocal hidden, position
        assert hidden is not None
        (rows,) = engine.runner.verify(
            [VerifyRows(slot=0, start=position, tokens=(token,), block_table=table)]
        )
        engine.runner.accept(0, 1)
        draft = DraftRows(start=position, tokens=(token,), hiddens=hidden[None], block_table=table)
        engine.runner.draft([draft])
        hidden, position = rows[-1], position + 1

    def prefill(part: Sequence[int]) -> None:
        nonlocal hidden, position
        engine.runner.flush(0)
        previous = hidden if hidden is not None else engine.states.state.new_zeros(engine.dims.hidden)
        chunk = PrefillChunk(
            slot=0, start=position, tokens=tuple(part), block_table=table, previous_hidden=previous
        )
        (rows,) = engine.runner.prefill([chunk])
        hidden, position = rows[-1], position + len(part)

    prefill(FIRST)
    grid = -(-(len(FIRST) + len(said)) // 64) * 64
    for token in tokens[len(FIRST) : grid]:
        row(token)
    if tokens[grid:]:
        prefill(tokens[grid:])
    spoken: list[int] = []
    for _ in range(count):
        assert hidden is not None
        spoken.append(int(engine.runner.logits(hidden[None])[0].argmax()))
        row(spoken[-1])
    return spoken


@pytest.mark.parametrize("tail", [NEXT, NEXT[:3], NEXT[:37], NEXT[:38]], ids=len)
def test_r_s4_the_next_turn_goes_on_from_the_flushed_rows(tail: tuple[int, ...]) -> None:
    engine = build()
    driver = Driver(engine)
    one = driver.run([first()])["one", 0]
    assert one.end.reason is FinishReason.LENGTH
    primed = engine.stats().prefill_tokens
    two = driver.run([after(one.tokens, tail=tail)])["two", 0]
    assert two.cached_tokens == two.end.cached_tokens == len(FIRST) + SAID
    assert (one.end.reuse, two.end.reuse) == ("exact", "decode")
    assert engine.stats().prefill_tokens - primed == len(tail), "nothing but the new tokens is computed"
    assert two.tokens == by_hand(one.tokens, tail, len(two.tokens))
    baseline(engine)


def test_r_s4_a_turn_that_ended_by_a_stop_id_is_kept_up_to_the_token_before_it() -> None:
    said = run_one(build(), first()).tokens
    stop = next(token for index, token in enumerate(said) if index > 4 and token not in said[:index])
    index = said.index(stop)
    engine = build()
    driver = Driver(engine)
    one = driver.run([first(stop_ids=frozenset({stop}))])["one", 0]
    assert one.end.reason is FinishReason.STOP
    assert one.tokens == said[:index]
    two = driver.run([after((*one.tokens, stop))])["two", 0]
    assert two.cached_tokens == len(FIRST) + index
    assert two.tokens == by_hand((*one.tokens,), (stop, *NEXT), len(two.tokens))
    baseline(engine)


@pytest.mark.parametrize(
    "sampling", [GREEDY, replace(WARM, repetition_penalty=1.2)], ids=["greedy", "sampled"]
)
def test_the_same_history_gives_the_same_stream_in_any_company_and_with_any_drafter(sampling: Any) -> None:
    fields = {"sampling": sampling, "top_logprobs": 2}
    one, two = two_turns(build(), before=fields, **fields)
    ways: list[tuple[dict[str, Any], int, EngineLimits, dict[str, Any]]] = [
        ({"prefill_chunk": 64}, 0, EngineLimits(burst_rounds=1), {"speculation_k": 3}),
        ({"max_verify": 3}, 2, EngineLimits(burst_rounds=3), {"speculation_k": 2}),
        ({}, 4, EngineLimits(), {"speculation_k": 5, "drafter": "ngram"}),
    ]
    for sizes, company, limits, drafting in ways:
        way = fields | drafting
        same, again = two_turns(build(limits=limits, **sizes), company=company, before=way, **way)
        assert same.tokens == one.tokens
        assert again.end.reuse == "decode"
        assert (again.tokens, again.logprobs) == (two.tokens, two.logprobs)


def test_a_third_turn_goes_on_from_the_second() -> None:
    engine = build()
    driver = Driver(engine)
    one = driver.run([first(speculation_k=3)])["one", 0]
    two = driver.run([after(one.tokens, speculation_k=3)])["two", 0]
    tokens = (*FIRST, *one.tokens, *NEXT, *two.tokens, *prompt(11, 9))
    three = driver.run([request(tokens, "three", reuse="decode", speculation_k=3)])["three", 0]
    assert three.cached_tokens == len(tokens) - 11
    assert three.end.telemetry.drafted > 0
    assert engine.stats().decoded.parked == 1, "the newest turn takes the place of those before it"
    baseline(engine)


def test_who_did_not_opt_in_is_never_served_and_leaves_nothing() -> None:
    engine = build()
    driver = Driver(engine)
    one = driver.run([first()])["one", 0]
    two = driver.run([after(one.tokens, reuse="exact")])["two", 0]
    assert (two.end.reuse, two.cached_tokens) == ("exact", 64)
    assert two.tokens == cold((*FIRST, *one.tokens, *NEXT))
    shy = build()
    driver = Driver(shy)
    driver.run([first(reuse="exact")])
    assert shy.stats().decoded.parked == 0
    two = driver.run([after(one.tokens)])["two", 0]
    assert (two.end.reuse, two.cached_tokens) == ("exact", 64)


def test_r_s13_another_history_and_another_namespace_are_not_served() -> None:
    engine = build()
    driver = Driver(engine)
    one = driver.run([first(labels=("me",))])["one", 0]
    changed = [*one.tokens[:-1], (one.tokens[-1] + 1) % 400 + 3]
    two = driver.run([after(changed, labels=("me",))])["two", 0]
    assert (two.end.reuse, two.cached_tokens) == ("exact", 64)
    theirs = request((*FIRST, *one.tokens, *NEXT), "theirs", root=OTHER_ROOT, reuse="decode", labels=("me",))
    stranger = driver.run([theirs])[theirs.key]
    assert (stranger.end.reuse, stranger.cached_tokens) == ("exact", 0)


def test_c1_what_goes_on_from_decode_made_rows_is_never_published() -> None:
    engine = build()
    driver = Driver(engine)
    one = driver.run([first()])["one", 0]
    two = driver.run([after(one.tokens, tail=prompt(200, 8))])["two", 0]
    assert two.end.reuse == "decode"
    assert not two.captured
    assert {entry.position for entry in engine._cache.tree.entries()} == {64}


def test_branches_of_one_turn_go_on_side_by_side_from_the_same_rows() -> None:
    engine = build()
    driver = Driver(engine)
    one = driver.run([first(labels=("a",))])["one", 0]
    tails = [prompt(20, 50 + n) for n in range(3)]
    branches = [after(one.tokens, f"b{n}", tail, labels=(f"b{n}",)) for n, tail in enumerate(tails)]
    outcomes = driver.run(branches)
    for branch, tail in zip(branches, tails, strict=True):
        outcome = outcomes[branch.key]
        assert outcome.end.reuse == "decode"
        assert outcome.tokens == by_hand(one.tokens, tail, len(outcome.tokens))
    baseline(engine)


@pytest.mark.parametrize("labels", [(), ("me",)])
def test_turns_are_counted_with_why_and_where_they_left(labels: tuple[str, ...]) -> None:
    engine = build()
    driver = Driver(engine)
    one = driver.run([first(labels=labels)])["one", 0]
    driver.run([after(one.tokens, "good", labels=labels)])
    changed = [*one.tokens[:-3], (one.tokens[-3] + 1) % 400 + 3, *one.tokens[-2:]]
    driver.run([after(changed, "other", labels=labels)])
    driver.run([request(FIRST, "begins", reuse="decode", labels=labels)])
    driver.run([request(prompt(80, 90), "new", reuse="decode", labels=("you",))])
    assert dict(engine.stats().affinity.turns) == {"not_kept": 2, "served": 1, "diverged": 1, "no_suffix": 1}
    assert dict(engine.stats().affinity.left_at)[64] >= 1


def test_the_limit_holds_and_the_least_recent_turn_goes() -> None:
    engine = build(limits=EngineLimits(max_decoded=2))
    driver = Driver(engine)
    said = {}
    for n in range(3):
        item = request(prompt(70, 60 + n), f"r{n}", reuse="decode")
        said[n] = driver.run([item])[item.key].tokens
    assert engine.stats().decoded.parked == 2
    for n, served in ((0, "exact"), (2, "decode")):
        item = request((*prompt(70, 60 + n), *said[n], 7, 8, 9), f"again{n}", reuse="decode")
        assert driver.run([item])[item.key].end.reuse == served
    baseline(engine)


def test_parked_turns_give_their_blocks_to_who_needs_them() -> None:
    engine = build(num_blocks=8)
    driver = Driver(engine)
    one = driver.run([first(use_cache=True)])["one", 0]
    assert engine.stats().decoded.parked == 1
    big = request(prompt(400, 70), "big", max_tokens=64, use_cache=False)
    assert driver.run([big])[big.key].end.reason is FinishReason.LENGTH
    assert engine.stats().decoded.parked == 0
    two = driver.run([after(one.tokens)])["two", 0]
    assert two.end.reuse == "exact"
    assert two.tokens == cold((*FIRST, *one.tokens, *NEXT))
    baseline(engine)


def test_a_turn_that_needs_all_memory_does_not_wait_for_what_it_goes_on_from() -> None:
    engine = build(num_blocks=8)
    driver = Driver(engine)
    one = driver.run([first()])["one", 0]
    tail = prompt(8 * 64 - len(FIRST) - SAID - 20, 71)
    two = driver.run([after(one.tokens, tail=tail, max_tokens=20)])["two", 0]
    assert two.end.reason is FinishReason.LENGTH
    baseline(engine)


class Breaks(Faults):
    """This verify launch does not fit; the second turn gives way at these rows."""

    def __init__(self, *, verify: int = 0, rows: Sequence[int] = ()) -> None:
        self.verify = verify
        self.rows = sorted(rows)
        self.count = 0

    def launched(self, phase: Phase, streams: Sequence[StreamKey]) -> None:
        self.count += phase == "verify"
        if phase == "verify" and self.count == self.verify:
            raise OutOfMemory("made to fail")

    def give_way(self, stream: StreamKey, rows: int) -> bool:
        due = stream[0] == "two" and bool(self.rows) and rows >= self.rows[0]
        if due:
            del self.rows[0]
        return due


def test_a_flush_that_does_not_fit_costs_the_next_turn_its_rows_and_nothing_else() -> None:
    said = run_one(build(), first()).tokens
    engine = build(faults=Breaks(verify=SAID))
    one, two = two_turns(engine)
    assert one.tokens == said
    assert two.end.reuse == "exact"
    assert two.tokens == cold((*FIRST, *one.tokens, *NEXT))
    baseline(engine)


@pytest.mark.parametrize("interval", [0, 1])
def test_a_turn_that_gives_way_says_what_it_would_have_said(interval: int) -> None:
    _, whole = two_turns(build(), max_tokens=80)
    faults = Breaks(rows=[100, 130, 190, 220])
    engine = build(limits=EngineLimits(decode_ckpt_blocks=interval, burst_rounds=2), faults=faults)
    _, two = two_turns(engine, max_tokens=80)
    assert not faults.rows
    assert (two.tokens, two.end.reuse) == (whole.tokens, "decode")
    assert two.end.cached_tokens == len(FIRST) + SAID
    baseline(engine)


def test_c1_7_what_was_delivered_stands_where_the_rows_are_gone() -> None:
    """A restart: another attempt has the journal and not the rows. Its own picks may differ; they are not asked for."""
    one, two = two_turns(build())
    for known in (1, 7, 11):
        journal = tuple((token + 1) % 400 + 3 for token in two.tokens[:known])
        again = after(one.tokens, emitted=journal)
        outcome = run_one(build(), again)
        assert outcome.end.reason is FinishReason.LENGTH
        assert len(outcome.tokens) == again.max_tokens - known
    exact = after(one.tokens, emitted=journal, reuse="exact")
    assert run_one(build(), exact).end.error_code == "replay_diverged"


def test_a_head_does_not_guess_from_rows_that_were_not_written() -> None:
    engine = build()
    driver = Driver(engine)
    one = driver.run([first(speculation_k=0)])["one", 0]
    two = driver.run([after(one.tokens, speculation_k=3)])["two", 0]
    told = [event for event in driver.events if isinstance(event, DrafterOff)]
    assert [event.reason for event in told] == [DrafterOffReason.DRAFT_ROWS]
    assert two.end.telemetry.drafted == 0
    assert two.tokens == by_hand(one.tokens, NEXT, len(two.tokens))


def test_r_s11_the_draft_rows_of_a_drafting_conversation_are_whole_and_paired() -> None:
    """Row p pairs token p with the hidden of row p - 1, over the end of a turn, its flush and the append."""
    engine = build()
    driver = Driver(engine)
    one = driver.run([first(speculation_k=3)])["one", 0]
    driver.run([after(one.tokens, speculation_k=3)])
    (kept,) = engine._cache.decoded
    blocks = [block for block in kept.blocks if isinstance(block, int)]
    rows = len(FIRST) + SAID + len(NEXT)
    plain, table = build(), list(range(8))
    by_hand(one.tokens, NEXT, 2, engine=plain, table=table)
    ours, theirs = engine.kv.read_rows(blocks, 0, rows), plain.kv.read_rows(table, 0, rows)
    assert torch.equal(ours[:, -1], theirs[:, -1])


@pytest.mark.parametrize("columns", [2, 8])
@pytest.mark.parametrize("tail", [3, 40, 90])
def test_a_call_of_the_head_takes_few_more_rows_than_a_verify(
    monkeypatch: pytest.MonkeyPatch, columns: int, tail: int
) -> None:
    """A card's launches have fixed sizes, so rows to catch up with come a launch at a time."""
    widest, draft = [0], ModelRunner.draft

    def watched(self: ModelRunner, rows: Sequence[DraftRows]) -> list[torch.Tensor]:
        widest[0] = max(widest[0], *(len(row.tokens) for row in rows))
        return draft(self, rows)

    monkeypatch.setattr(ModelRunner, "draft", watched)
    for said in (1, 7, 30):
        engine = build(max_verify=columns, limits=EngineLimits(draft_cost=0.0, floor=0.0))
        driver = Driver(engine)
        one = driver.run([first(speculation_k=columns - 1, max_tokens=said)])["one", 0]
        two = driver.run([after(one.tokens, tail=prompt(tail, 6), speculation_k=columns - 1)])["two", 0]
        assert two.end.reuse == "decode"
    assert 0 < widest[0] <= columns + DRAFT_BACKLOG


def test_a_turn_that_bypasses_the_cache_can_not_opt_in() -> None:
    with pytest.raises(InvalidRequest, match="goes on from nothing"):
        build().submit(first(use_cache=False))
