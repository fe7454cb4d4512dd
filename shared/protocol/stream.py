"""The reader's side of a token stream: a pure state machine from messages to tokens, each exactly once (C2).

A reader hears `tok.<request>` live, where messages may be lost, doubled, or refused by the journal afterwards, and may
ask the journal, which holds the truth in order. It drives this module so:

    live message              -> step(state, message)
    ReadJournal(after)        -> step(state, message, sequence) for each stored message, ascending; then read_done(state)
    ReadLast()                -> confirm(state, the subject's last stored message, or None)
    quiet for long, or lost   -> ask(state)

and obeys the actions that come back. Rules:

- The first claim (attempt 1) is believed live; a later one only when the journal has it, for it may have been refused.
- Frames of an older attempt are dropped; frames of an attempt that is not known make the reader ask the journal.
- A claim tells after how many tokens of each choice it goes on; the journal must have told them, else `Alarm`.
- A gap makes the reader ask; an overlap is trimmed and must agree with what was relayed, else `Alarm`.
- While a read is under way live messages are dropped: the journal has them, or will have at the next read.
- A terminal is relayed once, when it is journalled and every token before it was relayed.
- Log probabilities of the prompt come before any token: a token that is heard before them makes the reader ask.

The state is bounded: what was relayed (at most `max_tokens` a choice, packed) and a few numbers. What is said of these
messages and actions stands in `shared.protocol.messages` and `shared.protocol.news`.
"""

from __future__ import annotations

from typing import Final, assert_never

import msgspec
from msgspec.structs import replace

from shared.protocol.messages import Frame, PromptScores, Started, StreamMessage, Terminal, unpack_tokens
from shared.protocol.news import Action, Alarm, Claimed, Emit, End, ReadJournal, ReadLast, Scored

_TOKEN_BYTES: Final = 4
_REPEATS: Final = (
    4  # reads in a row for one thing that was seen live and is not stored (it was refused, then)
)
_FIRST_DELAY_S: Final = 0.02

Step = tuple["StreamState", tuple[Action, ...]]

__all__ = [
    "Action",
    "Alarm",
    "Claimed",
    "Emit",
    "End",
    "ReadJournal",
    "ReadLast",
    "Scored",
    "Step",
    "StreamState",
    "ask",
    "begin",
    "confirm",
    "read_done",
    "step",
]


class StreamState(msgspec.Struct, frozen=True, kw_only=True):
    """What a reader knows. Make one with `begin`."""

    request_id: str
    max_tokens: int
    relayed: tuple[bytes, ...]  # a choice: packed tokens
    to_score: int  # prompt tokens whose log probabilities were asked for
    scored: int = 0  # of them relayed
    attempt: int = 0  # the newest that is believed; 0 = none
    sequence: int = 0  # the journal was read up to here
    reading: bool = False  # a ReadJournal is under way
    missing: bool = False  # something was heard that the journal has not told yet
    repeats: int = 0
    ended: bool = False

    def offset(self, choice: int) -> int:
        """Tokens of a choice relayed so far."""
        return len(self.relayed[choice]) // _TOKEN_BYTES


def begin(request_id: str, *, choices: int, max_tokens: int, to_score: int = 0) -> StreamState:
    """The state before anything was heard. `max_tokens` is a choice's, the request's own limit; `to_score` prompt tokens
    have log probabilities that were asked for."""
    return StreamState(
        request_id=request_id, max_tokens=max_tokens, relayed=(b"",) * choices, to_score=to_score
    )


def step(state: StreamState, message: StreamMessage, sequence: int = 0) -> Step:
    """Take a message: live (`sequence` 0) or read from the journal in order (its sequence)."""
    if state.ended:
        return state, ()
    if message.request_id != state.request_id:
        return state, (Alarm(reason="a message of another request"),)
    if sequence:
        return _stored(state, message, sequence)
    if state.reading:
        return replace(state, missing=True), ()
    return _live(state, message)


