"""FR-111 at the gateway: a worker dies where a stop string, a character or a call is half told, and another one tells the
rest. What the caller hears is what one worker would have said."""

from __future__ import annotations

import json

import httpx
import pytest

from tests.unit.services.gateway.line import Line, Script, Work, ids, running_line, says

TEXT = "One café 🐈 and then the END of it."


def handed_over(text: str, after: int) -> Script:
    """One worker tells the first `after` tokens, one by one, and dies; another one the rest."""

    async def script(work: Work) -> None:
        tokens = ids(text)
        await work.start()
        for token in tokens[:after]:
            await work.burst([token])
        work.attempt, work.worker.worker_id = 2, "w2"
        await work.start()
        if tokens[after:]:
            await work.burst(tokens[after:])
        await work.end("stop")

    return script


def heard(response: httpx.Response) -> tuple[str, str]:
    """The text of a stream, and its finish reason."""
    rows = [row.removeprefix("data: ") for row in response.text.splitlines() if row.startswith("data: ")]
    assert rows[-1] == "[DONE]"
    chunks = [json.loads(row) for row in rows[:-1]]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    return "".join(choice["delta"].get("content") or "" for choice in choices), choices[-1]["finish_reason"]


@pytest.mark.parametrize("stop", [None, ["the END of"]], ids=["whole", "stopped"])
async def test_fr_111_text_and_stop_are_the_same_wherever_the_worker_was_killed(
    stop: list[str] | None,
) -> None:
    fields = {"stream": True} | ({} if stop is None else {"stop": stop})
    async with running_line() as line:
        line.worker.script = says(TEXT)
        expected = heard(await line.chat(**fields))
        assert expected == (TEXT if stop is None else TEXT.partition(stop[0])[0], "stop")
        for after in range(len(ids(TEXT)) + 1):
            line.worker.script = handed_over(TEXT, after)
            assert heard(await line.chat(**fields)) == expected, f"killed after {after} tokens"


async def test_fr_111_usage_counts_every_token_once(line: Line) -> None:
    line.worker.script = says(TEXT)
    expected = (await line.chat()).json()["usage"]["completion_tokens"]
    line.worker.script = handed_over(TEXT, 5)
    answer = (await line.chat()).json()
    assert answer["usage"]["completion_tokens"] == expected
    assert answer["choices"][0]["message"]["content"] == TEXT
