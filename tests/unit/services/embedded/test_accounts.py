"""Whether another user can walk to a folder, from its mode bits."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.embedded.accounts import Account, can_reach

STRANGER = Account(uid=987_654, gid=987_654)


@pytest.fixture
def open_folder(tmp_path: Path) -> Path:
    """A folder whose parents are opened in a copy of the question: only `inner` and `outer` decide."""
    inner = tmp_path / "outer" / "inner"
    inner.mkdir(parents=True)
    return inner


def test_a_closed_parent_stops_a_stranger_but_not_its_owner(
    open_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "services.embedded.accounts.Path.parents", property(lambda path: [open_folder, open_folder.parent])
    )
    open_folder.chmod(0o755)
    open_folder.parent.chmod(0o755)
    assert can_reach(STRANGER, open_folder / "file")
    open_folder.parent.chmod(0o700)
    assert not can_reach(STRANGER, open_folder / "file")
    owner = open_folder.stat()
    assert can_reach(Account(uid=owner.st_uid, gid=owner.st_gid), open_folder / "file")
