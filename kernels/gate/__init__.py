"""The row-exactness gate: every kernel over row counts, columns, company and edges, by `torch.equal`; errors against float64.

    python -m kernels.gate --device cuda --json FILE

    command    one run                rowwise    products, norms, activations       attention, writing   pages, read and written
    ledger     what a check found     grouped    experts, adapters                  delta      the gated delta net
    sizes      what it runs over      picking    picks, ends of rounds, checksums    latent, sparse   latent rows

Exits 1 on any difference, or when an error passes its limit.
"""
