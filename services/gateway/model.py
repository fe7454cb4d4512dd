"""A served model as the gateway knows it: vocabulary, template, window, ends and generation defaults. No weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import NoneType
from typing import Any, Final

from jinja2 import TemplateSyntaxError

from services.gateway.rendering import ChatTemplate
from services.gateway.vocabulary import ModelFolderError, Vocabulary
from shared.control import THINK, TOOLS
from shared.grammar import FolderTokens

_DEFAULTS: Final[Mapping[str, dict[str, Any]]] = {
    "gemma3": {"vocab_size": 262_208, "max_position_embeddings": 131_072}
}
"""What public folders leave out of their config, since transformers has it as a default."""


@dataclass(frozen=True, kw_only=True)
class GenerationDefaults:
    """What an absent field becomes: the folder's generation_config.json, or OpenAI's defaults without one."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


@dataclass(frozen=True, kw_only=True)
class ServedModel:
    """One model folder."""

    name: str
    vocabulary: Vocabulary
    template: ChatTemplate | None
    window: int
    stop_ids: tuple[int, ...]
    defaults: GenerationDefaults
    created: int
    grammar_tokens: FolderTokens  #: the vocabulary as grammars are walked over it

    @property
    def calls_tools(self) -> bool:
        """Whether the vocabulary has the control tokens of tool calls."""
        return self.vocabulary.control.ids.keys() >= TOOLS

    def markers(self, *, tools: bool) -> frozenset[str]:
        """The control tokens that a chat answer's parser is told about."""
        wanted = THINK | TOOLS if tools else THINK
        return frozenset(wanted & self.vocabulary.control.ids.keys())

    def opens_thinking(self, prompt: list[int]) -> bool:
        """Whether the prompt ends inside a thinking block, as some generation headers do."""
        begin, end = (self.vocabulary.control.ids.get(text) for text in ("<think>", "</think>"))
        for token in reversed(prompt[-32:]):
            if token in (begin, end):
                return token == begin
        return False


def load_model(name: str, folder: Path) -> ServedModel:
    """Read a Hugging Face folder. Raises ModelFolderError, which names the file."""
    config = _json(folder / "config.json")
    kind = str(config.get("model_type"))
    text = config.get("text_config")
    if not isinstance(text, dict | NoneType):
        raise ModelFolderError(f"{folder / 'config.json'}: text_config must be an object, not {text!r}"[:200])
    config = next((more for name, more in _DEFAULTS.items() if kind.startswith(name)), {}) | (text or config)
    generation = _json(folder / "generation_config.json", optional=True)
    tokenizer = _json(folder / "tokenizer_config.json", optional=True)
    try:
        size, window = int(config["vocab_size"]), int(config["max_position_embeddings"])
    except (KeyError, TypeError, ValueError) as error:
        raise ModelFolderError(
            f"{folder / 'config.json'}: needs vocab_size and max_position_embeddings"
        ) from error
    vocabulary = Vocabulary.load(folder / "tokenizer.json", size=size)
    template = _template(folder, tokenizer)
    if template is not None:
        vocabulary.learn(template.texts)
    ends = generation.get("eos_token_id", config.get("eos_token_id"))
    return ServedModel(
        name=name,
        vocabulary=vocabulary,
        template=template,
        window=window,
        stop_ids=tuple(ends if isinstance(ends, list) else [] if ends is None else [ends]),
        defaults=_defaults(generation),
        created=int((folder / "config.json").stat().st_mtime),
        grammar_tokens=FolderTokens(folder, size),
    )


def _template(folder: Path, tokenizer: Mapping[str, Any]) -> ChatTemplate | None:
    file, source = folder / "chat_template.jinja", None
    if file.is_file():
        source = file.read_text(encoding="utf-8")
    else:
        file, source = folder / "tokenizer_config.json", _named_default(tokenizer.get("chat_template"))
    if source is None:
        return None
    names = ("bos_token", "eos_token", "pad_token", "unk_token")
    tokens = {name: _token_text(tokenizer[name]) for name in names if tokenizer.get(name) is not None}
    try:
        return ChatTemplate(source, tokens)
    except TemplateSyntaxError as error:
        raise ModelFolderError(f"{file}: chat template, line {error.lineno}: {error.message}") from error


def _named_default(value: object) -> str | None:
    """A template as older folders write it: the text, or a list of named ones, of which the default counts."""
    if isinstance(value, list):
        named = {item.get("name"): item.get("template") for item in value if isinstance(item, Mapping)}
        value = named.get("default")
    return value if isinstance(value, str) else None


def _token_text(value: Any) -> str:
    return str(value.get("content", "")) if isinstance(value, Mapping) else str(value)


def _defaults(generation: Mapping[str, Any]) -> GenerationDefaults:
    if generation.get("do_sample") is False:
        return GenerationDefaults(temperature=0.0)
    known = GenerationDefaults.__dataclass_fields__
    return GenerationDefaults(
        **{name: generation[name] for name in known if isinstance(generation.get(name), int | float)}
    )


def _json(file: Path, *, optional: bool = False) -> dict[str, Any]:
    if optional and not file.is_file():
        return {}
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelFolderError(f"{file}: {error}") from error
    if not isinstance(value, dict):
        raise ModelFolderError(f"{file}: not a JSON object")
    return value
