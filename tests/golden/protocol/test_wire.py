"""The bytes of every message. A change is a new version: BURSTLINE_GOLDEN=1 writes the files of new versions only."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from shared.protocol.codec import MESSAGES, decode, encode
from tests.golden.protocol.examples import example

FOLDER = Path(__file__).parent


def golden_file(name: str) -> Path:
    return FOLDER / f"{name}.v{MESSAGES[name].VERSION}.hex"


@pytest.mark.parametrize("name", sorted(MESSAGES))
def test_r_protocol_the_bytes_of_a_version_never_change(name: str) -> None:
    message = example(MESSAGES[name])
    data = encode(message)
    file = golden_file(name)
    if os.environ.get("BURSTLINE_GOLDEN") == "1":
        file.write_text("\n".join(_lines(data.hex())) + "\n")
    recorded = bytes.fromhex(file.read_text())
    assert data == recorded, f"{name} has other bytes: raise its VERSION and run `make golden`"
    assert decode(recorded) == message


def test_every_golden_file_belongs_to_a_message() -> None:
    assert {file.name for file in FOLDER.glob("*.hex")} == {golden_file(name).name for name in MESSAGES}


def _lines(digits: str) -> list[str]:
    """Short lines, so that a diff shows where bytes changed."""
    return [digits[start : start + 96] for start in range(0, len(digits), 96)]
