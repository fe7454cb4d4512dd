"""Whatever is lost, doubled, delayed, reordered or refused on the way: a reader relays the exact stream and ends once."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from hypothesis import event, given, settings
from hypothesis import strategies as st

from shared.protocol import stream
from shared.protocol.messages import (
    ChoiceEnd,
    Frame,
    PromptScores,
    SpecTelemetry,
    Started,
    StreamMessage,
    Terminal,
    TokenLogprobs,
    pack_tokens,
)
from shared.protocol.stream import (
    Alarm,
    Claimed,
    Emit,
    End,
    ReadJournal,
    ReadLast,
    Scored,
    Step,
    StreamState,
)

REQUEST = "r"


def truth(choice: int, length: int) -> tuple[int, ...]:
    """The one stream of a choice."""
    return tuple((choice + 1) * 1000 + index for index in range(length))


def started(attempt: int, offsets: tuple[int, ...], worker: str = "w", *, scored: int = 0) -> Started:
    return Started(
        request_id=REQUEST,
        attempt=attempt,
        worker_id=worker,
        fingerprint="f",
        cached_tokens=0,
        resumed_offsets=offsets,
        resumed_scores=scored,
        at_ns=0,
    )


def worth(entry: int) -> TokenLogprobs:
    """What the prompt's token `entry + 1` is worth."""
    return TokenLogprobs(token=5000 + entry, logprob=-float(entry), top=())


def scores(attempt: int, offset: int, count: int) -> PromptScores:
    entries = tuple(worth(entry) for entry in range(offset, offset + count))
    return PromptScores(request_id=REQUEST, attempt=attempt, offset=offset, entries=entries)


def frame(
    attempt: int, choice: int, offset: int, tokens: tuple[int, ...], *, logprobs: bool = False
) -> Frame:
    return Frame(
        request_id=REQUEST,
        attempt=attempt,
        choice=choice,
        offset=offset,
        tokens=pack_tokens(tokens),
        logprobs=tuple(TokenLogprobs(token=t, logprob=-1.0, top=()) for t in tokens) if logprobs else None,
    )


def terminal(attempt: int, lengths: tuple[int, ...], *, scored: int = 0) -> Terminal:
    ends = tuple(
        ChoiceEnd(
            choice=choice,
            finish="stop",
            completion_tokens=length,
            emitted_tokens=length,
            stop_id=None,
            spec=SpecTelemetry(rounds=1, drafted=0, accepted=0),
        )
        for choice, length in enumerate(lengths)
    )
    return Terminal(
        request_id=REQUEST,
        tenant="t",
        key_id="k",
        model="m",
        attempt=attempt,
        worker_id="w",
        ends=ends,
        failure=None,
        cancel_reason=None,
        prompt_tokens=1 + scored,
        scored_tokens=scored,
        cached_tokens=0,
        completion_tokens=sum(lengths),
        cache_decision="miss",
        reuse="prefill",
        exact=True,
        queue_ns=0,
        prime_ns=0,
        decode_ns=0,
        at_ns=0,
    )


@dataclass
class Published:
    """A message on the subject; `sequence` 0 = the journal refused it."""

    message: StreamMessage
    sequence: int


