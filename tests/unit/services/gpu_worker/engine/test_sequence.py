"""SequenceState and its guard."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.gpu_worker.engine.config import FULL, LINEAR, SLIDING
from services.gpu_worker.engine.sequence import ResourceGuard, SequenceState, layer_states, session_hash
from shared.errors import EngineFault


def test_c6_everything_returns_once_in_reverse_order() -> None:
    returned: list[str] = []
    guard = ResourceGuard()
    guard.add(lambda: returned.append("slot"))
    guard.add(lambda: returned.append("blocks"))
    guard.release()
    guard.release()
    assert returned == ["blocks", "slot"]
    with pytest.raises(EngineFault):
        guard.add(lambda: None)


def test_a_failing_release_does_not_keep_the_others() -> None:
    returned: list[str] = []

    def fails() -> None:
        raise EngineFault("twice")

    guard = ResourceGuard()
    guard.add(lambda: returned.append("slot"))
    guard.add(fails)
    with pytest.raises(EngineFault, match="twice"):
        guard.release()
    assert returned == ["slot"]


def test_r_q24_host_only_owns_nothing() -> None:
    sequence = SequenceState.host_only()
    assert sequence.seq_len == 0
    assert sequence.prompt_len is None
    assert sequence.block_table == []
    sequence.guard.release()
    with pytest.raises(EngineFault):
        sequence.ssm_slot_idx()


def test_r_q15_a_retried_lookup_changes_nothing() -> None:
    sequence = SequenceState(block_table=[7, 8])
    for _ in range(3):
        sequence.apply_hit(list(range(64)), [3])
    assert sequence.block_table == [3, 7, 8]
    assert sequence.seq_len == sequence.marconi_skip_to == sequence.cached_prefix_tokens == 64
    assert sequence.cached_prefix_blocks == 1


def test_a_prefix_off_the_grid_is_refused() -> None:
    with pytest.raises(EngineFault):
        SequenceState(block_table=[1]).apply_hit([1, 2, 3], [0])


def test_r_q16_rows_never_exceed_the_blocks() -> None:
    sequence = SequenceState(block_table=[1])
    sequence.commit(list(range(64)))
    assert sequence.kv_valid_tokens == 64
    with pytest.raises(EngineFault):
        sequence.commit([1])
    assert sequence.seq_len == sequence.kv_valid_tokens == 64


@given(failing=st.lists(st.booleans(), max_size=6), calls=st.integers(1, 4))
@settings(max_examples=50, deadline=None)
def test_r_q4_each_resource_returns_exactly_once_whatever_fails_and_however_often_it_is_asked(
    failing: list[bool], calls: int
) -> None:
    returned: list[int] = []
    guard = ResourceGuard()

    def owned(number: int, fails: bool) -> None:
        def release() -> None:
            returned.append(number)
            if fails:
                raise EngineFault("refused")

        guard.add(release)

    for number, fails in enumerate(failing):
        owned(number, fails)
    for call in range(calls):
        if any(failing) and call == 0:
            with pytest.raises(EngineFault):
                guard.release()
        else:
            guard.release()
    assert returned == list(range(len(failing)))[::-1]


def test_r_q1_the_length_of_the_prompt_never_changes() -> None:
    sequence = SequenceState.host_only()
    sequence.begin_prompt(70)
    sequence.begin_prompt(70)
    with pytest.raises(EngineFault):
        sequence.begin_prompt(71)
    assert sequence.prompt_len == 70


def test_r_q25_blocks_are_found_by_their_logical_number() -> None:
    sequence = SequenceState(block_table=[7, 3])
    assert sequence.hss_window_start() == 0
    assert [sequence.physical_block_for(logical) for logical in (-1, 0, 1, 2)] == [None, 7, 3, None]


def test_fr_18_a_sequence_that_gave_everything_back_has_no_slot() -> None:
    sequence = SequenceState(slot_idx=4)
    assert sequence.ssm_slot_idx() == 4
    sequence.guard.release()
    with pytest.raises(EngineFault):
        sequence.ssm_slot_idx()


def test_r_q3_a_layer_has_its_state_in_the_slot_and_attention_has_none() -> None:
    assert layer_states((LINEAR, LINEAR, FULL, SLIDING), 5) == (5, 5, None, 5)
    assert layer_states((FULL, FULL), None) == (None, None)
    assert SequenceState.host_only().layer_states == ()


def test_r_q3_the_drafters_state_is_kept_only_while_its_rows_are_whole() -> None:
    state = SequenceState(block_table=[0, 1])
    state.commit([1, 2, 3])
    assert state.draft_valid_tokens == 3
    state.commit([4], draft_rows=False)
    state.commit([5, 6])
    assert (state.kv_valid_tokens, state.draft_valid_tokens) == (6, 3), "a gap is never closed"


def test_r_q7_owners_are_never_zero_and_differ_by_namespace_name_and_choice() -> None:
    named = [(b"a" * 32, "r", 0), (b"b" * 32, "r", 0), (b"a" * 32, "s", 0), (b"a" * 32, "r", 1)]
    owners = {session_hash(*name) for name in named}
    assert len(owners) == len(named)
    assert all(0 < owner < 1 << 64 for owner in owners)
    assert SequenceState.host_only().session_hash == 0


def test_r_q11_the_plan_of_the_first_chunk_is_kept_and_goes_with_the_sequence() -> None:
    state = SequenceState()
    plan = state.plan_prefill([64, 192])
    assert state.chunked_prefill_meta is plan
    assert plan.cuts == (64, 192)
    state.guard.release()
    assert state.chunked_prefill_meta is None
