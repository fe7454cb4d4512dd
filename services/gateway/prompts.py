"""Prompts are made in a pool of threads: rendering and tokenising hold the processor, and the event loop must not wait.
A short one is made at once: it takes less than handing it to a thread, and far less than that does under load.

The caller's context travels into the thread (FR-122), and the span is told as a child of the request's.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Final, TypeVar

from services.gateway.config import GatewaySettings
from services.gateway.grammars import GrammarMaker, check_wanted, wanted
from services.gateway.model import ServedModel
from services.gateway.rendering import Prompt, RenderLimits, TookTooLong, render_chat
from services.gateway.schemas.chat import AssistantMessage, ChatRequest, Message
from services.gateway.schemas.completions import CompletionRequest
from services.gateway.schemas.fields import GenerationFields
from shared.clock import Clock
from shared.errors import InvalidRequest, Overloaded
from shared.telemetry import Parent, Telemetry

T = TypeVar("T")

_FEW_MESSAGES: Final = 16
_FEW_CHARACTERS: Final = 2048
_AT_ONCE_S: Final = 0.02
"""A short prompt that has not been made by then has a template that takes its time: it goes to a thread like the others."""


class PromptMaker:
    """Owns the pool."""

    def __init__(self, settings: GatewaySettings, telemetry: Telemetry, clock: Clock) -> None:
        self._settings: Final = settings
        self._telemetry: Final = telemetry
        self._clock: Final = clock
        self._grammars: Final = GrammarMaker(settings)
        self._pool: Final = ThreadPoolExecutor(settings.tokenizer_threads, thread_name_prefix="tokenizer")

    async def make(
        self, model: ServedModel, fields: GenerationFields, *, tools: object, parent: Parent
    ) -> Prompt:
        """The prompt of a validated request; `tools` as the caller spelt them.

        Raises:
            InvalidRequest: the template refused, or the prompt has no tokens, or one that the model has not.
            Overloaded: the pool did not come to it in time.
        """
        with self._telemetry.soon("render", parent, {"burstline.model": model.name}) as told:
            work = self._work(model, fields, tools)
            prompt = _at_once(work) if not tools and is_short(fields) else None
            if prompt is None:
                prompt = await self._in_time(partial(work, self._settings.render_timeout_s))
            told["burstline.prompt_tokens"] = len(prompt.tokens)
        param = "messages" if isinstance(fields, ChatRequest) else "prompt"
        if not prompt.tokens:
            raise InvalidRequest("the prompt has no tokens", param="prompt")
        if (
            most := max(prompt.tokens)
        ) >= model.vocabulary.size:  # folders whose tokenizer was extended alone
            raise InvalidRequest(
                f"{param}: the tokenizer of {model.name} writes part of this as token {most}, and the model's vocabulary "
                f"ends at {model.vocabulary.size - 1}",
                param=param,
            )
        return prompt

    async def grammar(
        self, model: ServedModel, fields: GenerationFields, *, tools: object, prompt: Prompt
    ) -> str | None:
        """The grammar of a request whose answer has to follow one.

        Raises:
            InvalidRequest: it cannot be followed; names the field.
            Overloaded: the pool did not come to it in time.
        """
        want = wanted(fields, tools)
        if want is None:
            return None
        check_wanted(fields, model)
        return await self._in_time(partial(self._grammars.make, want, model, prompt.tokens))

    async def _in_time(self, work: Callable[[], T]) -> T:
        try:
            async with asyncio.timeout(2 * self._settings.render_timeout_s):
                return await self._in_pool(work)
        except TimeoutError:
            raise Overloaded("too many prompts wait for rendering") from None

    async def _in_pool(self, work: Callable[[], T]) -> T:
        context = contextvars.copy_context()
        return await asyncio.get_running_loop().run_in_executor(self._pool, context.run, work)

    def _work(self, model: ServedModel, fields: GenerationFields, tools: object) -> Callable[[float], Prompt]:
        """What makes the prompt, within so many seconds. The date is the one of this moment, whenever a thread comes to it
        (C1.7)."""
        date = self._clock.now()
        if isinstance(fields, ChatRequest):
            template = model.template
            if template is None:
                raise InvalidRequest(
                    f"model {model.name} has no chat template: its folder has neither chat_template.jinja nor a "
                    "chat_template in tokenizer_config.json",
                    param="model",
                )
            return lambda within_s: render_chat(
                template,
                model.vocabulary,
                fields,
                tools=tools,
                date=date,
                limits=self._limits(model, within_s),
            )
        if isinstance(fields, CompletionRequest):
            prompt = fields.single_prompt()
            return lambda within_s: _raw(model, prompt, self._limits(model, within_s))
        raise TypeError(type(fields).__name__)

    def _limits(self, model: ServedModel, within_s: float) -> RenderLimits:
        return RenderLimits(
            characters=self._settings.max_rendered_characters,
            window=model.window,
            longest=model.vocabulary.longest,
            deadline_ns=self._clock.monotonic_ns() + int(within_s * 1e9),
            clock=self._clock,
        )

    def close(self) -> None:
        """End the pool; what runs in it ends by its own limits."""
        self._pool.shutdown(wait=False, cancel_futures=True)


def _at_once(work: Callable[[float], Prompt]) -> Prompt | None:
    """A short prompt; None when it is not made in a moment."""
    try:
        return work(_AT_ONCE_S)
    except TookTooLong:
        return None


def is_short(fields: GenerationFields) -> bool:
    """Whether a prompt is made in a fraction of a millisecond: few messages of few characters, or few ids."""
    if isinstance(fields, ChatRequest):
        return len(fields.messages) <= _FEW_MESSAGES and sum(map(_size, fields.messages)) <= _FEW_CHARACTERS
    if isinstance(fields, CompletionRequest):
        return len(fields.single_prompt()) <= _FEW_CHARACTERS
    return False


def _size(message: Message) -> int:
    """Characters of a message, and more than allowed for one that is not plain text."""
    if isinstance(message, AssistantMessage) and (
        message.tool_calls or message.reasoning_content is not None
    ):
        return _FEW_CHARACTERS + 1
    return len(message.content) if isinstance(message.content, str) else _FEW_CHARACTERS + 1


def _raw(model: ServedModel, prompt: str | list[int], limits: RenderLimits) -> Prompt:
    """A raw prompt: ids as they are, text with its control tokens and the vocabulary's opening."""
    if isinstance(prompt, list):
        return Prompt(tokens=prompt, stable=None)
    limits.check(len(prompt))
    vocabulary = model.vocabulary
    tokens, opening = vocabulary.encode(vocabulary.control.split(prompt)), list(vocabulary.opening_ids)
    return Prompt(tokens=tokens if tokens[: len(opening)] == opening else opening + tokens, stable=None)
