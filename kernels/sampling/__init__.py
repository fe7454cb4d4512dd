"""Position-keyed randomness for sampling: Philox4x32-10 and the Gumbel noise made of it."""

from kernels.sampling.reference import STREAM_TARGET, gumbel, philox4x32

__all__ = ["STREAM_TARGET", "gumbel", "philox4x32"]
