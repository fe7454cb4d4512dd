"""What one stream has said and may still say: history, journal, budget, ending. Whichever session decodes it, one object.

A demotion and a replay hand it on (or begin it again), so that what the client sees depends on tokens alone.
"""

from __future__ import annotations

from services.gpu_worker.engine.drafters.replay import ReplayDrafter
from services.gpu_worker.engine.events import FinishReason, TokenLogprob
from services.gpu_worker.engine.requests import GenerateRequest
from services.gpu_worker.engine.sampling import TokenPicker
from services.gpu_worker.engine.sessions.outcome import REPLAY_DIVERGED, Emission, Ending


class Completion:
    """The completion side of a request. Knows no rows."""

    def __init__(self, request: GenerateRequest, vocab: int) -> None:
        self.picker = TokenPicker(
            request.sampling,
            vocab=vocab,
            prompt=request.tokens,
            stop_ids=request.stop_ids,
            choice=request.choice,
            grammar=request.grammar,
        )
        self.tokens = 0  #: decided and counted, journalled ones and a stop id included
        self.ending: Ending | None = None
        self._stop_ids = request.stop_ids
        self._last_ids = request.last_ids
        self._max_tokens = request.max_tokens
        self._replay = ReplayDrafter(request.emitted)
        self._journal_stands = request.journal_stands or request.reuse == "decode"
        self._outbox: list[Emission] = []

    @property
    def budget_left(self) -> int:
        """Tokens that may still come."""
        return self._max_tokens - self.tokens

    def over(self) -> bool:
        """Whether nothing may be said, and the stream ends so before its first token: it only primed."""
        if self.budget_left <= 0:
            self.end(Ending(reason=FinishReason.LENGTH))
        return self.ending is not None

    @property
    def replaying(self) -> bool:
        """Whether the journal knows the next token."""
        return self.tokens < len(self._replay)

    def journalled(self, most: int) -> list[int]:
        """Up to `most` tokens that an earlier attempt emitted next."""
        return self._replay.propose(self.tokens, most)

    def resume(self, count: int) -> None:
        """The first `count` journalled tokens are decided already: their rows are kept, but for the last one's."""
        for token in self._replay.propose(0, count):
            self.tokens += 1
            self.picker.record(token)

    def decide(self, pick: int) -> int:
        """The next token, given the target's pick: the journalled one, where the rows that the stream went on from may
        be gone. They cannot be computed again, so what is delivered stands (C1.7)."""
        expected = self._replay.expected(self.tokens) if self._journal_stands else None
        return pick if expected is None else expected

    def take(self, token: int, logprob: TokenLogprob | None) -> bool:
        """Count a decided token and emit it. The earliest event in token order ends the stream: a stop id or a last one
        before the budget. True = the stream goes on."""
        expected = self._replay.expected(self.tokens)
        if expected is not None and expected != token:
            self.fail(REPLAY_DIVERGED, f"completion token {self.tokens} is not the journalled one")
            return False
        self.tokens += 1
        if token in self._stop_ids:
            self.end(Ending(reason=FinishReason.STOP, stop_id=token))
            return False
        self.picker.record(token)
        if expected is None:
            self._outbox.append(Emission(token=token, logprob=logprob))
        if token in self._last_ids:
            self.end(Ending(reason=FinishReason.STOP))
            return False
        if self.budget_left <= 0:
            self.end(Ending(reason=FinishReason.LENGTH))
            return False
        return True

    def fail(self, code: str, detail: str) -> None:
        """End with an error; nothing decided later is emitted."""
        self.end(Ending(reason=FinishReason.ERROR, error_code=code, detail=detail))

    def end(self, ending: Ending) -> None:
        """End the stream; the first ending stands."""
        if self.ending is None:
            self.ending = ending

    def drain(self) -> list[Emission]:
        """Tokens to deliver since the last call."""
        emissions, self._outbox = self._outbox, []
        return emissions
