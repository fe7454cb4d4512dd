"""Grammars: vocabularies that cannot be read and schemas that lead nowhere are refused in one line."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from llguidance import LLTokenizer

from shared import grammar
from shared.config import POCKET
from shared.grammar import FolderTokens, GrammarRefused, compile_grammar, read_tokens

SIZE = 4096


class PanicException(BaseException):
    """As pyo3 names the panic of a library in Rust."""


@pytest.mark.parametrize("text", ["[]", '"x"', "{}", "[" * 100_000, '{"added_tokens": ["x"]}', "{"])
def test_a_broken_tokenizer_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(GrammarRefused, match="cannot be constrained"):
        read_tokens(tmp_path, SIZE)


def _raise(error: BaseException) -> None:
    raise error


def test_a_panic_of_the_library_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        grammar, "LLTokenizer", lambda *_, **__: _raise(PanicException("index 7\nout of range"))
    )
    with pytest.raises(GrammarRefused, match=r"cannot be constrained: index 7$"):
        read_tokens(POCKET, SIZE)


def test_an_interrupt_is_no_panic(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar, "LLTokenizer", lambda *_, **__: _raise(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        read_tokens(POCKET, SIZE)


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#"},
        {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}},
        {"allOf": [{"$ref": "#"}]},
    ],
)
def test_a_schema_that_is_only_itself_is_refused(schema: dict[str, object]) -> None:
    with pytest.raises(GrammarRefused, match="no answer can begin"):
        compile_grammar(f"start: %json {json.dumps(schema)}", read_tokens(POCKET, SIZE))


def test_a_faulty_pattern_is_refused_with_the_reason() -> None:
    schema = {"type": "string", "pattern": "(a"}
    with pytest.raises(GrammarRefused, match=r"^regex parse error: unclosed group$"):
        compile_grammar(f"start: %json {json.dumps(schema)}", read_tokens(POCKET, SIZE))


class Reading:
    """In place of `read_tokens`: counts, and lets go when `allowed`."""

    def __init__(self, fault: str | None = None) -> None:
        self.count, self.begun, self.allowed = 0, threading.Event(), threading.Event()
        self._fault = fault

    def __call__(self, folder: Path, size: int) -> LLTokenizer:
        self.count += 1
        self.begun.set()
        assert self.allowed.wait(20.0)
        if self._fault is not None:
            raise GrammarRefused(self._fault)
        return read_tokens(folder, size)


def test_two_that_ask_at_once_read_a_vocabulary_once(monkeypatch: pytest.MonkeyPatch) -> None:
    reading = Reading()
    monkeypatch.setattr(grammar, "read_tokens", reading)
    tokens = FolderTokens(POCKET, SIZE)
    with ThreadPoolExecutor(2) as pool:
        asked = [pool.submit(tokens.get) for _ in range(2)]
        assert reading.begun.wait(20.0)
        reading.allowed.set()
        first, second = (each.result(20.0) for each in asked)
    assert first is second is tokens.get()
    assert reading.count == 1


def test_a_vocabulary_that_cannot_be_read_is_tried_once_and_refused_each_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reading = Reading("no such kind")
    reading.allowed.set()
    monkeypatch.setattr(grammar, "read_tokens", reading)
    tokens = FolderTokens(POCKET, SIZE)
    assert tokens.fault() == "no such kind"
    for _ in range(2):
        with pytest.raises(GrammarRefused, match="no such kind"):
            tokens.get()
    assert reading.count == 1
