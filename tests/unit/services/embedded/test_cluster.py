"""Where a cluster lives, decided without starting one."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.embedded import cluster


def test_a_normal_user_starts_beside_the_clusters_of_root_and_touches_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without an account to change to we are no root: the folders outside are another user's, often unreadable."""
    outside = tmp_path / "outside"
    stray = outside / "0123456789abcdef"
    stray.mkdir(parents=True)
    (stray / cluster.OWNER_FILE).write_text(str(tmp_path / "gone"), encoding="utf-8")
    monkeypatch.setattr(cluster, "server_account", lambda: None)

    place = cluster.settle(tmp_path / "data", outside)

    assert place.base == tmp_path / "data"
    assert place.account is None
    assert [path.name for path in outside.iterdir()] == [stray.name]
    assert (stray / cluster.OWNER_FILE).exists()
