"""Prompts are made in threads, in the caller's context; settings and model folders are read once."""

from __future__ import annotations

import asyncio
import contextvars
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import ValidationError

from services.gateway.config import GatewaySettings
from services.gateway.faults import validate
from services.gateway.model import load_model
from services.gateway.prompts import PromptMaker
from services.gateway.schemas.chat import ChatRequest
from services.gateway.vocabulary import ModelFolderError
from shared.clock import SYSTEM
from shared.config import POCKET
from shared.errors import InvalidRequest
from shared.telemetry import build

MARK: contextvars.ContextVar[str] = contextvars.ContextVar("mark", default="unset")


async def test_fr_122_the_callers_context_travels_into_the_thread() -> None:
    maker = PromptMaker(GatewaySettings(), build("gateway", None), SYSTEM)
    MARK.set("caller")
    assert await maker._in_pool(MARK.get) == "caller"
    maker.close()


async def test_a_template_that_takes_its_time_does_not_hold_the_event_loop(tmp_path: Path) -> None:
    folder = copy_of_pocket(tmp_path)
    loops = "{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}"
    (folder / "chat_template.jinja").write_text(loops)
    maker = PromptMaker(GatewaySettings(render_timeout_s=1.0), build("gateway", None), SYSTEM)
    fields = validate(ChatRequest, {"model": "m", "messages": [{"role": "user", "content": "Hi"}]})
    asked = asyncio.create_task(maker.make(load_model("m", folder), fields, tools=None, parent=None))
    begun_ns = SYSTEM.monotonic_ns()
    await asyncio.sleep(0)
    assert SYSTEM.monotonic_ns() - begun_ns < 500_000_000, "the event loop rendered"
    with pytest.raises(InvalidRequest, match="took too long"):
        await asked
    maker.close()


def test_models_are_named_by_folder_or_by_hand() -> None:
    settings = GatewaySettings(models="/a/b, name=/c/d")
    assert settings.model_folders() == {"b": Path("/a/b"), "name": Path("/c/d")}


def test_settings_are_strict() -> None:
    with pytest.raises(ValidationError):
        GatewaySettings(port=70000)
    with pytest.raises(ValidationError):
        GatewaySettings(keep_alive_s=0)


def copy_of_pocket(folder: Path) -> Path:
    for name in ("config.json", "tokenizer.json", "generation_config.json", "chat_template.jinja"):
        (folder / name).write_bytes((POCKET / name).read_bytes())
    return folder


def test_generation_defaults_of_a_sampling_model(tmp_path: Path) -> None:
    folder = copy_of_pocket(tmp_path)
    (folder / "generation_config.json").write_text(
        json.dumps({"do_sample": True, "temperature": 0.7, "top_p": 0.8, "top_k": 20, "eos_token_id": [2]})
    )
    model = load_model("m", folder)
    assert (model.defaults.temperature, model.defaults.top_p, model.defaults.top_k) == (0.7, 0.8, 20)
    assert model.stop_ids == (2,)


@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        ("tokenizer.json", {"decoder": {"type": "WordPiece"}}, "decoder WordPiece is not supported"),
        ("config.json", {"vocab_size": None}, "vocab_size"),
    ],
)
def test_folders_that_cannot_be_served_are_refused_by_file(
    tmp_path: Path, file: str, change: dict[str, object], message: str
) -> None:
    folder = copy_of_pocket(tmp_path)
    (folder / file).write_text(json.dumps(json.loads((folder / file).read_text()) | change))
    with pytest.raises(ModelFolderError, match=message):
        load_model("m", folder)


def broken_tokenizer(folder: Path, change: dict[str, object]) -> None:
    file = folder / "tokenizer.json"
    spec = json.loads(file.read_text())
    spec["model"] |= change
    file.write_text(json.dumps(spec))


PANICS = {"continuing_subword_prefix": "#" * 40}
"""Longer than a merge's second half: the library cuts it out of range."""


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (PANICS, "the tokenizers library fails on it: range end"),
        ({"merges": [["a", "such"]]}, "the tokenizers library refuses it: Token `such` out of vocabulary"),
        ({"vocab": None}, "not laid out as a tokenizer.json"),
    ],
)
def test_a_tokenizer_that_the_library_refuses_or_panics_on_is_told_by_its_file(
    tmp_path: Path, change: dict[str, object], message: str
) -> None:
    folder = copy_of_pocket(tmp_path)
    broken_tokenizer(folder, change)
    with pytest.raises(ModelFolderError, match=rf"tokenizer\.json: {message}"):
        load_model("m", folder)


def test_a_gateway_ends_with_a_line_and_a_status_when_the_library_panics(tmp_path: Path) -> None:
    folder = copy_of_pocket(tmp_path)
    broken_tokenizer(folder, PANICS)
    told = subprocess.run(
        [sys.executable, "-m", "services.gateway"],
        env={
            **os.environ,
            "BURSTLINE_GATEWAY_MODELS": f"m={folder}",
            "BURSTLINE_DATA_DIR": str(tmp_path / "data"),
        },
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert told.returncode == 1
    assert "the gateway cannot run: " in told.stderr.splitlines()[-1]
    assert str(folder / "tokenizer.json") in told.stderr.splitlines()[-1]


def test_a_folder_without_a_template_serves_completions_only(tmp_path: Path) -> None:
    folder = copy_of_pocket(tmp_path)
    (folder / "chat_template.jinja").unlink()
    assert load_model("m", folder).template is None


def test_a_prompt_that_opens_thinking_is_seen() -> None:
    model = load_model("pocket", POCKET)
    think, closed = (model.vocabulary.control.ids[text] for text in ("<think>", "</think>"))
    assert model.opens_thinking([5, think, 6])
    assert not model.opens_thinking([5, think, closed])
    assert not model.opens_thinking([5])