@dataclass
class Reader:
    """Drives the machine as a service does, on a journal of which only a part is visible yet."""

    state: StreamState
    journal: list[Published]
    visible: int = 0
    emitted: dict[int, list[int]] = field(default_factory=dict)
    scored: list[TokenLogprobs] = field(default_factory=list)
    ends: int = 0
    alarms: list[str] = field(default_factory=list)
    reads: int = 0

    def do(self, result: Step) -> None:
        waiting = deque([result])
        while waiting:
            self.state, actions = waiting.popleft()
            for action in actions:
                waiting.extend(self.act(action))

    def act(self, action: stream.Action) -> list[Step]:
        match action:
            case Scored():
                assert self.ends == 0
                assert not self.emitted, "a token came before the prompt was told"
                assert action.offset == len(self.scored)
                self.scored.extend(action.entries)
            case Emit():
                assert self.ends == 0
                tokens = self.emitted.setdefault(action.choice, [])
                assert action.offset == len(tokens)
                assert action.logprobs is None or [one.token for one in action.logprobs] == list(
                    action.tokens
                )
                tokens.extend(action.tokens)
            case End():
                self.ends += 1
            case Alarm():
                self.alarms.append(action.reason)
            case ReadJournal():
                return self.read(action)
            case ReadLast():
                self.wait(action.delay_s)
                last = self.seen()[-1] if self.seen() else None
                return [
                    stream.confirm(self.state, last.message if last else None, last.sequence if last else 0)
                ]
            case Claimed():
                pass
        return []

    def read(self, action: ReadJournal) -> list[Step]:
        self.reads += 1
        self.wait(action.delay_s)
        for stored in self.seen():
            if stored.sequence > action.after:
                self.do(stream.step(self.state, stored.message, stored.sequence))
        return [stream.read_done(self.state)]

    def wait(self, delay_s: float) -> None:
        """Time passes: what was stored becomes visible."""
        if delay_s > 0:
            self.visible = len(self.journal)

    def seen(self) -> list[Published]:
        return self.journal[: self.visible]


@st.composite
def prompts(
    draw: st.DrawFn, attempt: int, scored: int, to_score: int, most: int
) -> list[tuple[PromptScores, bool]]:
    """What an attempt tells of the prompt, in at most `most` pieces, and whether the journal takes it: not from a worker
    that lost its claim."""
    told: list[tuple[PromptScores, bool]] = []
    for _ in range(most):
        count = min(draw(st.integers(1, 3)), to_score - scored)
        if count and attempt > 1 and draw(st.booleans()):
            told.append((scores(attempt - 1, draw(st.integers(0, scored)), 1), False))
        if count:
            told.append((scores(attempt, scored, count), True))
            scored += count
    return told


@st.composite
def histories(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Published]]:
    """What is published, in order: some attempts, the last of which ends; among them what the journal refuses. The
    prompt is told first, if anything is wanted of it."""
    lengths = tuple(draw(st.lists(st.integers(0, 12), min_size=1, max_size=3)))
    to_score, scored = draw(st.sampled_from([0, 0, 1, 5])), 0
    offsets = [0] * len(lengths)
    published: list[Published] = []
    sequence = draw(st.integers(1, 50))
    with_logprobs = draw(st.booleans())

    def store(message: StreamMessage) -> None:
        nonlocal sequence
        published.append(Published(message, sequence))
        sequence += draw(st.integers(1, 3))

    def burst(attempt: int, choice: int, offset: int) -> Frame:
        count = draw(st.integers(1, 4))
        tokens = truth(choice, lengths[choice])[offset : offset + count]
        return frame(attempt, choice, offset, tokens, logprobs=with_logprobs)

    attempts = draw(st.integers(1, 3))
    for attempt in range(1, attempts + 1):
        store(started(attempt, tuple(offsets), scored=scored))
        most = to_score if attempt == attempts else draw(st.integers(0, 3))
        for told, taken in draw(prompts(attempt, scored, to_score, most)):
            if taken:
                store(told)
                scored += len(told.entries)
            else:
                published.append(Published(told, 0))
        left = (
            []
            if scored < to_score
            else [choice for choice in range(len(lengths)) if offsets[choice] < lengths[choice]]
        )
        steps = sum(lengths) if attempt == attempts else draw(st.integers(0, 4))
        while left and steps:
            steps -= 1
            choice = draw(st.sampled_from(left))
            message = burst(attempt, choice, offsets[choice])
            store(message)
            offsets[choice] += len(message.tokens) // 4
            left = [one for one in left if offsets[one] < lengths[one]]
            match draw(st.integers(0, 9)):
                case 0:  # a worker that lost the race for a later claim
                    loser = started(attempt + 1, tuple(offsets), "loser", scored=scored)
                    published.append(Published(loser, 0))
                case 1 if attempt > 1:  # one that does not know yet that it lost its claim
                    old = draw(st.integers(0, lengths[choice]))
                    published.append(Published(burst(attempt - 1, choice, old), 0))
                case 2 if attempt > 1:
                    published.append(Published(terminal(attempt - 1, lengths, scored=to_score), 0))
    store(terminal(attempts, lengths, scored=to_score))
    return lengths, published


