"""An answer as OpenAI's objects: what both endpoints share. The subclasses live in `chat_format` and `text_format`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Final

from services.gateway.answer import Answer, Update
from services.gateway.choice import Delivered
from services.gateway.vocabulary import Vocabulary
from shared.protocol.messages import TokenLogprobs

_LEAST_LOGPROB: Final = -9999.0
"""JSON has no infinity; OpenAI writes this."""


@dataclass(frozen=True, kw_only=True)
class Extras:
    """What goes out beside the text: the trace and the route are told, a usage chunk and token ids only when asked for."""

    trace_id: str
    route: str
    usage_chunk: bool
    token_ids: bool


class Format(ABC):
    """Turns updates into chunks, and all of them into one object."""

    prefix: str
    chunk_object: str
    whole_object: str

    def __init__(self, answer: Answer, vocabulary: Vocabulary, extras: Extras) -> None:
        self.answer: Final = answer
        self.vocabulary: Final = vocabulary
        self._extras: Final = extras

    @abstractmethod
    def chunks(self, update: Update) -> list[dict[str, Any]]:
        """The `choices` element of every chunk that `update` makes, in order."""

    @abstractmethod
    def add(self, update: Update) -> None:
        """Gather for the whole object."""

    @abstractmethod
    def choices(self) -> list[dict[str, Any]]:
        """The whole object's `choices`."""

    def chunk(self, choice: dict[str, Any] | None, *, last: bool = False) -> dict[str, Any]:
        """A chunk around one choice element; None = the usage chunk. The last one carries our own block."""
        found = self._head(self.chunk_object) | {"choices": [] if choice is None else [choice]}
        if self._extras.usage_chunk:
            found["usage"] = self.usage() if choice is None else None
        if last:
            found["burstline"] = self.telemetry()
        return found

    def whole(self) -> dict[str, Any]:
        """The non-streaming answer."""
        return self._head(self.whole_object) | {
            "choices": self.choices(),
            "usage": self.usage(),
            "burstline": self.telemetry(),
        }

    def _head(self, kind: str) -> dict[str, Any]:
        request = self.answer.request
        return {
            "id": f"{self.prefix}-{request.request_id}",
            "object": kind,
            "created": request.created_ns // 1_000_000_000,
            "model": request.model,
            "system_fingerprint": f"fp_{request.namespace.fingerprint[:16]}",
        }

    def usage(self) -> dict[str, Any]:
        """What was used, as OpenAI spells it."""
        usage = self.answer.usage()
        return {
            "prompt_tokens": usage.prompt,
            "completion_tokens": usage.completion,
            "total_tokens": usage.prompt + usage.completion,
            "prompt_tokens_details": {"cached_tokens": usage.cached},
            "completion_tokens_details": {"accepted_prediction_tokens": usage.accepted},
        }

    def telemetry(self) -> dict[str, Any]:
        """How the answer came to be. Times in milliseconds; without a terminal the worker's part is null."""
        request, terminal = self.answer.request, self.answer.terminal
        block: dict[str, Any] = {
            "trace_id": self._extras.trace_id,
            "request_id": request.request_id,
            "seed": request.sampling.seed,
            "drafter": request.speculation.drafter,
            "k": request.speculation.k,
            "drafter_asked": request.speculation.drafter,
            "route": self._extras.route,
        }
        if terminal is None:
            return block
        rounds = sum(end.spec.rounds for end in terminal.ends)
        accepted = sum(end.spec.accepted for end in terminal.ends)
        drafted = sum(end.spec.drafted for end in terminal.ends)
        if not drafted:  # whatever was asked: the worker has it not, or load, context or use were against it
            block |= {"drafter": "none", "k": 0}
        return block | {
            "rounds": rounds,
            "drafted": drafted,
            "accepted": accepted,
            "replayed": sum(end.spec.replayed or 0 for end in terminal.ends),
            # The token that the prime decides belongs to no verify: each verify gives its accepted drafts and one more.
            "tokens_per_verify": round((accepted + rounds) / rounds, 4) if rounds else None,
            "cache_decision": terminal.cache_decision,
            "reuse": "decode" if terminal.reuse == "decode" else "exact",
            "exact": terminal.exact,
            "worker": terminal.worker_id,
            "attempt": terminal.attempt,
            "queue_ms": terminal.queue_ns / 1e6,
            "prime_ms": terminal.prime_ns / 1e6,
            "decode_ms": terminal.decode_ns / 1e6,
        }

    # tokens

    def prompt_logprobs(self) -> list[dict[str, dict[str, Any]] | None] | None:
        """What `prompt_logprobs` asked for, as vLLM spells it: null for the first token, and of every other one the token
        itself and the likeliest ones by id. `rank` is null for a token that is not among those."""
        most = self.answer.tells_scores
        if most is None:
            return None
        return [None, *(self._ranked(scores, most) for scores in self.answer.prompt_scores)]

    def _ranked(self, scores: TokenLogprobs, most: int) -> dict[str, dict[str, Any]]:
        ranks = {token: rank for rank, (token, _) in enumerate(scores.top, 1)}
        told = dict([(scores.token, scores.logprob), *scores.top[:most]])
        return {
            str(token): {
                "logprob": self.least(logprob),
                "rank": ranks.get(token),
                "decoded_token": self.token_text(token),
            }
            for token, logprob in told.items()
        }

    def token_ids(self, delivered: tuple[Delivered, ...]) -> dict[str, Any]:
        """The `token_ids` member, if the caller asked for it."""
        return {"token_ids": [item.token for item in delivered]} if self._extras.token_ids else {}

    def token_text(self, token: int) -> str:
        """A token alone, as text; a piece of a character shows as U+FFFD."""
        return self.vocabulary.token_bytes(token).decode("utf-8", "replace")

    def entry(self, token: int, logprob: float) -> dict[str, Any]:
        """One token of a chat answer's log probabilities."""
        data = self.vocabulary.token_bytes(token)
        return {
            "token": data.decode("utf-8", "replace"),
            "logprob": max(logprob, _LEAST_LOGPROB),
            "bytes": list(data),
        }

    def chat_logprobs(self, logprobs: TokenLogprobs) -> dict[str, Any]:
        """One position: the token, and the likeliest ones."""
        top = [self.entry(token, logprob) for token, logprob in logprobs.top]
        return self.entry(logprobs.token, logprobs.logprob) | {"top_logprobs": top}

    def least(self, logprob: float) -> float:
        """A log probability that JSON can hold."""
        return max(logprob, _LEAST_LOGPROB)
