"""How administration shows what it read."""

from __future__ import annotations

import sys

import pytest

from services.administration import aligned, show

COLUMNS = ("id", "name")
LONG = "k_" + "0123456789" * 12


def test_columns_are_aligned_and_no_cell_is_cut() -> None:
    assert aligned([COLUMNS, (LONG, "a"), ("k_1", "日本")]) == [
        f"id{' ' * (len(LONG) - 2)}  name",
        f"{LONG}  a",
        f"k_1{' ' * (len(LONG) - 3)}  日本",
    ]


def test_wide_characters_take_two_cells() -> None:
    assert aligned([("日本", "x"), ("abc", "y")]) == ["日本  x", "abc   y"]


def test_elsewhere_than_on_a_terminal_lines_are_tab_separated(capsys: pytest.CaptureFixture[str]) -> None:
    show(COLUMNS, [("k_1", None), ("k_2", "")])
    assert capsys.readouterr().out == "id\tname\nk_1\t-\nk_2\t-\n"


def test_on_a_terminal_it_is_aligned(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    show(COLUMNS, [("k_12345", "a")])
    assert capsys.readouterr().out == "id       name\nk_12345  a\n"
