"""The gated delta rule: chunked prefill on the 64-grid, and the replay step of decode and verify."""

from kernels.gated_delta.plan import DeltaShape, ReplayPlan
from kernels.gated_delta.reference import chunk_prefill, fold, qk_scale, replay_step

__all__ = ["DeltaShape", "ReplayPlan", "chunk_prefill", "fold", "qk_scale", "replay_step"]
