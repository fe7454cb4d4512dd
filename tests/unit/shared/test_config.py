"""Settings: a bad or unknown variable stops the process with its name, and never shows a value."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import Field, SecretStr
from pydantic_settings import SettingsConfigDict

from shared.config import CommonSettings, Settings, load


class Gateway(Settings):
    model_config = SettingsConfigDict(env_prefix="BURSTLINE_GATEWAY_")

    port: int = Field(default=8000, ge=1, le=65535)
    models: list[str] = Field(default=[])
    auth_cache_s: float = 5.0


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    for name in list(os.environ):
        if name.upper().startswith("BURSTLINE_"):
            monkeypatch.delenv(name)


def faults(cls: type[Settings], capsys: pytest.CaptureFixture[str]) -> list[str]:
    """The lines that a refused start writes."""
    with pytest.raises(SystemExit) as caught:
        load(cls)
    assert caught.value.code == 2
    return capsys.readouterr().err.splitlines()


def test_defaults() -> None:
    common = load(CommonSettings)
    assert common.nats_url == "nats://127.0.0.1:4222"
    assert common.data_dir == Path.home() / ".burstline"
    assert common.database_url is None
    assert load(Gateway).port == 8000


def test_values_come_from_the_environment_and_empty_ones_count_as_unset(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("BURSTLINE_NATS_URL", "nats://a:1,nats://b:2")
    monkeypatch.setenv("BURSTLINE_OTLP_ENDPOINT", "")
    monkeypatch.setenv("BURSTLINE_DATA_DIR", "~/elsewhere")
    monkeypatch.setenv("BURSTLINE_GATEWAY_MODELS", '["a", "b"]')
    common = load(CommonSettings)
    assert common.nats_url == "nats://a:1,nats://b:2"
    assert common.otlp_endpoint is None
    assert common.data_dir == Path.home() / "elsewhere"
    assert load(Gateway).models == ["a", "b"]


def test_every_fault_is_one_line_with_the_variable_and_the_limit(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("BURSTLINE_GATEWAY_PORT", "70000")
    monkeypatch.setenv("BURSTLINE_GATEWAY_AUTH_CACHE_S", "soon")
    lines = faults(Gateway, capsys)
    assert len(lines) == 2
    assert any("BURSTLINE_GATEWAY_PORT" in line and "65535" in line for line in lines)
    assert any("BURSTLINE_GATEWAY_AUTH_CACHE_S" in line for line in lines)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("BURSTLINE_GATEWAY_PROT", "BURSTLINE_GATEWAY_PORT"),
        ("BURSTLINE_NATS_UR", "BURSTLINE_NATS_URL"),
        ("BURSTLINE_GATWAY_PORT", "BURSTLINE_GATEWAY_PORT"),
        ("burstline_gateway_prot", "BURSTLINE_GATEWAY_PORT"),
    ],
)
def test_an_unknown_variable_is_named_with_the_nearest_known_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str, hint: str
) -> None:
    monkeypatch.setenv(name, "1")
    (line,) = faults(Gateway, capsys)
    assert name.upper() in line
    assert f"did you mean {hint}?" in line


def test_an_unknown_variable_far_from_all_has_no_hint(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("BURSTLINE_ZZZ", "1")
    (line,) = faults(CommonSettings, capsys)
    assert line == "settings: BURSTLINE_ZZZ: unknown"


def test_variables_of_other_services_are_their_affair(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BURSTLINE_WORKER_ANYTHING", "1")
    load(Gateway)
    load(CommonSettings)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("BURSTLINE_NATS_URL", "http://user:hunter2@host"),
        ("BURSTLINE_NATS_URL", "nats://user:hunter2@"),
        ("BURSTLINE_NATS_URL", "nats://user:hunter2@host:99999999"),
        ("BURSTLINE_OTLP_ENDPOINT", "hunter2"),
        ("BURSTLINE_DATABASE_URL", "mysql://user:hunter2@host"),
        ("BURSTLINE_NATS_TLS_CA_FILE", "/nowhere/hunter2"),
        ("BURSTLINE_NATS_CREDENTIALS_FILE", "/nowhere/hunter2"),
        ("BURSTLINE_LOG_LEVEL", "hunter2"),
        ("BURSTLINE_GATEWAY_PORT", "hunter2"),
        ("BURSTLINE_GATEWAY_MODELS", "hunter2"),
    ],
)
def test_a_refused_value_is_never_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    lines = faults(Gateway if "GATEWAY" in name else CommonSettings, capsys)
    assert any(name in line for line in lines)
    assert "hunter2" not in "".join(lines)


def test_secrets_do_not_show_in_a_repr(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BURSTLINE_DATABASE_URL", "postgresql://u:hunter2@h/d")
    monkeypatch.setenv("BURSTLINE_NATS_URL", "nats://u:hunter2@h:1")
    monkeypatch.setenv("BURSTLINE_NATS_TOKEN", "hunter2")
    common = load(CommonSettings)
    assert "hunter2" not in repr(common)
    assert isinstance(common.database_url, SecretStr)


def test_settings_are_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        load(Gateway).port = 1  # type: ignore[misc]


@pytest.mark.parametrize("scheme", ["ws", "wss", "http"])
def test_nats_is_reached_over_tcp(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], scheme: str
) -> None:
    monkeypatch.setenv("BURSTLINE_NATS_URL", f"nats://a:1,{scheme}://b:2")
    (line,) = faults(CommonSettings, capsys)
    assert "BURSTLINE_NATS_URL" in line
    assert "nats, tls" in line
