"""What this machine's libraries make of a model: a digest of bits that were really computed.

Version strings and an instruction set do not tell two machines apart where a maths library picks its code by vendor or
model of the processor. A short forward through every operation does.
"""

from __future__ import annotations

import hashlib

import torch

from kernels.gated_delta import ReplayPlan
from services.gpu_worker.engine.cache.kv_pool import KVPool
from services.gpu_worker.engine.cache.ring_pool import RingPool
from services.gpu_worker.engine.cache.state_pool import StatePool
from services.gpu_worker.engine.layers.local import local_decode, local_prefill
from services.gpu_worker.engine.layers.steps import (
    DecodeStep,
    PrefillStep,
    Span,
    decode_attention,
    prefill_attention,
)
from services.gpu_worker.engine.models.family import Model

_PRIMED, _COLUMNS = 70, 2
"""One whole chunk and a tail, then a verify: both phases, a split edge, padding."""

_TABLE = (1, 0)


@torch.no_grad()
def computed_bits(model: Model) -> str:
    """SHA-256, hex, over hiddens and logits of fixed tokens in both phases, and of the MTP head."""
    dims = model.dims
    kv, states = KVPool(dims, len(_TABLE)), StatePool(dims, 1, 0, _COLUMNS)
    ring = RingPool(dims, 1, 0, prefill_rows=2 * 64, max_verify=_COLUMNS)
    ids = (torch.arange(2 * 64) * 7919 + 13) % dims.vocab

    prompt, new = Span(0, _PRIMED, _TABLE), Span(_PRIMED, _COLUMNS, _TABLE)
    primed = prefill_attention(prompt, kv, model.rope)
    local = local_prefill(prompt, 0, ring, model.local_rope)
    hidden = model.trunk(model.embed(ids), PrefillStep(primed, states, 0, _PRIMED, local))[:_PRIMED]
    verify = decode_attention([new], kv, model.rope)
    local = local_decode([new], [0], ring, model.local_rope)
    step = DecodeStep(verify, states, ReplayPlan.build([0], [0], _COLUMNS, _COLUMNS, 1, states.taps), local)
    columns = model.trunk(model.embed(ids[:_COLUMNS]), step)
    results = [hidden, columns, model.logits(columns)]
    if model.mtp is not None:
        results.append(model.mtp(model.embed(ids[:_COLUMNS]), columns, verify))
    content = hashlib.sha256()
    for result in results:
        content.update(result.contiguous().numpy().tobytes())
    return content.hexdigest()
