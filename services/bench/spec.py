"""`burstline bench spec --batch or --rule`: what each drafter gains over plain decode of the same model, by load.

Repeats are interleaved (every drafter runs once, then all again in another order), so that a machine that slows down slows all of them;
a speed-up is a ratio within one repeat.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from services.bench.figures import Pass, summary
from services.bench.load import Arm, Load, measure
from services.gpu_worker.engine.limits import SpecGate
from services.gpu_worker.engine.models.loader import LoadedModel
from services.prove.axes import DRAFTERS, POLICIES, Drafting, Policy
from shared.evidence import Bar

PLAIN: Final = "none"
LONGEST: Final = "mtp K=5"
"""Measured again under the engine's own gates."""
BY_GAIN: Final = f"{LONGEST}, gates by gain"
LEAST_GAIN: Final = 1.1
"""The worker's own."""
LEAST_GATED: Final = 0.95
"""Of plain decode's rate that is kept at every load: the gates must not let speculation cost more than it brings."""
ALWAYS, IF_IT_PAYS = POLICIES["always draft"], POLICIES["draft if it pays"]
GATED: Final = Policy(base=replace(IF_IT_PAYS.base, spec_gate=SpecGate(least_gain=LEAST_GAIN)))
"""As a worker gates: with launches timed at the start."""
ARMS: Final[Mapping[str, Arm]] = {
    **{
        name: Arm(drafting=drafting, policy=ALWAYS)
        for name, drafting in DRAFTERS.items()
        if not drafting.journal and drafting.kind not in ("block", "auto")
    },
    "block K=7": Arm(drafting=Drafting(k=7, kind="block"), policy=ALWAYS),
    f"{LONGEST}, draft gate": Arm(
        drafting=DRAFTERS[LONGEST], policy=Policy(base=replace(IF_IT_PAYS.base, spec_gate=None))
    ),
    f"{LONGEST}, gates by load": Arm(drafting=DRAFTERS[LONGEST], policy=IF_IT_PAYS),
    BY_GAIN: Arm(drafting=DRAFTERS[LONGEST], policy=GATED),
    "auto K=7, gates by gain": Arm(drafting=Drafting(k=7, kind="auto"), policy=GATED),
}
BATCHES: Final = (1, 2, 4, 8, 16)
REPEATS: Final = 3

Results = dict[str, dict[str, dict[str, Any]]]
"""load -> drafter -> figures."""


class StreamsDiffer(Exception):
    """A drafter changed a stream, so its speed means nothing."""


def run_spec(
    model: LoadedModel,
    loads: Sequence[Load],
    *,
    repeats: int = REPEATS,
    report: Callable[[str], None] = lambda _: None,
) -> Results:
    """Measure every drafter that the model has on every load. Raises StreamsDiffer."""
    results: Results = {}
    arms = {name: arm for name, arm in ARMS.items() if arm.drafting.kind != "block" or model.drafter}
    for load in loads:
        name = f"{load.rule}, batch {load.batch}"
        passes: dict[str, list[Pass]] = {drafter: [] for drafter in arms}
        for repeat in range(repeats):
            for drafter in _order(arms, repeat):
                passes[drafter].append(measure(model, load, arms[drafter]))
                report(f"{name}: {drafter}, repeat {repeat + 1} of {repeats}")
        _same_streams(name, passes)
        results[name] = {drafter: summary(got, passes[PLAIN]) for drafter, got in passes.items()}
    return results


def bars(results: Results) -> list[Bar]:
    """Speculation must pay for itself where one stream runs alone; that streams are equal was a condition.

    Processor time decides, since a busy machine spoils wall time; on a quiet one they agree.
    """
    found = []
    for name, drafters in results.items():
        if BY_GAIN in drafters:
            gated = drafters[BY_GAIN]["cpu_speed_up_over_plain"]["median"]
            found.append(
                Bar.at_least(f"plain decode's rate kept, {name}, {BY_GAIN}", gated, LEAST_GATED, "x")
            )
        if name.endswith("batch 1"):
            best = max(
                figures["cpu_speed_up_over_plain"]["median"]
                for drafter, figures in drafters.items()
                if drafter != PLAIN
            )
            found.append(
                Bar.at_least(f"best speed-up over plain decode in processor time, {name}", best, 1.0, "x")
            )
    return found


def _order(arms: Mapping[str, Arm], repeat: int) -> list[str]:
    """Every other repeat backwards."""
    return list(arms)[:: -1 if repeat % 2 else 1]


def _same_streams(name: str, passes: Mapping[str, Sequence[Pass]]) -> None:
    plain = passes[PLAIN][0].streams
    for drafter, got in passes.items():
        if any(one.streams != plain for one in got):
            raise StreamsDiffer(
                f"{name}: {drafter} gives other tokens than plain decode; see burstline prove"
            )
