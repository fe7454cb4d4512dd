"""Layers of the trunk: each owns its packed weights and calls kernels; none knows requests or pools' owners."""
