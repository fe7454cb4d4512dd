"""Log probabilities of the prompt on their way into the journal (R-Q20): once, whole, before any token."""

from __future__ import annotations

import pytest

from services.gpu_worker.convert import logprobs_of
from services.gpu_worker.frames import MAX_FRAME_TOKENS, MAX_SCORE_VALUES, FrameBuffer, Scores
from shared.errors import EngineFault
from shared.protocol.codec import encode
from shared.protocol.messages import Frame, PromptScores, Started, Terminal, TokenLogprobs
from shared.protocol.subjects import JOURNAL
from tests.unit.services.gpu_worker.rig import PROMPT, SEED, World, make_request, until, world
from tests.unit.services.gpu_worker.scripted import stream, worth

EXPECTED = logprobs_of([worth(PROMPT, place) for place in range(1, len(PROMPT))])


async def scores(here: World) -> tuple[TokenLogprobs, ...]:
    """The journalled entries; they follow one another, and no token comes before the last."""
    found: tuple[TokenLogprobs, ...] = ()
    for message in await here.journalled():
        if isinstance(message, PromptScores):
            assert message.offset == len(found)
            found += message.entries
        elif isinstance(message, Frame):
            assert len(found) == len(PROMPT) - 1
    return found


@pytest.mark.parametrize("choices", [1, 3])
async def test_r_q20_a_prompt_is_scored_once_and_before_any_choice_speaks(choices: int) -> None:
    async with world() as here:
        running = await here.worker()
        await here.enqueue(make_request(clock=here.clock, prompt_logprobs=1, choices=choices))
        terminal = await here.terminal()
        assert await scores(here) == EXPECTED
        assert terminal.scored_tokens == len(PROMPT) - 1
        assert (await here.tokens(choices=choices))[0] == stream(PROMPT, SEED, 20)
        assert [one.prompt_logprobs for one in running.engine.submitted] == [1] + [None] * (choices - 1)
        assert not any(one.use_cache for one in running.engine.submitted)


async def test_r_q20_without_being_asked_nothing_is_scored() -> None:
    async with world() as here:
        await here.worker()
        await here.enqueue(make_request(clock=here.clock))
        assert (await here.terminal()).scored_tokens == 0
        assert not any(isinstance(message, PromptScores) for message in await here.journalled())


async def test_a_request_that_says_nothing_is_scored_and_ends() -> None:
    async with world() as here:
        await here.worker()
        await here.enqueue(make_request(clock=here.clock, prompt_logprobs=0, max_tokens=0))
        terminal = await here.terminal()
        assert await scores(here) == EXPECTED
        assert (terminal.ends[0].finish, terminal.completion_tokens) == ("length", 0)


@pytest.mark.parametrize("budget", [1, 3, 7, 9])
async def test_c2_a_second_worker_scores_on_without_a_gap_or_a_repeat(budget: int) -> None:
    """The first one dies in the middle of the prompt, at its end, and while it speaks."""
    async with world() as here:
        first = await here.worker("w1", budget=budget)
        await here.enqueue(make_request(clock=here.clock, prompt_logprobs=1))
        await until(lambda: first.engine.budget == 0)
        await until(lambda: here.server.streams[JOURNAL.name].last("tok.r1") is not None)
        await first.die()
        second = await here.worker("w2")
        here.clock.advance(16)
        terminal = await here.terminal()
        claim = next(one for one in reversed(await here.journalled()) if isinstance(one, Started))
        assert await scores(here) == EXPECTED
        assert terminal.scored_tokens == len(EXPECTED)
        assert await here.tokens() == (stream(PROMPT, SEED, 20),)
        (again,) = second.engine.submitted
        assert again.prompt_logprobs == (None if claim.resumed_scores == len(EXPECTED) else 1)


def entries(count: int, top: int = 0) -> list[TokenLogprobs]:
    best = tuple((rank, -1.0) for rank in range(top))
    return [TokenLogprobs(token=place, logprob=-1.0, top=best) for place in range(count)]


def test_tokens_wait_for_the_prompt() -> None:
    buffer = FrameBuffer((0, 0), to_score=3)
    buffer.add(1, 0, [7], None)
    assert buffer.take() is None
    buffer.score(0, entries(2))
    assert isinstance(buffer.take(), Scores)
    assert buffer.take() is None
    buffer.score(2, entries(1))
    last, token = buffer.take(), buffer.take()
    assert isinstance(last, Scores)
    assert last.offset == 2
    assert not isinstance(token, Scores)
    assert token is not None
    assert (token.choice, token.tokens) == (1, (7,))
    assert not buffer


def test_tokens_do_not_wait_for_a_prompt_of_which_nothing_more_will_be_told() -> None:
    buffer = FrameBuffer((0, 0), to_score=3)
    buffer.add(1, 0, [7], None)
    assert not buffer.prompt_over()
    assert buffer.take() is not None


def test_a_prompt_that_was_told_whole_is_over() -> None:
    buffer = FrameBuffer((0,), scored=1, to_score=3)
    buffer.score(0, entries(3))
    assert buffer.prompt_over()


async def test_an_engine_that_scores_a_part_and_ends_well_is_at_fault() -> None:
    async with world() as here:
        running = await here.worker(budget=1)
        await here.enqueue(make_request(clock=here.clock, prompt_logprobs=1))
        await until(lambda: bool(running.engine.runs) and running.engine.budget == 0)
        run = next(iter(running.engine.runs.values()))
        run.scored = len(PROMPT) - 1  # it believes that it told them
        await running.let_go()
        failure = (await here.terminal()).failure
        assert failure is not None
        assert failure.code == EngineFault.code


@pytest.mark.parametrize("offset", [0, 1, 3])
def test_entries_that_do_not_follow_are_an_engine_fault(offset: int) -> None:
    buffer = FrameBuffer((0,), to_score=9)
    buffer.score(0, entries(2))
    with pytest.raises(EngineFault, match="2 follow"):
        buffer.score(offset, entries(1))


@pytest.mark.parametrize(
    ("top", "most"), [(0, MAX_FRAME_TOKENS), (20, MAX_FRAME_TOKENS), (127, 128), (10**6, 1)]
)
def test_a_message_of_scores_stays_below_the_journals_limit(top: int, most: int) -> None:
    buffer = FrameBuffer((0,), to_score=600)
    buffer.score(0, entries(1, top) if top > MAX_SCORE_VALUES else entries(600, top))
    first = buffer.take()
    assert isinstance(first, Scores)
    assert len(first.entries) == most
    if top <= MAX_SCORE_VALUES:
        message = PromptScores(request_id="r", attempt=1, offset=0, entries=first.entries)
        assert len(encode(message)) < JOURNAL.max_msg_bytes / 2


async def test_a_fault_in_what_the_engine_tells_of_the_prompt_ends_the_request() -> None:
    async with world() as here:
        running = await here.worker(budget=1)
        await here.enqueue(make_request(clock=here.clock, prompt_logprobs=1))
        await until(lambda: bool(running.engine.runs) and running.engine.budget == 0)
        next(iter(running.engine.runs.values())).scored = 100  # it forgets some
        await running.let_go()
        terminal = await here.terminal()
        assert isinstance(terminal, Terminal)
        assert terminal.failure is not None
        assert terminal.failure.code == EngineFault.code