def read_done(state: StreamState) -> Step:
    """A ReadJournal is complete: everything that it returned has been stepped."""
    state = replace(state, reading=False)
    if not state.missing or state.ended:
        return replace(state, repeats=0), ()
    if state.repeats >= _REPEATS:  # it was refused: the journal will never have it
        return replace(state, missing=False, repeats=0), ()
    state = replace(state, missing=False, repeats=state.repeats + 1)
    return _read(state, delay_s=_FIRST_DELAY_S * 2**state.repeats)


def confirm(state: StreamState, message: StreamMessage | None, sequence: int = 0) -> Step:
    """Take the last stored message of the subject (None = nothing is stored)."""
    if state.ended or state.reading:
        return state, ()
    match message:
        case Terminal() if _complete(state, message):
            return _end(state, message)
        case Terminal():
            return _read(state)
        case Started() | PromptScores() | Frame() if sequence > state.sequence and _news(state, message):
            return _read(state)
        case _ if state.missing and state.repeats < _REPEATS:
            state = replace(state, repeats=state.repeats + 1)
            return state, (ReadLast(delay_s=_FIRST_DELAY_S * 2**state.repeats),)
        case _:
            return replace(state, missing=False, repeats=0), ()


def ask(state: StreamState) -> Step:
    """It has been quiet for long, or live messages are known to be lost: look at the journal."""
    if state.ended or state.reading:
        return state, ()
    return state, (ReadLast(),)


# ---- live ------------------------------------------------------------------------------------------------------------


def _live(state: StreamState, message: StreamMessage) -> Step:
    match message:
        case Started():
            return _claim_heard(state, message)
        case Frame() | PromptScores():
            if message.attempt < state.attempt:
                return state, ()
            if message.attempt > state.attempt:
                return _read(state)
            return _piece(state, message, stored=False)
        case Terminal():
            if 0 < message.attempt < state.attempt:
                return state, ()
            return replace(state, missing=True, repeats=0), (ReadLast(),)
        case _ as unreachable:
            assert_never(unreachable)


def _claim_heard(state: StreamState, message: Started) -> Step:
    """The first claim is believed; of another the journal must tell whether it held."""
    if message.attempt <= state.attempt:
        return state, ()
    if state.attempt == 0 and message.attempt == 1:
        return replace(state, attempt=1), (Claimed(started=message),)
    return _read(state)


def _read(state: StreamState, *, delay_s: float = 0.0) -> Step:
    return replace(state, reading=True), (ReadJournal(after=state.sequence, delay_s=delay_s),)


# ---- stored ----------------------------------------------------------------------------------------------------------


def _stored(state: StreamState, message: StreamMessage, sequence: int) -> Step:
    """A journalled message. The journal is the truth: its attempt is believed, its terminal ends the stream."""
    if sequence <= state.sequence:
        return state, ()
    state = replace(state, sequence=sequence)
    match message:
        case Started() if not _follows(state, message):
            return state, (Alarm(reason="a claim goes on after other tokens than its journal holds"),)
        case Started():
            if message.attempt <= state.attempt:
                return state, ()
            return replace(state, attempt=message.attempt), (Claimed(started=message),)
        case Frame() | PromptScores():
            return _piece(replace(state, attempt=max(state.attempt, message.attempt)), message, stored=True)
        case Terminal():
            state, actions = _end(state, message)
            if _complete(state, message) or not message.ends:
                return state, actions
            return state, (Alarm(reason="the terminal counts other tokens than its journal holds"), *actions)
        case _ as unreachable:
            assert_never(unreachable)


def _follows(state: StreamState, claim: Started) -> bool:
    """Whether a journalled claim goes on after tokens that the journal holds: all before it was read, so was relayed.
    More may have been relayed, from live frames that the journal refused."""
    offsets = claim.resumed_offsets
    if len(offsets) != len(state.relayed) or not 0 <= claim.resumed_scores <= state.scored:
        return False
    return all(0 <= offset <= state.offset(choice) for choice, offset in enumerate(offsets))


