"""Glm5SpecSession comes to its end by a stop id: wherever it stands among accepted drafts, the stream is plain decode's, and a
session that is over says nothing more."""

from __future__ import annotations

import pytest

from services.gpu_worker.engine.events import FinishReason
from services.gpu_worker.engine.sessions.glm5 import Glm5SpecSession
from services.gpu_worker.engine.sessions.rounds import run_round
from tests.engine_kit import WARM, Driver, baseline, run_one
from tests.unit.services.gpu_worker.engine.test_glm5_engine import ARMS, STEPWISE, engine_of, item, plain


@pytest.mark.parametrize("place", [0, 1, 2, 5, 9])
@pytest.mark.parametrize("arm", ARMS)
def test_r_g2_a_stop_id_ends_where_plain_decode_ends(arm: str, place: int) -> None:
    told = plain(item(sampling=WARM)).tokens
    chosen = item(drafter=arm, sampling=WARM, stop_ids=frozenset({told[place]}))
    engine = engine_of()
    outcome, expected = run_one(engine, chosen), plain(chosen)
    assert outcome.tokens == expected.tokens
    assert (outcome.end.reason, outcome.end.stop_id) == (FinishReason.STOP, told[place])
    assert outcome.end.completion_tokens == expected.end.completion_tokens
    baseline(engine)


@pytest.mark.parametrize("arm", ARMS)
def test_r_g2_a_finished_session_says_nothing_more(arm: str) -> None:
    told = plain(item(sampling=WARM)).tokens
    chosen = item(drafter=arm, sampling=WARM, stop_ids=frozenset({told[5]}))
    engine, sessions = engine_of(STEPWISE), set()
    driver = Driver(engine)
    driver.submit(chosen)
    while engine.has_work():
        driver.step()
        sessions |= {stream.session for stream in engine._active}
    (session,) = sessions
    assert isinstance(session, Glm5SpecSession)
    assert session.finished
    before = session.rounds, session.pos
    assert session.drain() == []
    run_round([session], engine.runner)
    assert session.drain() == []
    assert (session.rounds, session.pos) == before
    assert not session.demote_eligible
