"""Log lines: trace ids in, secrets out."""

from __future__ import annotations

import asyncio
import io
import json
import logging
from collections.abc import Iterator
from typing import Literal

import pytest

from shared import logs

log = logging.getLogger("burstline.test")


@pytest.fixture
def output() -> Iterator[io.StringIO]:
    root = logging.getLogger()
    level, handlers = root.level, list(root.handlers)
    yield io.StringIO()
    root.handlers[:] = handlers
    root.setLevel(level)


def test_text_and_trace_id(output: io.StringIO) -> None:
    logs.setup("worker", stream=output)
    logs.bind_trace("")
    log.info("plain")
    log.info("given", extra={"trace_id": "abc"})
    plain, given = output.getvalue().splitlines()
    assert "worker burstline.test: plain" in plain
    assert "trace=" not in plain
    assert given.endswith("given trace=abc")


def test_json_lines_parse_and_hold_extras(output: io.StringIO) -> None:
    logs.setup("worker", style="json", stream=output)
    try:
        raise KeyError("x")
    except KeyError:
        log.exception("bad\nthing", extra={"trace_id": "abc", "attempt": 2})
    (line,) = output.getvalue().splitlines()
    entry = json.loads(line)
    assert (entry["message"], entry["trace_id"], entry["attempt"]) == ("bad\nthing", "abc", 2)
    assert (entry["service"], entry["level"]) == ("worker", "error")
    assert "KeyError" in entry["exception"]


def test_setting_up_again_replaces_and_does_not_double(output: io.StringIO) -> None:
    logs.setup("a", stream=io.StringIO())
    logs.setup("b", level="warning", stream=output)
    log.info("quiet")
    log.warning("once")
    assert len(output.getvalue().splitlines()) == 1


async def test_a_bound_trace_is_the_tasks_own(output: io.StringIO) -> None:
    logs.setup("a", stream=output)

    async def task(name: str) -> None:
        logs.bind_trace(name)
        await asyncio.sleep(0)
        log.info("from %s", name)

    await asyncio.gather(asyncio.create_task(task("one")), asyncio.create_task(task("two")))
    for line in output.getvalue().splitlines():
        assert line.split("from ")[1] in ("one trace=one", "two trace=two")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("key bl_live_Abc-123456 used", "key bl_*** used"),
        ("Authorization: Bearer sk.abc-1/2=", "Authorization: Bearer ***"),
        ("to postgresql://user:p%40ss@host:5432/db", "to postgresql://***@host:5432/db"),
        ("to nats://token@host:4222", "to nats://***@host:4222"),
        ("see https://host/a@b and mail a@b", "see https://host/a@b and mail a@b"),
        ("table_bl_x and xbl_abcdef", "table_bl_x and xbl_abcdef"),
    ],
)
@pytest.mark.parametrize("style", ["text", "json"])
def test_secrets_are_blotted_out(output: io.StringIO, text: str, shown: str, style: str) -> None:
    logs.setup("a", style=style, stream=output)  # type: ignore[arg-type]
    log.info("%s", text)
    assert shown in output.getvalue()


def test_secrets_in_a_traceback_are_blotted_out(output: io.StringIO) -> None:
    logs.setup("a", stream=output)
    try:
        raise OSError("no route to nats://u:hunter2@h")
    except OSError:
        log.exception("failed")
    assert "hunter2" not in output.getvalue()


@pytest.mark.parametrize("style", ["text", "json"])
def test_the_last_word_is_the_newest_critical_record(
    output: io.StringIO, style: Literal["text", "json"]
) -> None:
    logs.setup("gateway", style=style, stream=output)
    assert logs.last_word(output.getvalue()) is None
    log.critical("a first fault")
    log.critical("the gateway cannot run: %s", "/models/m/tokenizer.json: what: ever")
    log.warning("CRITICAL is only a word here")
    text = f"{output.getvalue()}thread panicked at CRITICAL\n{{no json\n"
    assert logs.last_word(text) == "the gateway cannot run: /models/m/tokenizer.json: what: ever"
