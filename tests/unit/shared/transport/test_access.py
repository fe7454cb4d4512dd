"""TLS files and a server that is not there: told by variable and place, in a line."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import pytest

from services.embedded.ports import free_port
from shared.config import CommonSettings, load
from shared.errors import Unavailable
from shared.transport import nats
from shared.transport.access import Access


@pytest.mark.parametrize(
    ("variables", "named"),
    [
        (("BURSTLINE_NATS_TLS_CA_FILE",), "BURSTLINE_NATS_TLS_CA_FILE"),
        (("BURSTLINE_NATS_TLS_CERT_FILE", "BURSTLINE_NATS_TLS_KEY_FILE"), "BURSTLINE_NATS_TLS_CERT_FILE"),
    ],
)
def test_a_tls_file_that_is_no_pem_is_told_by_its_variable(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, variables: tuple[str, ...], named: str
) -> None:
    file = tmp_path / "no.pem"
    file.write_text("nothing")
    for variable in variables:
        monkeypatch.setenv(variable, str(file))
    with pytest.raises(Unavailable, match=rf"{named}.*no\.pem"):
        Access.of(load(CommonSettings))


async def test_a_first_connection_that_waits_says_for_what_and_how_long(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(nats, "_QUIET_S", 0.01)
    url = f"nats://someone:hunter2@127.0.0.1:{free_port()}"
    with caplog.at_level(logging.WARNING), pytest.raises(Unavailable):
        await nats.connect(url, name="test", timeout=0.5)
    (told,) = [record.message for record in caplog.records if record.message.startswith("waiting for NATS")]
    assert "127.0.0.1" in told
    assert "0.5 s at most" in told
    assert "hunter2" not in told
    assert not [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
