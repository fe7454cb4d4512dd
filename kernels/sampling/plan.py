"""What a launch of `pick` is told besides the logits: where its rows stand and by which rules each stream samples.

One entry a sequence, `columns` rows each: row r of the logits is column r % columns of sequence r // columns, stands at
position starts + r % columns, and decides the token one further. All tensors keep their address, so that a CUDA graph
replays the launch with what the host wrote into them since.

    starts       int32 [S]    position of column 0
    temperature  float32 [S]  0 = greedy
    seeds        int64 [S]    the unsigned 64 bits as torch's signed integer
    choices      int32 [S]
    top_k        int32 [S]    0 = off, at most TOP_K_LIMIT
    top_p        float64 [S]  1 = off; below 1 only together with a top_k
    min_p_log    float32 [S]  log of min_p, -inf = off
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Final, NamedTuple, Protocol

import torch
from torch import Tensor

TOP_K_LIMIT: Final = 64
"""Largest top-k that is picked where the logits are: so many candidates a split of the vocabulary are sorted."""


class Rules(Protocol):
    """The sampling parameters of one stream, as the engine names them."""

    @property
    def seed(self) -> int: ...
    @property
    def temperature(self) -> float: ...
    @property
    def top_k(self) -> int: ...
    @property
    def top_p(self) -> float: ...
    @property
    def min_p(self) -> float: ...
    @property
    def repetition_penalty(self) -> float: ...
    @property
    def presence_penalty(self) -> float: ...
    @property
    def frequency_penalty(self) -> float: ...
    @property
    def logit_bias(self) -> tuple[tuple[int, float], ...]: ...
    @property
    def min_tokens(self) -> int: ...
    @property
    def allowed_ids(self) -> frozenset[int] | None: ...
    @property
    def banned_ids(self) -> frozenset[int]: ...


def device_pickable(rules: Rules, *, top_logprobs: int | None = None) -> bool:
    """Whether a stream's rows are picked by `pick`, all of them or none.

    The one rule: what needs the stream's history, a mask, or more than the chosen token's logprob is picked on the host.
    It looks at a request's parameters alone, so that one stream has one program whatever runs beside it.
    """
    history = (
        rules.repetition_penalty != 1.0 or rules.presence_penalty != 0.0 or rules.frequency_penalty != 0.0
    )
    masked = bool(rules.logit_bias or rules.banned_ids or rules.allowed_ids is not None or rules.min_tokens)
    if history or masked or (top_logprobs or 0) > 0:
        return False
    if rules.temperature == 0.0:
        return True
    return rules.top_k <= TOP_K_LIMIT and (rules.top_p >= 1.0 or rules.top_k > 0)


@dataclass(frozen=True, slots=True, eq=False)
class PickPlan:
    """Parameters of S sequences with `columns` rows each; see the module for the tensors."""

    starts: Tensor
    temperature: Tensor
    seeds: Tensor
    choices: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p_log: Tensor
    columns: int
    truncate: bool = True
    """Whether a stream may have a top_k: without it the launch that sorts candidates is left out."""

    @classmethod
    def empty(
        cls, sequences: int, columns: int, *, device: torch.device | str = "cpu", truncate: bool = True
    ) -> PickPlan:
        """Greedy at position 0: what a padded sequence may stay."""
        made: dict[str, Any] = {
            "starts": torch.zeros(sequences, dtype=torch.int32, device=device),
            "temperature": torch.zeros(sequences, dtype=torch.float32, device=device),
            "seeds": torch.zeros(sequences, dtype=torch.int64, device=device),
            "choices": torch.zeros(sequences, dtype=torch.int32, device=device),
            "top_k": torch.zeros(sequences, dtype=torch.int32, device=device),
            "top_p": torch.ones(sequences, dtype=torch.float64, device=device),
            "min_p_log": torch.full((sequences,), -math.inf, dtype=torch.float32, device=device),
        }
        return cls(columns=columns, truncate=truncate, **made)

    def fill(self, rules: Sequence[Rules], choices: Sequence[int], *, vocab: int) -> None:
        """Write the rules of the first `len(rules)` sequences; `starts` is the round's own affair.

        Raises ValueError for rules that are not `device_pickable`, before anything is written.
        """
        if not all(device_pickable(each) for each in rules):
            raise ValueError("rules that need history or masks are picked on the host")
        rows = [_row(each, choice, vocab) for each, choice in zip(rules, choices, strict=True)]
        if not self.truncate and any(row.top_k and row.temperature for row in rows):
            raise ValueError("a top-k needs a plan that truncates")
        for name, column in zip(_Row._fields, zip(*rows, strict=True), strict=True):
            tensor: Tensor = getattr(self, name)
            tensor[: len(rows)].copy_(torch.tensor(column, dtype=tensor.dtype))

    def of(self, starts: Tensor, columns: int) -> PickPlan:
        """The rules of the first `len(starts)` sequences, with `columns` rows each from `starts` on. Shares the tensors, so
        that what is filled in later holds for it too."""
        count = starts.shape[0]
        first: dict[str, Any] = {name: getattr(self, name)[:count] for name in _Row._fields}
        return PickPlan(starts=starts, columns=columns, truncate=self.truncate, **first)

    def to(self, device: torch.device | str) -> PickPlan:
        """The same plan with its tensors elsewhere."""
        moved: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(self)}
        moved = {
            name: value.to(device) if isinstance(value, Tensor) else value for name, value in moved.items()
        }
        return PickPlan(**moved)


class Picks(NamedTuple):
    """`ids` int32 [R]: -1 where a row has no finite largest logit. `logprobs` float32 [R] of the raw rows, if asked for."""

    ids: Tensor
    logprobs: Tensor | None


class _Row(NamedTuple):
    """One sequence of a plan; a field a tensor."""

    temperature: float
    seeds: int
    choices: int
    top_k: int
    top_p: float
    min_p_log: float


def _row(rules: Rules, choice: int, vocab: int) -> _Row:
    seed = rules.seed & ((1 << 64) - 1)
    return _Row(
        temperature=rules.temperature,
        seeds=seed - (1 << 64) if seed >> 63 else seed,
        choices=choice,
        top_k=min(max(rules.top_k, 0), vocab),
        top_p=rules.top_p,
        min_p_log=math.log(rules.min_p) if rules.min_p > 0.0 else -math.inf,
    )
