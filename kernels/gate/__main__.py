"""`python -m kernels.gate`: runs every check, prints a table, writes the evidence object, exits 1 on a difference."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path


def main() -> int:
    """0 when every check holds, 1 when one does not, 2 when there is no card to run on."""
    parser = argparse.ArgumentParser(prog="python -m kernels.gate", description=__doc__)
    parser.add_argument("--device", choices=("cuda", "interpreter"), default="cuda")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--only", default="", metavar="TEXT", help="checks whose name holds TEXT")
    asked = parser.parse_args()
    if asked.device == "interpreter":
        os.environ["TRITON_INTERPRET"] = (
            "1"  # read when triton is first imported, hence before the gate's parts
        )
    from kernels.gate.command import run_gate

    return run_gate(asked.device, file=asked.json, only=asked.only, out=sys.stdout)


if __name__ == "__main__":
    sys.exit(main())
