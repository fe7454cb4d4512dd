"""The pick, the end of a round and the checksums."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kernels import checksum
from kernels.advance import NO_STOP, STOPS, RoundState
from kernels.advance import reference as advance_twin
from kernels.checksum import reference as checksum_twin
from kernels.dispatch import device_module
from kernels.gate.ledger import Check, Ledger
from kernels.gate.sizes import Place
from kernels.sampling import PickPlan
from kernels.sampling import reference as twin


@dataclass(frozen=True, slots=True)
class Rules:
    """A stream's sampling parameters without history or masks."""

    seed: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0
    allowed_ids: frozenset[int] | None = None
    banned_ids: frozenset[int] = frozenset()


_ROUNDS = 65
"""Sequences of a round."""

STREAMS = (
    Rules(temperature=0.0),
    Rules(seed=7),
    Rules(seed=2**64 - 3, temperature=0.6, min_p=0.02),
    Rules(seed=11, temperature=0.7, top_k=20, top_p=0.8),
    Rules(seed=13, top_k=64, top_p=0.3),
)


def checks(place: Place) -> Iterator[tuple[str, Check]]:
    """Picks, ends of rounds and sums against their twins and against other company."""
    yield "pick", partial(_pick, place)
    yield "end of a round", partial(_end, place)
    yield "checksum", partial(_checksum, place)


def _plan(place: Place, columns: int) -> PickPlan:
    plan = PickPlan.empty(len(STREAMS), columns)
    plan.fill(STREAMS, range(len(STREAMS)), vocab=place.sizes.vocab)
    plan.starts.copy_(torch.arange(len(STREAMS)) * 63 + 1)
    return plan


def _pick(place: Place, ledger: Ledger) -> None:
    vocab, device = place.sizes.vocab, place.device
    widest = max(place.sizes.columns)
    pick = partial(device_module("sampling").pick, logprobs=True, split=place.sizes.vocab_split)
    logits = place.normal(len(STREAMS), widest, vocab, seed=1, scale=3.0, dtype=torch.float32)
    plan = _plan(place, widest)
    whole = pick(logits.flatten(0, 1), plan.to(device))
    ids, logprobs = whole.ids.view(len(STREAMS), -1), _of(whole.logprobs).view(len(STREAMS), -1)
    for columns in place.sizes.columns:
        for number in range(len(STREAMS)):
            alone = _only(plan, number, columns).to(device)
            told = pick(logits[number, :columns].contiguous(), alone)
            ledger.equal(told.ids, ids[number, :columns], f"stream {number}, {columns} columns")
            ledger.equal(_of(told.logprobs), logprobs[number, :columns], f"logprob of stream {number}")
    few = min(widest, 2)
    part = logits[:, :few].reshape(-1, vocab).cpu()
    small = replace(plan, columns=few)
    expected = twin.pick(part, small, logprobs=True)
    ledger.equal(ids[:, :few].flatten().cpu(), expected.ids, "ids of the twin")
    ledger.close(logprobs[:, :few].flatten().cpu(), _of(expected.logprobs).double(), 1e-5)


def _end(place: Place, ledger: Ledger) -> None:
    generator = torch.Generator().manual_seed(3)
    for columns in place.sizes.columns:
        here = _state(place, columns, generator)
        moved: dict[str, Any] = {n: t.to(place.device, copy=True) for n, t in _tensors(here).items()}
        there = replace(here, **moved)
        picks = torch.randint(-1, 5, (_ROUNDS, columns), generator=generator, dtype=torch.int32)
        agrees = torch.rand(_ROUNDS, columns, generator=generator) < 0.7
        fed = torch.where(agrees, picks, picks + 1).roll(1, 1).contiguous()
        hidden = torch.randn(_ROUNDS, columns, place.sizes.hidden, generator=generator).to(place.dtype)
        ids = fed.to(place.device, copy=True)
        told = device_module("advance").advance(there, picks.to(place.device), ids, hidden.to(place.device))
        ledger.equal(told.cpu(), advance_twin.advance(here, picks, fed, hidden), f"{columns} columns")
        ledger.equal(ids.cpu(), fed, f"anchors of {columns} columns")
        for name, one in _tensors(here).items():
            ledger.equal(getattr(there, name).cpu(), one, f"{name} of {columns} columns")


def _state(place: Place, columns: int, generator: torch.Generator) -> RoundState:
    def drawn(low: int, high: int, *size: int) -> Tensor:
        return torch.randint(low, high, (_ROUNDS, *size), generator=generator, dtype=torch.int32)

    return RoundState(
        starts=drawn(0, 1000),
        counts=drawn(0, columns + 1),
        left=drawn(0, 3 * columns),
        wide=drawn(1, columns + 1),
        stops=torch.where(drawn(0, 9, STOPS) == 0, 4, NO_STOP).int(),
        pending=drawn(0, 6),
        head=drawn(0, 11),
        store_after=drawn(0, 2),
        tail_tokens=drawn(0, 2, columns + 1),
        tail_counts=drawn(0, 2),
        tail_hidden=torch.zeros(_ROUNDS, columns + 1, place.sizes.hidden, dtype=place.dtype),
        capacity=11,
        fold_rows=4,
    )


def _tensors(state: RoundState) -> dict[str, Tensor]:
    values = {field.name: getattr(state, field.name) for field in fields(state)}
    return {name: value for name, value in values.items() if isinstance(value, Tensor)}


def _checksum(place: Place, ledger: Ledger) -> None:
    rows = place.normal(9, 2 * 4096 + 6, seed=4)
    whole = checksum.checksums(rows)
    ledger.equal(whole.cpu(), checksum_twin.checksums(rows.cpu()), "sums of the twin")
    for number in range(len(rows)):
        ledger.equal(checksum.checksums(rows[number : number + 1].clone())[0], whole[number], f"row {number}")
    keys, values = (place.normal(2, 6, 2, 64, 16, seed=seed) for seed in (5, 6))
    blocks = torch.tensor([5, 0, 3])
    told = checksum.block_checksums((keys, values), blocks.to(place.device))
    ledger.equal(
        told.cpu(), checksum_twin.block_checksums((keys.cpu(), values.cpu()), blocks), "scattered blocks"
    )


def _of(logprobs: Tensor | None) -> Tensor:
    if logprobs is None:
        raise ValueError("the pick was asked for logprobs")
    return logprobs


def _only(plan: PickPlan, number: int, columns: int) -> PickPlan:
    """The plan of one of its streams."""
    tensors: dict[str, Any] = {
        field.name: getattr(plan, field.name)[number : number + 1].clone()
        for field in fields(plan)
        if isinstance(getattr(plan, field.name), Tensor)
    }
    return replace(plan, columns=columns, **tensors)
