"""Model folders: templates wherever they stand, and faults that name the file."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from services.gateway.config import GatewaySettings
from services.gateway.model import ServedModel, load_model
from services.gateway.prompts import PromptMaker
from services.gateway.rendering import RenderLimits, render_chat
from services.gateway.schemas.chat import ChatRequest
from services.gateway.schemas.completions import CompletionRequest
from services.gateway.vocabulary import ModelFolderError
from shared.clock import SYSTEM, ManualClock
from shared.errors import InvalidRequest
from shared.telemetry import build
from tests.unit.services.gateway.vocabularies import SPECS, library, size

MISTRAL = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}{{ '<|turn|> ' + message['content'] }}"
    "{% else %}{% generation %}{{ ' ' + message['content'] }}{% endgeneration %}{{ eos_token }}{% endif %}{% endfor %}"
)
TOKENS = {"bos_token": {"content": "<s>"}, "eos_token": "</s>"}
CHAT = ChatRequest.model_validate(
    {
        "model": "m",
        "messages": [
            {"role": "user", "content": "hello"},
            {"role": "assistant", "content": "then low"},
            {"role": "user", "content": "the </s> low"},
        ],
    }
)


def folder(path: Path, kind: str = "mistral", **tokenizer: Any) -> Path:
    config = {"vocab_size": size(kind), "max_position_embeddings": 512, "eos_token_id": 2}
    for name, value in (
        ("config", config),
        ("tokenizer", SPECS[kind]),
        ("tokenizer_config", TOKENS | tokenizer),
    ):
        (path / f"{name}.json").write_text(json.dumps(value))
    return path


def rendered(model: ServedModel) -> list[int]:
    assert model.template is not None
    limits = RenderLimits(
        characters=10_000,
        window=512,
        longest=model.vocabulary.longest,
        deadline_ns=10**9,
        clock=ManualClock(),
    )
    date = datetime(2026, 2, 3, tzinfo=UTC)
    return render_chat(model.template, model.vocabulary, CHAT, tools=None, date=date, limits=limits).tokens


@pytest.mark.parametrize("kind", ["mistral", "llama-2", "gemma", "llama-3", "qwen"])
def test_a_chat_is_tokenised_as_the_library_does(tmp_path: Path, kind: str) -> None:
    """bos_token and eos_token are the folder's; what a caller spells as one is text."""
    tokens = rendered(load_model("m", folder(tmp_path, kind, chat_template=MISTRAL)))
    text = "<s><|turn|> hello then low</s><|turn|>"
    assert tokens[: tokens.index(2) + 2] == library(kind).encode(text, add_special_tokens=False).ids
    assert tokens.count(2) == 1, "the caller's </s> is text"


@pytest.mark.parametrize(
    "template", [MISTRAL, [{"name": "tool_use", "template": "x"}, {"name": "default", "template": MISTRAL}]]
)
def test_a_template_is_found_wherever_folders_keep_it(tmp_path: Path, template: object) -> None:
    beside = load_model("m", folder(tmp_path, chat_template=template))
    (tmp_path / "chat_template.jinja").write_text(MISTRAL)
    assert rendered(beside) == rendered(load_model("m", folder(tmp_path, chat_template="not this one")))


def test_a_template_that_is_none_names_its_file(tmp_path: Path) -> None:
    with pytest.raises(ModelFolderError, match=r"tokenizer_config\.json: chat template, line 2: .*endfor"):
        load_model("m", folder(tmp_path, chat_template="\n{% endfor %}"))
    (tmp_path / "chat_template.jinja").write_text("{{ 1 + }}")
    with pytest.raises(ModelFolderError, match=r"chat_template\.jinja: chat template, line 1"):
        load_model("m", folder(tmp_path))


async def test_a_chat_without_a_template_names_the_files_that_lack_it(tmp_path: Path) -> None:
    maker = PromptMaker(GatewaySettings(), build("gateway", None), SYSTEM)
    with pytest.raises(InvalidRequest, match=r"neither chat_template\.jinja nor .* tokenizer_config\.json"):
        await maker.make(load_model("m", folder(tmp_path)), CHAT, tools=None, parent=None)
    maker.close()


@pytest.mark.parametrize("text", ["hello", "<s>hello"])
async def test_a_raw_prompt_begins_with_the_vocabularys_opening_once(tmp_path: Path, text: str) -> None:
    maker, model = (
        PromptMaker(GatewaySettings(), build("gateway", None), SYSTEM),
        load_model("m", folder(tmp_path, "gemma")),
    )
    fields = CompletionRequest.model_validate({"model": "m", "prompt": text})
    prompt = await maker.make(model, fields, tools=None, parent=None)
    assert prompt.tokens == library("gemma").encode("hello").ids
    maker.close()


def test_what_gemma_folders_leave_out_of_their_config_is_known(tmp_path: Path) -> None:
    folder(tmp_path)
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "gemma3", "text_config": {"head_dim": 256}})
    )
    model = load_model("m", tmp_path)
    assert (model.window, model.vocabulary.size) == (131_072, 262_208)


@pytest.mark.parametrize("text", ["x", 1, True, [], [1]])
def test_a_text_config_of_another_kind_names_the_file(tmp_path: Path, text: object) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "text_config": text}))
    with pytest.raises(ModelFolderError, match=r"config\.json: text_config must be an object"):
        load_model("m", tmp_path)


async def test_a_prompt_with_a_token_that_the_model_has_not_is_refused(tmp_path: Path) -> None:
    """A tokenizer that was extended alone, as fine-tuned folders have it: such an id is never on the queue."""
    used = library("gemma").encode("hello").ids
    folder(tmp_path, "gemma")
    config = {"vocab_size": max(used), "max_position_embeddings": 512}
    (tmp_path / "config.json").write_text(json.dumps(config))
    maker = PromptMaker(GatewaySettings(), build("gateway", None), SYSTEM)
    fields = CompletionRequest.model_validate({"model": "m", "prompt": "hello"})
    with pytest.raises(InvalidRequest, match=f"token {max(used)}, and the model's vocabulary") as refusal:
        await maker.make(load_model("m", tmp_path), fields, tools=None, parent=None)
    assert refusal.value.param == "prompt"
    maker.close()
