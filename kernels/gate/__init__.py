"""The row-exactness gate: every kernel over row counts, columns, company and edges, by `torch.equal`; errors against float64.

    python -m kernels.gate --device cuda --json FILE

Exits 1 on any difference, or when an error passes its limit.
"""
