"""The family of turns that go on from what was decoded: it finds nothing in a sound engine, and what is broken in others."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch

from services.gpu_worker.engine.cache.decoded import DecodedState
from services.gpu_worker.engine.cache.decoded_pool import DecodedStates
from services.gpu_worker.engine.cache.offload import HostTier
from services.gpu_worker.engine.cache.state_pool import StatePool
from services.gpu_worker.engine.sequence import SequenceState
from services.gpu_worker.engine.sessions import append
from services.prove import turns
from services.prove.turns import MANNERS, QUICK, Manner, tried
from shared.errors import EngineFault

WIDE = Manner(drafter="mtp K=3", rounds=7, chunk=512)


def test_c1_3_a_sound_engine_gives_every_turn_again() -> None:
    verdict = tried("tiny", "sampled", QUICK[-1])
    assert not verdict.differences
    assert verdict.compared["tokens"] == 4 * turns.SAID
    assert verdict.compared["kv rows"] > 400


def test_trials_have_names_of_their_own_and_a_whole_run_has_all_models() -> None:
    names = [trial.name for trial in turns.family(True, 0)]
    assert len(set(names)) == len(names) == 9 * len(MANNERS)
    assert {name.split(" / ")[0] for name in names} == {"tiny", "pocket", "window"}


def _no_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The unfilled block is not copied: fresh rows hold what somebody left there."""
    monkeypatch.setattr(HostTier, "copy_block", lambda *_: None)


def _stale_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """The recurrent state is not the kept one."""
    plain = StatePool.restore

    def restore(self: StatePool, snapshot: int, slot: int) -> None:
        plain(self, snapshot, slot)
        self.state[:, slot] *= 0.5

    monkeypatch.setattr(StatePool, "restore", restore)


def _skipped_flush(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last token's row is not written, though it counts."""

    def flush(sessions: Sequence[object], runner: object) -> None:
        for session in sessions:
            if session.has_pending:  # type: ignore[attr-defined]
                session.sequence.commit([session.pending_tok])  # type: ignore[attr-defined]

    monkeypatch.setattr(append, "flush_pending", flush)


def _older_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    """A turn begins with another row's hidden, so that its first draft row is paired wrongly; no token may change."""
    plain = DecodedStates.restore

    def restore(self: DecodedStates, decoded: DecodedState, sequence: SequenceState) -> torch.Tensor:
        return torch.zeros_like(plain(self, decoded, sequence))

    monkeypatch.setattr(DecodedStates, "restore", restore)


@pytest.mark.parametrize("plant", [_no_copy, _stale_state, _skipped_flush])
def test_what_is_broken_is_found(
    monkeypatch: pytest.MonkeyPatch, plant: Callable[[pytest.MonkeyPatch], None]
) -> None:
    turns.reference("tiny", "sampled")
    plant(monkeypatch)
    assert tried("tiny", "sampled", WIDE).differences


def test_what_drafters_read_changes_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    turns.reference("tiny", "sampled")
    _older_hidden(monkeypatch)
    assert not tried("tiny", "sampled", WIDE).differences


def test_a_reference_that_shows_nothing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DecodedStates, "find", lambda *_: None)
    with pytest.raises(EngineFault, match="did not go on"):
        turns.reference.__wrapped__("tiny", "greedy, logprobs")
