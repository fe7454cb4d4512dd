"""Philox4x32-10, Gumbel noise and the pick: the definitions that the device kernels must meet.

Layout: key = (seed low word, seed high word); counter = (vocabulary id >> 2, absolute position of the decided token,
stream, choice index); word (id & 3) of a counter belongs to that id. A number is therefore a function of what is
decided, never of how many numbers were drawn before.

numpy's unsigned 64-bit product gives `mulhilo` in one operation, which torch's signed integers do not. `log` may
differ by an ulp between this and a device's library: compare those by distribution, and runs on one device by bits.
"""

from __future__ import annotations

from typing import Final, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.sampling.plan import PickPlan, Picks

Words: TypeAlias = NDArray[np.uint32]

STREAM_TARGET: Final = 0
"""The one noise stream of exact mode: target and drafters share it."""

_ROUNDS: Final = 10
_MULTIPLIERS: Final = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL: Final = (0x9E3779B9, 0xBB67AE85)
_MASK: Final = 0xFFFFFFFF
_LARGEST: Final = np.float32(1.0 - 2.0**-24)


def philox4x32(counter: tuple[Words, Words, Words, Words], key: tuple[int, int]) -> Words:
    """Ten rounds over n counters (four uint32 arrays that broadcast to [n]) -> uint32 [n, 4]."""
    c0, c1, c2, c3 = (word.astype(np.uint64) for word in np.broadcast_arrays(*counter))
    k0, k1 = key
    low, shift = np.uint64(_MASK), np.uint64(32)
    for _ in range(_ROUNDS):
        first, second = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            (second >> shift) ^ c1 ^ np.uint64(k0),
            second & low,
            (first >> shift) ^ c3 ^ np.uint64(k1),
            first & low,
        )
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return np.stack([c0, c1, c2, c3], axis=1).astype(np.uint32)


def gumbel(
    seed: int, position: int, vocab: int, *, stream: int = STREAM_TARGET, choice: int = 0
) -> NDArray[np.float32]:
    """Standard Gumbel noise of every vocabulary id for the token decided at `position`: float32 [vocab].

    w = min((bits + 0.5) 2^-32, 1 - 2^-24) and G = -log(-log1p(-w)): fine where G is large (at most 22.9), and no
    rounding makes w one.
    """
    groups = np.arange(-(-vocab // 4), dtype=np.uint32)
    constant = [np.full(1, value, dtype=np.uint32) for value in (position, stream, choice)]
    words = philox4x32((groups, constant[0], constant[1], constant[2]), (seed & _MASK, (seed >> 32) & _MASK))
    bits = words.reshape(-1)[:vocab].astype(np.float32)
    uniform = np.minimum((bits + np.float32(0.5)) * np.float32(2.0**-32), _LARGEST)
    return -np.log(-np.log1p(-uniform))


def pick(logits: Tensor, plan: PickPlan, *, id_map: Tensor | None = None, logprobs: bool = False) -> Picks:
    """Decide a token from every row of `logits` [R, V] float32, R = S x columns.

    Greedy: the largest logit. Else z = (x - max) / temperature, cut by min-p, top-k and top-p in that order, and
    argmax(z + Gumbel). Ties pick the smallest id. `id_map` int32 [V] names the id of each column when the head is a
    subset of the vocabulary: noise, ties and the answer go by those ids. `logprobs` only without a map.
    """
    names = np.arange(logits.shape[1]) if id_map is None else id_map.numpy().astype(np.int64)
    ids = [_pick_row(row, names, plan, number) for number, row in enumerate(logits.numpy())]
    picked = torch.tensor(ids, dtype=torch.int32, device=logits.device)
    if not logprobs:
        return Picks(picked, None)
    scores = torch.log_softmax(logits.double(), dim=1)
    return Picks(picked, scores.gather(1, picked.clamp(min=0).long()[:, None])[:, 0].float())


def _pick_row(row: NDArray[np.float32], names: NDArray[np.int64], plan: PickPlan, number: int) -> int:
    sequence, column = divmod(number, plan.columns)
    top = row.max()
    if not np.isfinite(top):  # a NaN is a NaN's maximum
        return -1
    temperature = np.float32(plan.temperature[sequence])
    if temperature == 0.0:
        return int(names[row == top].min())
    order = np.lexsort((names, -row))  # by (logit descending, id ascending)
    tempered, named = (row[order] - top) / temperature, names[order]
    tempered[tempered < np.float32(plan.min_p_log[sequence])] = -np.inf
    kept = _kept(tempered, int(plan.top_k[sequence]), float(plan.top_p[sequence]))
    position = int(plan.starts[sequence]) + column + 1
    noise = gumbel(
        int(plan.seeds[sequence]), position, int(names.max()) + 1, choice=int(plan.choices[sequence])
    )
    scores = tempered[:kept] + noise[named[:kept]]
    return int(named[:kept][scores == scores.max()].min())


def _kept(descending: NDArray[np.float32], top_k: int, top_p: float) -> int:
    """How many of the tempered logits, largest first, stay."""
    count = min(top_k, len(descending)) if top_k else len(descending)
    if top_p >= 1.0:
        return count
    mass = np.exp(descending[:count].astype(np.float64))
    before = np.cumsum(mass) - mass
    return max(1, int(np.count_nonzero(before < top_p * mass.sum())))