def _piece(state: StreamState, message: Frame | PromptScores, *, stored: bool) -> Step:
    """Relay what is new in a message of the believed attempt."""
    if isinstance(message, PromptScores):
        return _scores(state, message, stored=stored)
    if state.scored < state.to_score and not stored:
        return _read(state)
    return _frame(state, message, stored=stored)


def _scores(state: StreamState, scores: PromptScores, *, stored: bool) -> Step:
    if scores.offset < 0 or scores.offset + len(scores.entries) > state.to_score:
        return state, (Alarm(reason="log probabilities beyond the prompt"),)
    if scores.offset > state.scored:
        return (state, (Alarm(reason="the journal has a gap"),)) if stored else _read(state)
    new = scores.entries[state.scored - scores.offset :]
    if not new:
        return state, ()
    scored = Scored(offset=state.scored, entries=new)
    return replace(state, scored=state.scored + len(new), repeats=0), (scored,)


def _frame(state: StreamState, frame: Frame, *, stored: bool) -> Step:
    fault = _fault(state, frame)
    if fault is not None:
        return state, (Alarm(reason=fault),)
    have = state.relayed[frame.choice]
    start = frame.offset * _TOKEN_BYTES
    if start > len(have):
        if stored:
            return state, (Alarm(reason="the journal has a gap"),)
        return _read(state)
    known = have[start : start + len(frame.tokens)]
    if frame.tokens[: len(known)] != known:
        return state, (Alarm(reason="a frame disagrees with what was relayed"),)
    new = frame.tokens[len(known) :]
    if not new:
        return state, ()
    skipped = len(known) // _TOKEN_BYTES
    relayed = (*state.relayed[: frame.choice], have + new, *state.relayed[frame.choice + 1 :])
    emit = Emit(
        choice=frame.choice,
        offset=len(have) // _TOKEN_BYTES,
        tokens=unpack_tokens(new),
        logprobs=None if frame.logprobs is None else frame.logprobs[skipped:],
    )
    return replace(state, relayed=relayed, repeats=0), (emit,)


def _fault(state: StreamState, frame: Frame) -> str | None:
    """Why a frame cannot be one of this stream, or None."""
    count, rest = divmod(len(frame.tokens), _TOKEN_BYTES)
    if rest:
        return "a frame with part of a token"
    if not 0 <= frame.choice < len(state.relayed):
        return "a frame of a choice that was not asked for"
    if frame.offset < 0 or frame.offset + count > state.max_tokens:
        return "a frame beyond the token limit"
    if frame.logprobs is not None and len(frame.logprobs) != count:
        return "a frame with other logprobs than tokens"
    return None


# ---- the end ---------------------------------------------------------------------------------------------------------


def _end(state: StreamState, terminal: Terminal) -> Step:
    return replace(state, ended=True, reading=False, missing=False), (End(terminal=terminal),)


def _complete(state: StreamState, terminal: Terminal) -> bool:
    """Whether everything that a terminal counts has been relayed: of the prompt, and every token of every choice."""
    counted = {end.choice: end.emitted_tokens for end in terminal.ends}
    return terminal.scored_tokens == state.scored and all(
        counted.get(choice) == state.offset(choice) for choice in range(len(state.relayed))
    )


def _news(state: StreamState, message: Started | PromptScores | Frame) -> bool:
    """Whether the last stored message tells of something that was not relayed."""
    if message.attempt > state.attempt:
        return True
    if isinstance(message, PromptScores):
        return message.offset + len(message.entries) > state.scored
    if isinstance(message, Started) or not 0 <= message.choice < len(state.relayed):
        return False
    return message.offset + len(message.tokens) // _TOKEN_BYTES > state.offset(message.choice)
