"""What the engine says about a stream."""

from __future__ import annotations

from services.gpu_worker.engine.accounts import Counters
from services.gpu_worker.engine.events import FinishReason, SpecTelemetry
from services.gpu_worker.engine.sessions.outcome import Ending
from services.gpu_worker.engine.streams import Stream
from services.gpu_worker.engine.waiting import Waiting
from tests.engine_kit import prompt, request
from tests.session_kit import VOCAB, Bench


def test_bursts_report_differences_and_carry_silent_rounds_over() -> None:
    bench = Bench()
    full = bench.complete(request(prompt(70, 0, VOCAB), max_tokens=20))
    item = request(prompt(70, 0, VOCAB), "replay", max_tokens=20, emitted=tuple(full[:9]))
    stream = Stream(request=item, session=bench.prime(item), prime_ns=0)
    bench.rounds([stream.session], 1)
    assert stream.burst(0, 1) is None, "eight journalled tokens were verified; nothing is new"
    bench.rounds([stream.session], 2)
    burst = stream.burst(1, 2)
    assert burst is not None
    assert (burst.offset, burst.rounds, burst.replayed, list(burst.tokens)) == (9, 2, 9, full[9:11])
    bench.rounds([stream.session])
    rest = stream.burst(2, 3)
    assert rest is not None
    assert rest.offset == 11
    finished = stream.finished(4)
    assert finished.reason is FinishReason.LENGTH
    assert finished.telemetry.rounds == burst.rounds + rest.rounds


def test_a_request_that_never_ran_still_ends() -> None:
    waiting = Waiting(request=request(prompt(70), emitted=(3, 4)), since_ns=0)
    finished = waiting.refused(Ending(reason=FinishReason.CANCELLED, detail="left"), 5)
    assert (finished.reason, finished.completion_tokens, finished.cached_tokens) == ("cancelled", 2, 0)


def test_totals_are_ended_and_running_streams() -> None:
    counters = Counters()
    counters.add(SpecTelemetry(rounds=3, drafted=4, accepted=2, replayed=9))
    total = counters.with_live([SpecTelemetry(rounds=1, drafted=1, accepted=1)])
    assert (total.rounds, total.drafted, total.accepted, total.replayed) == (4, 5, 3, 9)
    assert counters.with_live([]).rounds == 3
