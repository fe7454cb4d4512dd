"""Answers of /v1/completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from services.gateway.answer import Answer, Finish, Update
from services.gateway.choice import Delivered
from services.gateway.formats import Extras, Format
from services.gateway.parsers.events import Content
from services.gateway.vocabulary import Vocabulary


class TextFormat(Format):
    """Pieces of text."""

    prefix = "cmpl"
    chunk_object = "text_completion"
    whole_object = "text_completion"

    def __init__(self, answer: Answer, vocabulary: Vocabulary, extras: Extras) -> None:
        super().__init__(answer, vocabulary, extras)
        count = answer.request.choices
        self._texts = [""] * count
        self._delivered: list[list[Delivered]] = [[] for _ in range(count)]
        self._finishes: list[Finish | None] = [None] * count

    def chunks(self, update: Update) -> list[dict[str, Any]]:
        text = _text(update)
        if not text and not update.delivered and update.finish is None:
            return []
        return [self._choice(update.choice, text, update.delivered, update.finish)]

    def add(self, update: Update) -> None:
        self._texts[update.choice] += _text(update)
        self._delivered[update.choice].extend(update.delivered)
        self._finishes[update.choice] = update.finish or self._finishes[update.choice]

    def choices(self) -> list[dict[str, Any]]:
        return [
            self._choice(index, text, self._delivered[index], self._finishes[index])
            for index, text in enumerate(self._texts)
        ]

    def _choice(
        self, index: int, text: str, delivered: Sequence[Delivered], finish: Finish | None
    ) -> dict[str, Any]:
        return {
            "index": index,
            "text": text,
            "logprobs": self._logprobs(delivered),
            "finish_reason": finish,
            **self.token_ids(tuple(delivered)),
        }

    def _logprobs(self, delivered: Sequence[Delivered]) -> dict[str, Any] | None:
        if self.answer.request.top_logprobs is None:
            return None
        known = [(item, item.logprobs) for item in delivered if item.logprobs is not None]
        return {
            "tokens": [self.token_text(item.token) for item, _ in known],
            "token_logprobs": [self.least(logprobs.logprob) for _, logprobs in known],
            "top_logprobs": [
                {self.token_text(token): self.least(value) for token, value in logprobs.top}
                for _, logprobs in known
            ],
            "text_offset": [item.begin for item, _ in known],
        }


def _text(update: Update) -> str:
    return "".join(event.text for event in update.events if isinstance(event, Content))
