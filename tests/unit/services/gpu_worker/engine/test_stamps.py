"""Generation stamps of the hidden that a drafter starts from (R-Q8, R-Q9). Nothing is shared between sequences here; the
stamps show it: a hidden that another admission began is never read, and no token depends on that."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from torch import Tensor

from services.gpu_worker.engine.batch import DraftRows
from services.gpu_worker.engine.engine import Engine
from services.gpu_worker.engine.sequence import SequenceState
from tests.engine_kit import WARM, Driver, baseline, build, cold, prompt, request, run_one

TOKENS = prompt(100, seed=12)


def pairs(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, bool]]:
    """(position, whether it is paired with zeros) of the first row of every draft launch, as they come."""
    found: list[tuple[int, bool]] = []
    draft = engine.runner.draft

    def spy(rows: Sequence[DraftRows]) -> list[Tensor]:
        found.extend((row.start, not bool(row.hiddens[0].any())) for row in rows)
        return draft(rows)

    monkeypatch.setattr(engine.runner, "draft", spy)
    return found


def test_r_q9_every_admission_draws_its_own_and_0_is_nobodys() -> None:
    engine = build()
    driver, seen = Driver(engine), set[int]()
    for name in ("a", "b", "c"):
        driver.submit(request(TOKENS, name, max_tokens=30))
    driver.step()
    for stream in engine._active:
        seen.add(stream.session.sequence.mtp_store_gen)
    driver.run()
    assert len(seen) == 3
    assert 0 not in seen
    nobody = SequenceState.host_only()
    nobody.begin_prompt(3)
    assert nobody.mtp_store_gen == nobody.mtp_capture_gen == 0
    assert not nobody.hidden_is_own


def test_r_q8_chunk_0_begins_the_hidden_and_later_chunks_do_not() -> None:
    sequence = SequenceState(mtp_store_gen=5)
    assert not sequence.hidden_is_own
    sequence.begin_prompt(200)
    assert sequence.hidden_is_own
    sequence.mtp_store_gen = 6
    sequence.begin_prompt(200)
    assert sequence.mtp_capture_gen == 5
    assert not sequence.hidden_is_own


def test_r_q8_a_current_stamp_pairs_the_first_token_with_the_prompts_last_hidden(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = build()
    found = pairs(engine, monkeypatch)
    run_one(engine, request(TOKENS, speculation_k=3, sampling=WARM))
    assert found[0] == (len(TOKENS), False)


@pytest.mark.parametrize("stamps", [itertools.repeat(0), itertools.count(7)], ids=["0 and 0", "another's"])
def test_r_q8_without_one_the_drafter_drafts_blind_and_nothing_is_said_differently(
    monkeypatch: pytest.MonkeyPatch, stamps: itertools.repeat[int]
) -> None:
    engine = build()
    found = pairs(engine, monkeypatch)
    begin = SequenceState.begin_prompt

    def with_another(sequence: SequenceState, length: int) -> None:
        begin(sequence, length)
        sequence.mtp_store_gen = next(stamps)

    monkeypatch.setattr(SequenceState, "begin_prompt", with_another)
    outcome = run_one(engine, request(TOKENS, speculation_k=3, sampling=WARM))
    assert found[0] == (len(TOKENS), True)
    assert not any(blind for _, blind in found[1:]), "later rows have hiddens of their own"
    assert outcome.tokens == cold(TOKENS, sampling=WARM)
    baseline(engine)
