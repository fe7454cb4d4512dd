"""Decides one token from one row of logits: a function of the row, the position and the stream's own history.

Order of operations, for every row alone (never for a block of rows):

    1. bias and masks    logit_bias added; ids outside `allowed_ids`, in `banned_ids`, those that the grammar does not
                         allow after the history, and stop ids while the completion is shorter than `min_tokens`,
                         become -inf. Where the grammar is complete and allows no other id, a stop id may come early
    2. penalties         repetition over prompt and completion (a positive logit is divided, another multiplied),
                         presence and frequency over the completion
    3. temperature       0 = the largest logit and nothing below applies
    4. min-p             drop ids less likely than min_p times the likeliest
    5. top-k             keep the k largest
    6. top-p             keep the shortest run of largest ids whose probability reaches top_p, at least one
    7. pick              argmax(logit + Gumbel(seed, id, position)), which samples the softmax of what is left

Ties pick the smallest id everywhere: sorts are by (logit descending, id ascending). History means the tokens before
the decided position, accepted tokens of the same burst included: the caller records each before it asks for the next.
Because the noise is a function of the position, the token does not depend on batch, drafts or burst splits (C1.4).

Log probabilities are of the raw row, before step 1, in float64.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kernels.sampling import device_pickable, gumbel
from services.gpu_worker.engine.card_logits import Ask, CardRow
from services.gpu_worker.engine.events import TokenLogprob
from services.gpu_worker.engine.grammar import Grammar
from services.gpu_worker.engine.requests import SamplingParams
from shared.errors import EngineFault

Values: TypeAlias = NDArray[np.float32]
Row: TypeAlias = Values | CardRow
"""A row of logits, in host memory or where a card made it."""
Mask: TypeAlias = NDArray[np.bool_]

NOISE_ROWS: Final = 16
"""Rows of noise kept a stream: a drafter and the target ask for the same few positions in turn."""


class TokenPicker:
    """The sampling rules and the history of one stream. Knows no session and no drafter."""

    def __init__(
        self,
        params: SamplingParams,
        *,
        vocab: int,
        prompt: Sequence[int],
        stop_ids: Iterable[int] = (),
        choice: int = 0,
        grammar: Grammar | None = None,
    ) -> None:
        self.params = params
        self._vocab = vocab
        self._prompt_len = len(prompt)
        self._choice = choice
        self._mask = _static_mask(params, vocab)
        self._stops = np.array(sorted(stop_ids), dtype=np.int64)
        self._bias = _bias(params, vocab)
        self._grammar = None if grammar is None else grammar.begin(vocab, self._stops.tolist())
        self._penalised = (
            params.repetition_penalty != 1.0
            or params.presence_penalty != 0.0
            or params.frequency_penalty != 0.0
        )
        self._in_prompt: Mask = np.zeros(vocab if self._penalised else 0, dtype=np.bool_)
        self._counts: NDArray[np.int32] = np.zeros(vocab if self._penalised else 0, dtype=np.int32)
        if self._penalised:
            self._in_prompt[list(prompt)] = True
        self._plain_argmax = (
            params.greedy and not self._penalised and self._mask is None and self._bias is None
        ) and (params.min_tokens == 0 and grammar is None)
        self.pickable = grammar is None and device_pickable(params)
        self._noise: dict[int, Values] = {}

    def pick(self, logits: Row, position: int) -> int:
        """The token at absolute `position` from raw `logits` [V].

        A row on a card is picked from there when the parameters allow it, which they do for all rows of a stream or for
        none. Raises EngineFault when the row is not finite where it counts: that fails one request, loudly.
        """
        if isinstance(logits, CardRow) and self.pickable:
            return picked(logits.pick(self.params, position, self._choice))
        logits = np.asarray(logits)
        row = logits if self._plain_argmax else self._adjusted(logits, position)
        if self.params.greedy:
            return _argmax(row)
        _argmax(row)
        row = self._truncated((row - row.max()) / np.float32(self.params.temperature))
        return _argmax(row + self._noise_at(position))

    def ask(self, position: int) -> Ask | None:
        """What a card may pick at `position` before anybody asks; null where it needs what the host knows."""
        return Ask(self.params, position, self._choice) if self.pickable else None

    def record(self, token: int) -> None:
        """Count a completion token into the history."""
        if self._penalised:
            self._counts[token] += 1
        if self._grammar is not None:
            self._grammar.record(token)

    def forget(self, token: int) -> None:
        """Take back one `record`: a drafter looks ahead, and takes back all that it tried."""
        if self._penalised:
            self._counts[token] -= 1
        if self._grammar is not None:
            self._grammar.forget()

    def _adjusted(self, logits: Values, position: int) -> Values:
        """Steps 1 and 2 on a copy."""
        row = logits.astype(np.float32, copy=True)
        if np.isnan(row).any():
            raise EngineFault("a row of logits holds NaN")
        if self._bias is not None:
            row += self._bias
        if self._mask is not None:
            row[self._mask] = -np.inf
        early = position - self._prompt_len < self.params.min_tokens
        if self._grammar is not None:
            allowed = self._grammar.allowed()
            row[~allowed] = -np.inf
            allowed[self._stops] = False
            early = early and bool(allowed.any())
        if early:
            row[self._stops] = -np.inf
        if self._penalised:
            self._penalise(row)
        return row

    def _penalise(self, row: Values) -> None:
        params = self.params
        if params.repetition_penalty != 1.0:
            seen = self._in_prompt | (self._counts > 0)
            factor = np.float32(params.repetition_penalty)
            row[seen] = np.where(row[seen] > 0, row[seen] / factor, row[seen] * factor)
        used = np.flatnonzero(self._counts)
        row[used] -= np.float32(params.presence_penalty)
        row[used] -= np.float32(params.frequency_penalty) * self._counts[used].astype(np.float32)

    def _truncated(self, row: Values) -> Values:
        """Steps 4 to 6 on tempered logits whose largest is 0."""
        params = self.params
        if params.min_p > 0.0:
            row = np.where(row >= np.float32(np.log(params.min_p)), row, np.float32(-np.inf))
        top_k = params.top_k if 0 < params.top_k < self._vocab else self._vocab
        if top_k == self._vocab and params.top_p >= 1.0:
            return row
        order = np.argsort(-row, kind="stable")[:top_k]
        if params.top_p < 1.0:
            mass = np.exp(row[order].astype(np.float64))
            before = np.cumsum(mass) - mass
            order = order[: max(1, int(np.count_nonzero(before < params.top_p * mass.sum())))]
        kept = np.full_like(row, -np.inf)
        kept[order] = row[order]
        return kept

    def _noise_at(self, position: int) -> Values:
        noise = self._noise.get(position)
        if noise is None:
            if len(self._noise) >= NOISE_ROWS:
                del self._noise[min(self._noise)]
            noise = gumbel(self.params.seed, position, self._vocab, choice=self._choice)
            self._noise[position] = noise
        return noise


def token_logprob(logits: Row, token: int, top: int) -> TokenLogprob:
    """Log probability of `token` and of the `top` best ids under the raw row, float64."""
    row = np.asarray(logits).astype(np.float64, copy=True)
    row -= row.max()
    row -= np.log(np.exp(row).sum())
    best = _best(row, top)
    return TokenLogprob(
        token=token, logprob=float(row[token]), top=tuple((int(index), float(row[index])) for index in best)
    )


def _best(row: NDArray[np.float64], count: int) -> NDArray[np.intp]:
    """Ids of the `count` largest values, the smallest id first on ties; without sorting the whole vocabulary."""
    count = min(count, len(row))
    if count < 1:
        return np.empty(0, dtype=np.intp)
    least = np.partition(row, len(row) - count)[len(row) - count]
    found = np.flatnonzero(row >= least)
    return found[np.argsort(-row[found], kind="stable")[:count]]


def picked(token: int) -> int:
    """A card's pick, told as the host tells its own: EngineFault for a row without a finite largest value."""
    if token < 0:
        raise EngineFault("a row of logits has no finite largest value")
    return token


def _argmax(row: Values) -> int:
    """Index of the largest value, the smallest on ties. numpy's argmax stops at the first NaN, which is caught here."""
    index = int(row.argmax())
    return picked(index if np.isfinite(row[index]) else -1)


def _static_mask(params: SamplingParams, vocab: int) -> Mask | None:
    """True where an id may never be picked."""
    if params.allowed_ids is None and not params.banned_ids:
        return None
    mask = np.zeros(vocab, dtype=np.bool_)
    if params.allowed_ids is not None:
        mask[:] = True
        mask[sorted(params.allowed_ids)] = False
    if params.banned_ids:
        mask[sorted(params.banned_ids)] = True
    return mask


def _bias(params: SamplingParams, vocab: int) -> Values | None:
    if not params.logit_bias:
        return None
    bias = np.zeros(vocab, dtype=np.float32)
    for token, value in params.logit_bias:
        bias[token] += np.float32(value)
    return bias
