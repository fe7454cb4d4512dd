"""Claims decided, terminals built: pure functions, case by case."""

from __future__ import annotations

import msgspec
import pytest
from msgspec import UNSET

from services.gpu_worker import claim, journal
from services.gpu_worker.engine.events import Finished, FinishReason, SpecTelemetry
from services.gpu_worker.outcome import Outcome, Timeline
from shared.errors import ContextLengthExceeded, Overloaded
from shared.protocol import codec
from shared.protocol.messages import CancelRequest, Failure, Terminal
from tests.unit.services.gpu_worker.rig import make_request
from tests.unit.services.gpu_worker.scripted import FINGERPRINT


def _cancel(
    reason: str = "stop_string", *, choice: int | None = None, offset: int | None = None
) -> CancelRequest:
    return CancelRequest(request_id="r1", reason=reason, choice=choice, offset=offset)  # type: ignore[arg-type]


def _finished(choice: int = 0, reason: FinishReason = FinishReason.LENGTH, **changes: object) -> Finished:
    options = {
        "request_id": "r1", "choice": choice, "reason": reason, "error_code": None, "detail": None,
        "prompt_tokens": 200, "cached_tokens": 64, "completion_tokens": 20, "stop_id": None,
        "telemetry": SpecTelemetry(rounds=5, drafted=15, accepted=10), "end_ns": 0,
    }  # fmt: skip
    return Finished(**{**options, **changes})  # type: ignore[arg-type]


def _outcome(choices: int = 1) -> Outcome:
    return Outcome(
        request=make_request(choices=choices),
        prompt_tokens=200,
        timeline=Timeline(created_ns=0),
        cache_decision="hit",
    )


def _terminal(outcome: Outcome, *emitted: int, failure: Failure | None = None) -> Terminal:
    return outcome.terminal(attempt=1, worker_id="w", emitted=emitted, scored=0, failure=failure, at_ns=0)


def _decide(
    state: journal.JournalState,
    *cancels: CancelRequest,
    **changes: object,
) -> claim.Verdict:
    request = make_request(**changes)
    return claim.decide(
        request,
        state,
        cancels,
        fingerprint=FINGERPRINT,
        now_ns=request.created_ns,
        max_attempts=3,
    )


def _state(**changes: object) -> journal.JournalState:
    from dataclasses import replace

    return replace(journal.empty(1), **changes)  # type: ignore[arg-type]


def test_a_fresh_request_is_attempt_one_and_a_left_one_goes_on_after_the_last() -> None:
    assert _decide(_state()) == claim.Run(attempt=1)
    assert _decide(_state(attempt=4, starts=9, vain=2, fingerprint=FINGERPRINT)) == claim.Run(attempt=5)


def test_what_is_done_is_done_whatever_else_holds() -> None:
    terminal = _terminal(_outcome(), 0)
    assert _decide(_state(terminal=terminal, starts=9), _cancel(), deadline_ns=0) == claim.AlreadyDone()


def test_a_cancellation_of_one_of_several_choices_does_not_stop_the_request() -> None:
    assert _decide(_state(tokens=((), ())), _cancel(choice=1), choices=2) == claim.Run(attempt=1)
    assert isinstance(_decide(_state(), _cancel(choice=0)), claim.Cancelled)
    assert isinstance(_decide(_state(), _cancel()), claim.Cancelled)
    both = _cancel(choice=1), _cancel(choice=0)
    assert isinstance(_decide(_state(tokens=((), ())), *both, choices=2), claim.Cancelled)


@pytest.mark.parametrize(
    ("state", "changes", "code", "dead"),
    [
        (_state(starts=3, vain=3, attempt=3), {}, "poison", True),
        (_state(fingerprint="other"), {}, "fingerprint_mismatch", False),
        (_state(), {"deadline_ns": 0}, "deadline_exceeded", False),
    ],
)
def test_refusals_are_typed(
    state: journal.JournalState, changes: dict[str, object], code: str, dead: bool
) -> None:
    verdict = _decide(state, **changes)
    assert isinstance(verdict, claim.Refuse)
    assert (verdict.failure.code, verdict.dead_letter) == (code, dead)


def test_failures_carry_status_and_retry_time() -> None:
    assert claim.failure_of(Overloaded("full", retry_after_s=7)).retry_after_s == 7
    error = ContextLengthExceeded(prompt_tokens=1, max_tokens=2, window=2)
    assert (claim.failure_of(error).status, claim.failure_of(error).retry_after_s) == (400, None)


