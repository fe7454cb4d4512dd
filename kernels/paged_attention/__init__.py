"""Grouped-query attention over paged KV, for prefill tiles and for decode and verify tiles."""

from kernels.paged_attention.plan import AttentionPlan, QueryTile
from kernels.paged_attention.reference import attend, write_rows

__all__ = ["AttentionPlan", "QueryTile", "attend", "write_rows"]
