"""What to do with a delivered request, given its journal and its cancellation. Decides, and does nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from services.gpu_worker.journal import JournalState
from shared.errors import BurstlineError, DeadlineExceeded, Unavailable
from shared.protocol.messages import CancelRequest, Failure, GenerateRequest, Started


@dataclass(frozen=True, kw_only=True)
class AlreadyDone:
    """The journal holds a terminal: acknowledge."""


@dataclass(frozen=True, kw_only=True)
class Refuse:
    """End it with a typed failure; `dead_letter` keeps the request for a person to look at."""

    failure: Failure
    dead_letter: bool


@dataclass(frozen=True, kw_only=True)
class Cancelled:
    """It was cancelled before this attempt began: end it without the engine."""

    cancel: CancelRequest


@dataclass(frozen=True, kw_only=True)
class Run:
    """Claim it as `attempt`, going on after the tokens of the journal. `forced`: other numerics than this worker's decided
    them, or some of them; they are taken as they are, and the answer is not exact."""

    attempt: int
    forced: bool = False


BODY_LOST: Final = "body_lost"


Verdict: TypeAlias = AlreadyDone | Refuse | Cancelled | Run


def decide(
    request: GenerateRequest,
    state: JournalState,
    cancels: Sequence[CancelRequest],
    *,
    fingerprint: str,
    now_ns: int,
    max_attempts: int,
    adopted: bool = False,
) -> Verdict:
    """The verdict, in the order of what binds most: done, cancelled, foreign numerics, poison, too late.

    `adopted`: the request was taken over because no worker of its own fingerprint is left; it is in our namespace now.
    """
    if state.terminal is not None:
        return AlreadyDone()
    if covers_all(cancels, request.choices):
        return Cancelled(cancel=cancels[-1])
    foreign = state.fingerprint not in (None, fingerprint)
    if request.namespace.fingerprint != fingerprint or (foreign and not adopted):
        return Refuse(failure=failure_of(_foreign()), dead_letter=False)
    if state.vain >= max_attempts:
        return Refuse(failure=failure_of(_poison(state.vain)), dead_letter=True)
    if request.deadline_ns <= now_ns:
        late = DeadlineExceeded("the request's deadline passed before a worker was free")
        return Refuse(failure=failure_of(late), dead_letter=False)
    return Run(attempt=state.attempt + 1, forced=foreign or state.mixed)


def covers_all(cancels: Sequence[CancelRequest], choices: int) -> bool:
    """Whether nothing of the request is left to do."""
    cut = {cancel.choice for cancel in cancels}
    return None in cut or cut.issuperset(range(choices))


def failure_of(error: BurstlineError) -> Failure:
    """An error as it travels to the caller."""
    retry = getattr(error, "retry_after_s", None)
    return Failure(code=error.code, message=error.message, status=error.status, retry_after_s=retry)


def body_lost(looks: int) -> Failure:
    """A prompt that went in chunks, and is not there, or not all of it."""
    return failure_of(
        BurstlineError(f"the prompt was stored and is gone: looked for {looks} times", code=BODY_LOST)
    )


def internal(error: Exception) -> Failure:
    """A fault of ours as it travels: without its text, which could quote a prompt, unless it is one of our own errors."""
    if isinstance(error, BurstlineError):
        return failure_of(error)
    return Failure(code="internal_error", message="the worker met a fault", status=500, retry_after_s=None)


def started(
    request_id: str,
    attempt: int,
    state: JournalState,
    *,
    worker_id: str,
    fingerprint: str,
    cached_tokens: int,
    at_ns: int,
) -> Started:
    """The claim itself, after what the journal holds."""
    return Started(
        request_id=request_id,
        attempt=attempt,
        worker_id=worker_id,
        fingerprint=fingerprint,
        cached_tokens=cached_tokens,
        resumed_offsets=state.offsets,
        resumed_scores=state.scores,
        at_ns=at_ns,
    )


def _foreign() -> BurstlineError:
    return Unavailable(
        "the request is bound to another model fingerprint than this worker's", code="fingerprint_mismatch"
    )


def _poison(vain: int) -> BurstlineError:
    return BurstlineError(f"{vain} attempts began, and none ended or got further", code="poison")
