"""How tests are spread over processes: a file stays in one of them, with its fixtures, and so do all of e2e, with their stack.

What takes long goes first: a long file that is begun last keeps one process busy while the other has nothing left.
"""

from __future__ import annotations

from typing import Final

from xdist.scheduler import LoadScopeScheduling

ONE_STACK: Final = "tests/e2e"
LONGEST: Final = (
    ONE_STACK,
    "tests/property/prove/test_faults.py",
    "tests/property/prove/test_field_reports.py",
    "tests/property/prove/test_quick.py",
    "tests/unit/services/gpu_worker/engine/test_card_latent.py",
    "tests/integration/gpu_worker",
    "tests/unit/services/gpu_worker/engine",
    "tests/property",
    "tests/unit/kernels",
)
"""Files and folders that take longest, by their paths."""


class Spread(LoadScopeScheduling):
    """In the order in which they were collected; see `turn`."""

    def _split_scope(self, nodeid: str) -> str:
        return ONE_STACK if nodeid.startswith(ONE_STACK) else nodeid.partition("::")[0]


def turn(nodeid: str) -> int:
    """When a test is begun: the least first, equal ones as they stand."""
    return next((place for place, path in enumerate(LONGEST) if nodeid.startswith(path)), len(LONGEST))
