"""The store of model folders: whole or not there, one writer at a time, and clear words about the disk."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from services.models.catalogue import KNOWN
from services.models.faults import ModelFault
from services.models.store import Store
from tests.waiting import until

MODEL = replace(KNOWN["smollm2"], room_bytes=1)
HALFWAY = """
import sys, time
from dataclasses import replace
from pathlib import Path
from services.models.catalogue import KNOWN
from services.models.store import Store

def make(scratch, folder):
    (folder / "config.json").write_text("{}")
    (scratch / "wheel").write_text("half")
    print("halfway", flush=True)
    time.sleep(600)

Store(Path(sys.argv[1])).add(replace(KNOWN["smollm2"], room_bytes=1), make)
"""


def _make(scratch: Path, folder: Path) -> None:
    (scratch / "wheel").write_bytes(b"w")
    (folder / "config.json").write_text("{}")


def _visible(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir() if not path.name.endswith(".lock"))


def test_added_once_listed_and_removed(tmp_path: Path) -> None:
    store = Store(tmp_path / "deep" / "models")
    assert (store.names(), store.remove("smollm2")) == ([], False)
    assert store.add(MODEL, _make) is True
    assert store.add(MODEL, lambda scratch, folder: pytest.fail("it is there")) is False
    assert store.names() == ["smollm2"]
    assert _visible(store.root) == ["smollm2"], "the scratch folder is gone"
    assert [path.name for path in store.path("smollm2").iterdir()] == ["config.json"]
    assert store.remove("smollm2") is True
    assert _visible(store.root) == []


def test_a_failure_leaves_nothing(tmp_path: Path) -> None:
    def fail(scratch: Path, folder: Path) -> None:
        _make(scratch, folder)
        raise ModelFault("the digest differs")

    with pytest.raises(ModelFault, match="the digest differs"):
        Store(tmp_path).add(MODEL, fail)
    assert _visible(tmp_path) == []


def test_killed_halfway_nothing_shows_and_the_next_one_clears_up(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", HALFWAY, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "halfway\n"
    process.send_signal(signal.SIGKILL)
    process.wait(30)
    process.stdout.close()
    store = Store(tmp_path)
    assert store.names() == []
    assert [name.startswith(".adding-smollm2-") for name in _visible(tmp_path)] == [True]
    assert store.add(MODEL, _make) is True
    assert _visible(tmp_path) == ["smollm2"]


async def test_two_at_once_make_it_once(tmp_path: Path) -> None:
    store, made, waited, go = Store(tmp_path), [], threading.Event(), threading.Event()

    def slow(scratch: Path, folder: Path) -> None:
        made.append(folder)
        assert go.wait(30)
        _make(scratch, folder)

    first = threading.Thread(target=store.add, args=(MODEL, slow))
    first.start()
    await until(lambda: bool(made))
    second = threading.Thread(target=store.add, args=(MODEL, slow), kwargs={"waits": waited.set})
    second.start()
    assert waited.wait(30)
    go.set()
    first.join(30)
    second.join(30)
    assert len(made) == 1
    assert store.names() == ["smollm2"]


def test_too_little_room_is_told_before_anything_is_fetched(tmp_path: Path) -> None:
    greedy = replace(MODEL, room_bytes=shutil.disk_usage(tmp_path).total * 2)
    with pytest.raises(ModelFault, match=r"needs \d+ MiB .* MiB are free at .*BURSTLINE_MODELS_DIR"):
        Store(tmp_path).add(greedy, lambda scratch, folder: pytest.fail("fetched"))


def test_a_disk_that_fills_up_meanwhile_is_told(tmp_path: Path) -> None:
    def full(scratch: Path, folder: Path) -> None:
        _make(scratch, folder)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder / "model.safetensors"))

    with pytest.raises(ModelFault, match=r"model\.safetensors: No space left on device.*Free some room"):
        Store(tmp_path).add(MODEL, full)
    assert _visible(tmp_path) == []


def test_a_root_that_is_a_file_is_told(tmp_path: Path) -> None:
    (tmp_path / "models").write_text("mine")
    with pytest.raises(ModelFault, match="cannot write"):
        Store(tmp_path / "models").add(MODEL, _make)


def test_what_is_no_model_is_told_before_anything_is_fetched_and_may_be_removed(tmp_path: Path) -> None:
    store = Store(tmp_path)
    (store.path(MODEL.name) / "rest").mkdir(parents=True)
    with pytest.raises(ModelFault, match=f"burstline model remove {MODEL.name}"):
        store.add(MODEL, lambda *_: pytest.fail("fetched"))
    assert store.remove(MODEL.name)
    assert store.add(MODEL, _make)
