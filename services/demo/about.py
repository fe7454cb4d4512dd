"""What the demo must know of the model that is served: which conversation fits it, and how long its generation header is."""

from __future__ import annotations

from dataclasses import dataclass

from services.demo.script import PLAIN_SCRIPT, POCKET_SCRIPT, Script
from services.embedded.faults import EmbeddedFault
from services.gateway.config import GatewaySettings
from services.gateway.model import ServedModel, load_model
from services.gateway.rendering import ChatTemplate, RenderLimits, render_chat
from services.gateway.schemas.chat import ChatRequest
from services.gateway.vocabulary import ModelFolderError
from shared.clock import SYSTEM
from shared.config import load


@dataclass(frozen=True, kw_only=True, slots=True)
class About:
    """Of one served model."""

    name: str
    script: Script
    header_tokens: int
    """Of the generation header: no part of what the next prompt begins with."""


def about(name: str) -> About:
    """Of the gateway's model of this name.

    Raises:
        EmbeddedFault: its folder cannot be served, or it has no chat template.
    """
    settings = load(GatewaySettings)
    try:
        model = load_model(name, settings.model_folders()[name])
    except ModelFolderError as error:
        raise EmbeddedFault(str(error)) from error
    if model.template is None:
        raise EmbeddedFault(f"model {name} has no chat template, and the demo is a chat")
    return About(
        name=name,
        script=POCKET_SCRIPT if model.calls_tools else PLAIN_SCRIPT,
        header_tokens=_header_tokens(model, model.template, settings),
    )


def _header_tokens(model: ServedModel, template: ChatTemplate, settings: GatewaySettings) -> int:
    request = ChatRequest.model_validate(
        {"model": model.name, "messages": [{"role": "user", "content": "Hello"}]}
    )
    limits = RenderLimits(
        characters=settings.max_rendered_characters,
        window=model.window,
        longest=model.vocabulary.longest,
        deadline_ns=SYSTEM.monotonic_ns() + int(settings.render_timeout_s * 1e9),
        clock=SYSTEM,
    )
    prompt = render_chat(template, model.vocabulary, request, tools=None, date=SYSTEM.now(), limits=limits)
    return len(prompt.tokens) - (prompt.stable or 0)
