"""Answers of /v1/completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from services.gateway.answer import Answer, Finish, Update
from services.gateway.choice import Delivered
from services.gateway.echo import PromptPiece
from services.gateway.formats import Extras, Format
from services.gateway.parsers.events import Content
from services.gateway.vocabulary import Vocabulary
from shared.protocol.messages import TokenLogprobs


class TextFormat(Format):
    """Pieces of text."""

    prefix = "cmpl"
    chunk_object = "text_completion"
    whole_object = "text_completion"

    def __init__(self, answer: Answer, vocabulary: Vocabulary, extras: Extras) -> None:
        super().__init__(answer, vocabulary, extras)
        count = answer.request.choices
        self._shift = len(answer.echo.text) if answer.echo is not None else 0
        self._prompt: list[PromptPiece] = []
        self._texts = [""] * count
        self._delivered: list[list[Delivered]] = [[] for _ in range(count)]
        self._finishes: list[Finish | None] = [None] * count

    def chunks(self, update: Update) -> list[dict[str, Any]]:
        if update.prompt is not None:
            return [self._choice(update.choice, update.prompt.text, (), None, [update.prompt])]
        text = _text(update)
        if not text and not update.delivered and update.finish is None:
            return []
        return [self._choice(update.choice, text, update.delivered, update.finish)]

    def add(self, update: Update) -> None:
        if update.prompt is not None:
            if update.choice == 0:  # the same for all
                self._prompt.append(update.prompt)
            return
        self._texts[update.choice] += _text(update)
        self._delivered[update.choice].extend(update.delivered)
        self._finishes[update.choice] = update.finish or self._finishes[update.choice]

    def choices(self) -> list[dict[str, Any]]:
        told = self.prompt_logprobs()
        extra = {} if told is None else {"prompt_logprobs": told}
        before = "".join(piece.text for piece in self._prompt)
        return [
            self._choice(index, before + text, self._delivered[index], self._finishes[index], self._prompt)
            | extra
            for index, text in enumerate(self._texts)
        ]

    def _choice(
        self,
        index: int,
        text: str,
        delivered: Sequence[Delivered],
        finish: Finish | None,
        prompt: Sequence[PromptPiece] = (),
    ) -> dict[str, Any]:
        return {
            "index": index,
            "text": text,
            "logprobs": self._logprobs(delivered, prompt),
            "finish_reason": finish,
            **self.token_ids(tuple(delivered)),
        }

    def _logprobs(
        self, delivered: Sequence[Delivered], prompt: Sequence[PromptPiece]
    ) -> dict[str, Any] | None:
        """The prompt's tokens, then the completion's; the first of the prompt has nothing before it that could tell."""
        most = self.answer.request.top_logprobs
        if most is None:
            return None
        known: list[tuple[int, TokenLogprobs | None, int]] = [
            place
            for piece in prompt
            for place in zip(piece.tokens, piece.scores or (), piece.offsets, strict=True)
        ]
        known += [
            (item.token, item.logprobs, self._shift + item.begin)
            for item in delivered
            if item.logprobs is not None
        ]
        return {
            "tokens": [self.token_text(token) for token, _, _ in known],
            "token_logprobs": [score and self.least(score.logprob) for _, score, _ in known],
            "top_logprobs": [score and self._top(score, most) for _, score, _ in known],
            "text_offset": [offset for _, _, offset in known],
        }

    def _top(self, score: TokenLogprobs, most: int) -> dict[str, float]:
        return {self.token_text(token): self.least(value) for token, value in score.top[:most]}


def _text(update: Update) -> str:
    return "".join(event.text for event in update.events if isinstance(event, Content))
