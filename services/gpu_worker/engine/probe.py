"""What this machine's libraries make of a model: a digest of bits that were really computed.

Version strings and an instruction set do not tell two machines apart where a maths library picks its code by vendor or
model of the processor. A short forward through every operation does.
"""

from __future__ import annotations

import hashlib

import torch

from services.gpu_worker.engine.batch import DraftRows, PrefillChunk, VerifyRows
from services.gpu_worker.engine.cache.kv_pool import KVPool
from services.gpu_worker.engine.cache.state_pool import StatePool
from services.gpu_worker.engine.config import BLOCK_ROWS, EngineConfig
from services.gpu_worker.engine.models.family import Model
from services.gpu_worker.engine.runner import ModelRunner

_PRIMED, _COLUMNS = 70, 2
"""One whole chunk and a tail, then a verify: both phases, a split edge, padding."""

_TABLE = (1, 0)


@torch.no_grad()
def computed_bits(model: Model) -> str:
    """SHA-256, hex, over hiddens and logits of fixed tokens in both phases, and of the MTP head."""
    dims, placement = model.dims, model.placement
    config = EngineConfig(
        num_blocks=len(_TABLE),
        num_slots=1,
        num_snapshots=0,
        max_verify=_COLUMNS,
        max_batch=1,
        prefill_chunk=2 * BLOCK_ROWS,
        threads=torch.get_num_threads(),
        max_context=len(_TABLE) * BLOCK_ROWS,
    )
    states = StatePool(dims, 1, 0, _COLUMNS, placement)
    runner = ModelRunner(model, KVPool(dims, config.num_blocks, placement), states, config)
    ids = ((torch.arange(_PRIMED) * 7919 + 13) % dims.vocab).tolist()
    nothing = torch.zeros(dims.hidden)
    prompt = PrefillChunk(slot=0, start=0, tokens=ids, block_table=_TABLE, previous_hidden=nothing)
    (hidden,) = runner.prefill([prompt])
    new = ids[:_COLUMNS]
    (columns,) = runner.verify([VerifyRows(slot=0, start=_PRIMED, tokens=new, block_table=_TABLE)])
    results = [hidden, columns, runner.logits(columns).cpu()]
    if model.mtp is not None:
        results += runner.draft([DraftRows(start=_PRIMED, tokens=new, hiddens=columns, block_table=_TABLE)])
    content = hashlib.sha256()
    for result in results:
        content.update(result.float().cpu().contiguous().numpy().tobytes())
    return content.hexdigest()