def begin(lengths: tuple[int, ...], published: list[Published]) -> StreamState:
    """A reader's state, who knows what was asked for."""
    end = published[-1].message
    assert isinstance(end, Terminal)
    return stream.begin(REQUEST, choices=len(lengths), max_tokens=12, to_score=end.scored_tokens)


@given(history=histories(), data=st.data())
@settings(deadline=None, max_examples=300)
def test_c2_any_delivery_gives_the_exact_stream_once(
    history: tuple[tuple[int, ...], list[Published]], data: st.DataObject
) -> None:
    lengths, published = history
    reader = Reader(begin(lengths, published), [one for one in published if one.sequence])
    order = list(range(len(published)))
    for _ in range(data.draw(st.integers(0, 3), label="swaps")):
        at = data.draw(st.integers(0, max(0, len(order) - 2)))
        order[at : at + 2] = reversed(order[at : at + 2])
    for index in order:
        stored = sum(1 for one in published[: index + 1] if one.sequence)
        reader.visible = max(reader.visible, stored - data.draw(st.integers(0, 2), label="lag"))
        for _ in range(data.draw(st.sampled_from([0, 1, 1, 1, 2]), label="copies")):
            reader.do(stream.step(reader.state, published[index].message))
        if data.draw(st.integers(0, 9), label="ask") == 0:
            reader.do(stream.ask(reader.state))
    event("ended live" if reader.ends else "ended by asking")
    reader.visible = len(reader.journal)
    reader.do(stream.ask(reader.state))
    assert reader.alarms == []
    assert reader.ends == 1
    assert {choice: tuple(tokens) for choice, tokens in reader.emitted.items()} == {
        choice: truth(choice, length) for choice, length in enumerate(lengths) if length
    }
    assert reader.scored == [worth(entry) for entry in range(reader.state.to_score)]
    assert reader.reads <= 8 * len(published) + 8


@given(history=histories())
@settings(deadline=None, max_examples=60)
def test_c2_the_journal_alone_gives_the_exact_stream(
    history: tuple[tuple[int, ...], list[Published]],
) -> None:
    """A reader that resumes (Last-Event-ID) hears nothing live."""
    lengths, published = history
    reader = Reader(begin(lengths, published), [one for one in published if one.sequence])
    reader.visible = len(reader.journal)
    reader.do(stream.ask(reader.state))
    assert reader.ends == 1
    assert reader.alarms == []
    assert [len(reader.emitted.get(choice, [])) for choice in range(len(lengths))] == list(lengths)
    assert len(reader.scored) == reader.state.to_score


@given(history=histories(), pick=st.integers(0, 200))
@settings(deadline=None, max_examples=60)
def test_a_journal_that_disagrees_with_what_was_relayed_raises_an_alarm(
    history: tuple[tuple[int, ...], list[Published]], pick: int
) -> None:
    """A token that was relayed live and is another in the journal (a refused frame) is never passed over."""
    lengths, published = history
    stored = [one for one in published if one.sequence]
    firsts = [one.message for one in stored if isinstance(one.message, Frame) and one.message.offset == 0]
    if not firsts:
        return
    right = firsts[pick % len(firsts)]
    reader = Reader(begin(lengths, published), stored, visible=len(stored))
    reader.do(stream.step(reader.state, started(1, (0,) * len(lengths))))
    reader.do(stream.step(reader.state, scores(1, 0, reader.state.to_score)))
    reader.do(stream.step(reader.state, frame(1, right.choice, 0, (999_999,))))
    for one in stored:
        reader.do(stream.step(reader.state, one.message, one.sequence))
    assert any("disagrees" in reason for reason in reader.alarms)
