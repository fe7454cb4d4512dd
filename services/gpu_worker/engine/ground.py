"""What an engine stands on: its pools, the cache over them, and the runner that computes in them. Made once, of fixed size."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from services.gpu_worker.engine.cache.host_memory import host_memory
from services.gpu_worker.engine.cache.kv_pool import KVPool
from services.gpu_worker.engine.cache.manager import CacheManager
from services.gpu_worker.engine.cache.offload import HostTier, Pools
from services.gpu_worker.engine.cache.prices import Prices
from services.gpu_worker.engine.cache.ring_pool import RingPool
from services.gpu_worker.engine.cache.slots import SlotMemory
from services.gpu_worker.engine.cache.state_pool import StatePool
from services.gpu_worker.engine.config import EngineConfig, ModelDims
from services.gpu_worker.engine.fingerprint import numerics_fingerprint
from services.gpu_worker.engine.limits import EngineLimits
from services.gpu_worker.engine.memory import MemoryPlan, fitted
from services.gpu_worker.engine.models.block_context import BlockContext
from services.gpu_worker.engine.models.block_loader import load_block
from services.gpu_worker.engine.models.loader import LoadedModel, load_model
from services.gpu_worker.engine.placement import place
from services.gpu_worker.engine.runner import ModelRunner


@dataclass(frozen=True, kw_only=True, slots=True)
class Ground:
    """What `lay_out` made."""

    dims: ModelDims
    config: EngineConfig  #: every number decided
    fingerprint: str
    memory: MemoryPlan | None  #: as it was divided; null where it is not a card's
    kv: KVPool  #: rows of attention
    states: StatePool
    ring: RingPool  #: rows of sliding layers
    slots: SlotMemory  #: states and rings together
    runner: ModelRunner
    cache: CacheManager


def lay_out(source: Path | LoadedModel, config: EngineConfig, limits: EngineLimits) -> Ground:
    """Load the model, unless it is there, and allocate everything where it is."""
    loaded = _load(source, config) if isinstance(source, Path) else source
    if config.drafter_folder is not None:
        loaded = replace(loaded, drafter=load_block(Path(config.drafter_folder), loaded.model))
    model, placement = loaded.model, loaded.model.placement
    dims = loaded.dims.within(config.max_context)
    fingerprint = numerics_fingerprint(loaded, config)
    drafter = loaded.drafter.dims if loaded.drafter is not None else None
    config, memory = fitted(config, dims, placement, drafter)
    kv = KVPool(dims, config.num_blocks, placement)
    states = StatePool(dims, config.num_slots, config.num_snapshots, config.max_verify, placement)
    ring = RingPool(
        dims,
        config.num_slots,
        config.num_snapshots,
        prefill_rows=config.prefill_chunk,
        max_verify=config.max_verify,
        dtype=kv.k.dtype,
        device=kv.k.device,
    )
    block = None
    if loaded.drafter is not None:
        block = BlockContext(
            loaded.drafter, model, num_slots=config.num_slots, num_snapshots=config.num_snapshots
        )
    slots = SlotMemory(states, ring, block)
    cache = CacheManager(
        num_blocks=config.num_blocks,
        num_slots=config.num_slots,
        num_snapshots=config.num_snapshots,
        max_pending=limits.max_pending_captures,
        states=slots,
        tier=HostTier(
            config.host_tier_bytes,
            Pools(kv, slots),
            host_memory(config.host_tier_bytes, pinned=placement.graphs),
        ),
        prices=Prices.of(dims),
        max_decoded=limits.max_decoded,
    )
    return Ground(
        dims=dims,
        config=config,
        fingerprint=fingerprint,
        memory=memory,
        kv=kv,
        states=states,
        ring=ring,
        slots=slots,
        runner=ModelRunner(model, kv, states, config, ring, block),
        cache=cache,
    )


def _load(folder: Path, config: EngineConfig) -> LoadedModel:
    return load_model(
        folder,
        threads=config.threads,
        placement=place(config.device, config.dtype, draft_vocab=config.draft_vocab),
    )