def test_an_end_by_the_engine() -> None:
    outcome = _outcome()
    outcome.finished[0] = _finished(reason=FinishReason.STOP, stop_id=9)
    terminal = _terminal(outcome, 19)
    (end,) = terminal.ends
    assert (end.finish, end.stop_id, end.completion_tokens, end.emitted_tokens) == ("stop", 9, 20, 19)
    assert (end.spec.rounds, terminal.cached_tokens, terminal.cancel_reason) == (5, 64, None)


@pytest.mark.parametrize(("replayed", "told"), [(141, 141), (0, UNSET)])
def test_replayed_tokens_are_told_apart_and_leave_no_byte_where_there_are_none(
    replayed: int, told: object
) -> None:
    outcome = _outcome()
    outcome.finished[0] = _finished(telemetry=SpecTelemetry(rounds=5, replayed=replayed))
    terminal = _terminal(outcome, 20)
    assert terminal.ends[0].spec.replayed == told
    assert (b"replayed" in codec.encode(terminal)) is (replayed > 0)


def test_c1_3_a_choice_that_went_on_from_decode_made_rows_is_named_and_not_exact() -> None:
    outcome = _outcome(2)
    outcome.finished = {0: _finished(0), 1: _finished(1, reuse="decode")}
    terminal = _terminal(outcome, 20, 20)
    assert (terminal.reuse, terminal.exact, terminal.cache_decision) == ("decode", False, "decode")
    outcome.finished = {0: _finished(0), 1: _finished(1)}
    terminal = _terminal(outcome, 20, 20)
    assert (terminal.reuse, terminal.exact, terminal.cache_decision) == ("prefill", True, "hit")


def test_c1_7_a_later_attempt_at_a_turn_that_may_have_gone_on_from_them_is_not_called_exact() -> None:
    outcome = _outcome()
    plan = msgspec.structs.replace(outcome.request.cache, reuse="decode")
    outcome.request = msgspec.structs.replace(outcome.request, cache=plan)
    outcome.finished = {0: _finished(0)}
    for attempt, exact in ((1, True), (2, False)):
        terminal = outcome.terminal(
            attempt=attempt, worker_id="w", emitted=(20,), scored=0, failure=None, at_ns=0
        )
        assert terminal.exact is exact


def test_a_stop_string_wins_over_the_engine_s_own_end_but_not_over_an_error() -> None:
    outcome = _outcome()
    outcome.finished[0] = _finished()
    assert not outcome.cancel(_cancel(offset=5))  # nothing was open any more
    assert [(end.finish, end.completion_tokens) for end in _terminal(outcome, 20).ends] == [("stop", 5)]
    outcome.finished[0] = _finished(reason=FinishReason.ERROR, error_code="engine_fault")
    terminal = _terminal(outcome, 20)
    assert terminal.ends[0].finish == "error"
    assert terminal.failure is not None


def test_an_offset_beyond_what_was_generated_counts_what_was_generated() -> None:
    outcome = _outcome()
    outcome.cancel(_cancel(offset=50))
    outcome.finished[0] = _finished(reason=FinishReason.CANCELLED, completion_tokens=8)
    assert _terminal(outcome, 8).ends[0].completion_tokens == 8


def test_a_cancellation_counts_once_for_each_choice_that_it_ends() -> None:
    outcome = _outcome(choices=3)
    assert outcome.cancel(_cancel(choice=0))
    assert not outcome.cancel(_cancel(choice=7))
    assert not outcome.cancel(_cancel(choice=0))
    outcome.finished[1] = _finished(choice=1)
    assert not outcome.cancel(_cancel(choice=1))
    assert outcome.cancel(_cancel())
    assert not outcome.open


def test_without_an_end_of_the_engine_a_failure_tells_what_is_journalled() -> None:
    failure = Failure(code="x", message="", status=500, retry_after_s=None)
    terminal = _terminal(_outcome(choices=2), 3, 4, failure=failure)
    assert [(end.finish, end.completion_tokens) for end in terminal.ends] == [("error", 3), ("error", 4)]
    assert terminal.failure == failure


def test_r_s8_a_step_that_never_fitted_is_503_with_retry_after() -> None:
    outcome = _outcome()
    outcome.finished[0] = _finished(reason=FinishReason.ERROR, error_code="overloaded", detail="no room")
    failure = _terminal(outcome, 3).failure
    assert failure is not None
    assert (failure.code, failure.status) == ("overloaded", 503)
    assert failure.retry_after_s is not None
