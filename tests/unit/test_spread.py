"""Which process runs a test, and when."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.spread import LONGEST, ONE_STACK, Spread, turn

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("path", LONGEST)
def test_what_takes_longest_is_there(path: str) -> None:
    assert (ROOT / path).exists()


def test_a_file_stays_together_and_so_does_the_stack() -> None:
    scope = Spread._split_scope
    spread = object.__new__(Spread)
    assert scope(spread, "tests/unit/test_a.py::test_b[c::d]") == "tests/unit/test_a.py"
    assert scope(spread, f"{ONE_STACK}/test_a.py::test_b") == scope(spread, f"{ONE_STACK}/test_c.py::test_d")


def test_long_ones_go_first_in_the_order_in_which_they_stand() -> None:
    asked = ["tests/unit/test_a.py", f"{LONGEST[1]}::x", f"{ONE_STACK}/test_a.py", f"{LONGEST[1]}::a"]
    assert sorted(asked, key=turn) == [
        f"{ONE_STACK}/test_a.py",
        f"{LONGEST[1]}::x",
        f"{LONGEST[1]}::a",
        asked[0],
    ]
