"""Norms over the last dimension, and partial rotary positions."""

from kernels.norm_rope.reference import gated_norm, l2_norm, qk_norm_rope, rms_norm, rope_table

__all__ = ["gated_norm", "l2_norm", "qk_norm_rope", "rms_norm", "rope_table"]
