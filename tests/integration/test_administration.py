"""The commands, against a real database (and NATS, for the audit)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from services import administration


@pytest.fixture
def database(migrated_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BURSTLINE_DATABASE_URL", migrated_url)


def run(app: typer.Typer, *arguments: str, status: int = 0) -> str:
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == status, result.output
    return result.output


@pytest.mark.usefixtures("database")
def test_a_tenant_its_key_and_its_limits() -> None:
    run(administration.tenant, "create", "acme", "--cache-bytes", "2GiB")
    key = run(administration.key, "create", "acme", "--name", "laptop").splitlines()[0]
    assert key.startswith("bl_")
    listed = run(administration.key, "list", "acme")
    assert key not in listed
    assert key[:11] in listed
    run(administration.key, "create", "acme")
    names = [row.split("\t")[2] for row in run(administration.key, "list", "acme").splitlines()[1:]]
    assert sorted(names) == ["-", "laptop"], "an empty cell would shift a table that is read by eye"
    run(administration.quota, "set", "acme", "--max-concurrent", "5")
    assert run(administration.quota, "show", "acme").splitlines()[1].split("\t") == [
        "acme",
        str(2 << 30),
        "0",
        "5",
    ]
    run(administration.quota, "set", "acme", "--max-concurrent", "0", "--cache-bytes", "1")
    assert run(administration.quota, "show", "acme").splitlines()[1].split("\t") == ["acme", "1", "0", "none"]
    run(administration.key, "revoke", key[:11])
    run(administration.tenant, "disable", "acme")
    assert not run(administration.tenant, "list").splitlines()[1].endswith("-")
    assert run(administration.entries, "delete", "acme") == "0 entries are out of use\n"
    assert len(run(administration.entries, "list", "acme").splitlines()) == 1


@pytest.mark.usefixtures("database")
def test_faults_are_one_line() -> None:
    assert "no tenant nobody" in run(administration.quota, "show", "nobody", status=1)
    assert "no such key" in run(administration.key, "revoke", "bl_nothing", status=1)


def test_without_a_database_or_a_stack_it_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("BURSTLINE_DATABASE_URL", raising=False)
    monkeypatch.setenv("BURSTLINE_DATA_DIR", str(tmp_path))
    assert "burstline up" in run(administration.tenant, "list", status=2)


@pytest.mark.usefixtures("database")
def test_audit_writes_its_evidence(
    session_nats_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BURSTLINE_NATS_URL", session_nats_url)
    run(administration.tenant, "create", "acme")
    path = tmp_path / "audit.json"
    assert "As promised: " in run(administration.audit, "--json", str(path))
    told = json.loads(path.read_text())
    assert set(told) == {"command", "version", "date", "device", "results", "bars"}
    assert told["results"]["tenants"][0]["tenant"] == "acme"
    assert all(bar["holds"] for bar in told["bars"])


@pytest.mark.usefixtures("database")
def test_audit_that_cannot_measure_exits_two(session_nats_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BURSTLINE_NATS_URL", session_nats_url)
    monkeypatch.setenv("BURSTLINE_DATABASE_URL", "postgresql://nobody:x@127.0.0.1:9/none")
    run(administration.audit, status=2)


@pytest.mark.parametrize(
    ("text", "size"), [("1", 1), ("4GiB", 4 << 30), ("512 MiB", 512 << 20), ("3kib", 3072)]
)
def test_sizes(text: str, size: int) -> None:
    assert administration.parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "1XiB", "-", "1.5GiB"])
def test_bad_sizes(text: str) -> None:
    with pytest.raises(typer.BadParameter):
        administration.parse_bytes(text)
