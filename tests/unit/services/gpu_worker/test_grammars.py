"""A worker reads its vocabulary before it works, once; what it compiles is kept and bounded."""

from __future__ import annotations

from pathlib import Path

import pytest
from llguidance import LLTokenizer
from msgspec import UNSET

from services.gpu_worker.grammars import KEPT, Grammars
from shared import grammar
from shared.config import POCKET
from shared.grammar import GrammarRefused, read_tokens
from tests.engine_kit import prompt, request

CHOICES = [request(prompt(3))]
VOCAB = 4096


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Folders that were read."""
    folders: list[Path] = []

    def count(folder: Path, size: int) -> LLTokenizer:
        folders.append(folder)
        return read_tokens(folder, size)

    monkeypatch.setattr(grammar, "read_tokens", count)
    return folders


async def test_the_vocabulary_is_read_when_the_worker_gets_ready_and_never_again(read: list[Path]) -> None:
    grammars = Grammars(POCKET, VOCAB)
    assert await grammars.ready() is None
    assert read == [POCKET]
    for source in ('start: "a"', 'start: "b"', 'start: "a"'):
        (choice,) = await grammars.constrain(CHOICES, source)
        assert choice.grammar is not None
    assert read == [POCKET]


async def test_equal_sources_share_what_is_compiled_and_old_ones_go(read: list[Path]) -> None:
    grammars = Grammars(POCKET, VOCAB)
    ((first,), (again,)) = [await grammars.constrain(CHOICES, 'start: "a"') for _ in range(2)]
    assert first.grammar is again.grammar
    for place in range(KEPT):
        await grammars.constrain(CHOICES, f'start: "{place}"')
    (late,) = await grammars.constrain(CHOICES, 'start: "a"')
    assert late.grammar is not first.grammar
    assert await grammars.constrain(CHOICES, UNSET) is CHOICES


async def test_a_vocabulary_that_cannot_be_read_is_told_and_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    grammars = Grammars(tmp_path, VOCAB)
    assert "cannot be constrained" in str(await grammars.ready())
    with pytest.raises(GrammarRefused, match="cannot be constrained"):
        await grammars.constrain(CHOICES, 'start: "a"')
