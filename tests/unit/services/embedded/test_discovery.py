"""stack.json: found while the stack lives, nothing after a kill."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from services.embedded import StackInfo, discover
from services.embedded.discovery import FILE, announce, withdraw

INFO = StackInfo(
    nats_url="nats://a:b@127.0.0.1:1",
    database_url="postgresql://a:b@127.0.0.1:2/c",
    gateway_url="http://127.0.0.1:3",
    pids={"stack": os.getpid()},
    version="0",
)


def test_round_trip_private_and_withdrawn(tmp_path: Path) -> None:
    announce(tmp_path, INFO)
    assert discover(tmp_path) == INFO
    assert stat.S_IMODE((tmp_path / FILE).stat().st_mode) == 0o600
    withdraw(tmp_path)
    withdraw(tmp_path)
    assert discover(tmp_path) is None


def test_a_killed_stacks_file_says_nothing(tmp_path: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    announce(tmp_path, replace(INFO, pids={"stack": ended.pid}))
    assert discover(tmp_path) is None


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"nats_url": 1}', '{"pids": []}'])
def test_a_broken_file_says_nothing(tmp_path: Path, text: str) -> None:
    (tmp_path / FILE).write_text(text)
    assert discover(tmp_path) is None
