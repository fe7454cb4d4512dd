"""`burstline bench spec`: what each drafter brings on held-out text, one stream at a time, and what it would without a cache.

Every prompt is answered greedily by every drafter in turn (the next prompt in the other order), so that a machine that
slows down slows all of them. Some prompts of each kind are then drafted again from their whole history (`history`).
Expected speed-ups are those that a worker would reckon with: tokens a verify and launches timed (in processor time) at the start.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any, Final

from services.bench.alone import Streams, Told
from services.bench.counts import Counts
from services.bench.held_out import FREE, GROUPS, TEMPLATES, Prompt
from services.bench.history import History
from services.bench.rounds import reference_counts
from services.bench.spec import PLAIN, StreamsDiffer
from services.gpu_worker.config import BLOCK_FOLDER
from services.gpu_worker.engine.gain import Pace
from services.gpu_worker.engine.models.block_loader import load_block
from services.gpu_worker.engine.models.loader import LoadedModel
from services.gpu_worker.engine.requests import DrafterKind
from services.prove.axes import Drafting
from services.prove.models import pocket
from shared.config import POCKET
from shared.errors import EngineFault
from shared.evidence import Bar

MAX_TOKENS: Final = 64
EACH: Final = 24
"""Prompts of a kind that are answered."""
REFERENCED: Final = 6
"""Of those, drafted again without a cache."""
DEPTHS: Final = (1, 2, 3, 4, 5)
REPEATED: Final = 7
"""Drafts of the n-gram drafter."""
KINDS: Final[tuple[DrafterKind, ...]] = ("mtp", "block", "ngram")
TRAINED: Final = POCKET / BLOCK_FOLDER
MTP: Final = "mtp K=3"
MTP_TOKENS: Final = 2.2
"""A verify, at least."""
BLOCK: Final = "block"
BLOCK_TOKENS: Final = 2.8
STRUCTURED: Final = "tools"
"""Tool calls and JSON objects."""
MOST_LOST: Final = 0.02
"""Of the tokens a verify that a drafter has without a cache."""

Results = dict[str, dict[str, dict[str, Any]]]
"""Drafter -> group of texts -> figures."""


def shipped(kinds: Iterable[DrafterKind]) -> LoadedModel:
    """The pocket model, with its block drafter if that is asked for. Raises EngineFault when a folder is not whole."""
    loaded = pocket()
    return replace(loaded, drafter=load_block(TRAINED, loaded.model)) if "block" in kinds else loaded


def without_cache(kinds: Iterable[DrafterKind]) -> History:
    """The same for the reference."""
    return History(POCKET, TRAINED if "block" in kinds else None)


def arms(kinds: Iterable[DrafterKind], model: LoadedModel) -> dict[str, Drafting]:
    """Plain decode, and every width of the drafters asked for. Raises EngineFault when the model lacks one."""
    made = {PLAIN: Drafting(k=0)}
    for kind in kinds:
        match kind:
            case "mtp":
                made |= {f"mtp K={k}": Drafting(k=k) for k in DEPTHS}
            case "block":
                if model.drafter is None:
                    raise EngineFault("there is no block drafter beside the model")
                made[BLOCK] = Drafting(k=model.drafter.dims.drafts, kind="block")
            case _:
                made[f"n-gram K={REPEATED}"] = Drafting(k=REPEATED, kind="ngram")
    return made


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """One prompt: what every drafter told, and the counts without a cache (empty where that was not asked)."""

    prompt: Prompt
    told: Mapping[str, Told]
    reference: Mapping[str, Counts]


def run_drafters(
    model: LoadedModel,
    prompts: Sequence[Prompt],
    history: History,
    *,
    kinds: Sequence[DrafterKind] = KINDS,
    referenced: int = REFERENCED,
    budget: int = MAX_TOKENS,
    report: Callable[[str], None] = lambda _: None,
) -> tuple[Results, dict[str, float]]:
    """Figures by drafter and group, and the seconds of the timed launches. `referenced` = prompts of a kind that are drafted
    again without a cache. Raises StreamsDiffer and EngineFault."""
    drafters, streams = arms(kinds, model), Streams(model, budget)
    pace = streams.pace()
    answers: list[Answer] = []
    for number, prompt in enumerate(prompts):
        order = list(drafters)[:: -1 if number % 2 else 1]
        told = {name: streams.tell(prompt, name, drafters[name]) for name in order}
        streams.forget()
        _same(told)
        of_kind = sum(answer.prompt.kind == prompt.kind for answer in answers)
        reference = {}
        if of_kind < referenced:
            reference = reference_counts(history, drafters, prompt.tokens, told[PLAIN].tokens, budget=budget)
        answers.append(Answer(prompt=prompt, told=told, reference=reference))
        report(f"{prompt.kind}, prompt {of_kind + 1}: {number + 1} of {len(prompts)}")
    results = {name: _by_group(name, drafters[name].kind, answers, pace) for name in drafters}
    return results, {"plain": pace.plain, "verify_of_8": pace.full, "mtp": pace.draft, "block": pace.block}


def bars(results: Results) -> list[Bar]:
    """What the trained drafters must bring on text that they never saw; and that caching loses nothing."""
    found = [
        Bar.at_least(f"tokens a verify, {MTP}, {group}", figures["tokens_per_verify"], MTP_TOKENS, "tokens")
        for group, figures in results.get(MTP, {}).items()
        if group in (TEMPLATES, FREE)
    ]
    if STRUCTURED in results.get(BLOCK, {}):
        ours = results[BLOCK][STRUCTURED]["tokens_per_verify"]
        found.append(Bar.at_least(f"tokens a verify, {BLOCK}, {STRUCTURED}", ours, BLOCK_TOKENS, "tokens"))
        heads = [
            of[STRUCTURED]["tokens_per_verify"] for name, of in results.items() if name.startswith("mtp")
        ]
        if heads:
            found.append(
                Bar.at_least(f"{BLOCK} over the best MTP width, {STRUCTURED}", ours / max(heads), 1.0, "x")
            )
    lost = {
        f"{name}, {group}": figures["reference"]["lost"]
        for name, groups in results.items()
        for group, figures in groups.items()
        if "reference" in figures and group in (TEMPLATES, FREE)
    }
    return found + [
        Bar.at_most(f"tokens a verify against no cache, apart by, {name}", abs(value), MOST_LOST, "share")
        for name, value in lost.items()
    ]


def _same(told: Mapping[str, Told]) -> None:
    for name, one in told.items():
        if one.tokens != told[PLAIN].tokens:
            raise StreamsDiffer(f"{name} gives other tokens than plain decode; see burstline prove")


def _by_group(
    name: str, kind: DrafterKind, answers: Sequence[Answer], pace: Pace
) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for group in GROUPS:
        members = [one for one in answers if group in one.prompt.groups(one.told[PLAIN].tokens)]
        if not members:
            continue
        counts, plain = (
            _total(one.told[name].counts for one in members),
            _total(one.told[PLAIN].counts for one in members),
        )
        found[group] = counts.figures() | {
            "cpu_speed_up_over_plain": round(counts.cpu_rate / plain.cpu_rate, 3) if plain.seconds else 1.0,
            "expected_speed_up": round(
                pace.gain(counts.drafts_per_verify, counts.tokens_per_verify, kind), 3
            ),
        }
        slow = [one for one in members if name in one.reference]
        if slow:
            found[group]["reference"] = _against(
                _total(one.told[name].counts for one in slow), _total(one.reference[name] for one in slow)
            )
    return found


def _against(ours: Counts, reference: Counts) -> dict[str, float]:
    """The same streams, with a cache and without."""
    return {
        "streams": ours.streams,
        "tokens_per_verify": round(reference.tokens_per_verify, 3),
        "with_cache": round(ours.tokens_per_verify, 3),
        "lost": round(1.0 - ours.tokens_per_verify / reference.tokens_per_verify, 4),
    }


def _total(counts: Iterable[Counts]) -> Counts:
    return reduce(Counts.__add__, counts, Counts())
