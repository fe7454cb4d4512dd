"""Private files, the folder lock and the limits of logs."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from services.embedded.faults import EmbeddedFault
from services.embedded.files import FolderLock, limit_log, require_room, secret, tail, write_private


def test_private_files_are_replaced_whole_and_unreadable_to_others(tmp_path: Path) -> None:
    path = tmp_path / "value"
    write_private(path, "one")
    write_private(path, "two")
    assert path.read_text() == "two"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [item.name for item in tmp_path.iterdir()] == ["value"]


def test_a_secret_is_made_once(tmp_path: Path) -> None:
    first = secret(tmp_path / "password")
    assert len(first) == 32
    assert secret(tmp_path / "password") == first


def test_two_locks_on_one_folder_refuse_and_name_the_holder(tmp_path: Path) -> None:
    first, second = FolderLock(tmp_path), FolderLock(tmp_path)
    first.take()
    with pytest.raises(EmbeddedFault, match=r"already runs on .*process \d+"):
        second.take()
    assert not second.held
    first.release()
    second.take()
    second.release()


def test_no_room_says_how_much_and_where(tmp_path: Path) -> None:
    with pytest.raises(EmbeddedFault, match=r"The queue needs \d+ MiB, but only \d+ MiB are free"):
        require_room(tmp_path, 1 << 60, "The queue")


def test_a_log_over_its_limit_is_moved_while_its_writer_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "x.log"
    with path.open("ab", buffering=0) as writer:
        writer.write(b"old\n" * 100)
        limit_log(path, limit_bytes=100)
        writer.write(b"new\n")
    assert path.read_bytes() == b"new\n"
    assert (tmp_path / "x.log.1").read_bytes() == b"old\n" * 100
    assert tail(path) == "new"


def test_what_an_earlier_process_said_is_left_out_of_the_tail(tmp_path: Path) -> None:
    path = tmp_path / "x.log"
    path.write_text("earlier\n")
    began = path.stat().st_size
    with path.open("a") as writer:
        writer.write("now\n")
    assert tail(path, began=began) == "now"
    path.write_text("cut\n")
    assert tail(path, began=began) == "cut", "a log that was cut meanwhile is read from its start"


def test_the_tail_of_no_log_is_empty(tmp_path: Path) -> None:
    assert tail(tmp_path / "none.log") == ""
