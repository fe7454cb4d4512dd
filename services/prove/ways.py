"""What happens to a cell's request while it runs."""

from __future__ import annotations

from dataclasses import replace

from services.gpu_worker.engine.requests import SamplingParams
from services.prove.scene import Scene

NEIGHBOUR_TOKENS = 24
NEIGHBOUR_K = 3
LAUNCHES = 4
"""Prefill launches that may fail, beside the verifies of about half the budget."""
FAILURES = 2
"""Fewer than the failures in a row that end a request."""

MOST_WAYS_GIVEN = 3


def whole(scene: Scene) -> None:
    """Nothing happens."""


def resumed(scene: Scene) -> None:
    """An earlier attempt journalled some of the stream; this one verifies that and goes on."""
    known = scene.rng.randint(0, len(scene.expected.tokens))
    scene.change(emitted=tuple(scene.expected.tokens[:known]))


def neighbour_cancelled(scene: Scene) -> None:
    """Another request over the same prompt comes at about the same time, speculates, samples, and is cancelled."""
    neighbour = replace(
        scene.request,
        request_id=f"{scene.request.request_id}/neighbour",
        sampling=SamplingParams(seed=scene.rng.getrandbits(64), temperature=1.2, frequency_penalty=0.7),
        max_tokens=NEIGHBOUR_TOKENS,
        stop_ids=frozenset(),
        speculation_k=NEIGHBOUR_K,
        emitted=(),
        top_logprobs=None,
    )
    scene.shared = True
    driver, start = scene.driver, scene.arrival + scene.rng.randint(-1, 1)
    driver.at(start, lambda: driver.submit(neighbour))
    stop = start + scene.rng.randint(0, 6)
    driver.at(stop, lambda: driver.engine.cancel(neighbour.request_id, "not wanted any more"))


def demoted(scene: Scene) -> None:
    """Speculation ends at a random round and plain decode goes on."""
    scene.script.demote_after(scene.request.key, scene.rng.randint(0, scene.request.max_tokens // 2))


def parked(scene: Scene) -> None:
    """One or two launches run out of memory, in prefill or in a verify: set aside, primed again, replayed."""
    launches = LAUNCHES + scene.request.max_tokens // 2
    count = scene.rng.randint(1, FAILURES)
    scene.script.fail_launches(scene.request.key, scene.rng.sample(range(1, launches + 1), count))


def preempted(scene: Scene) -> None:
    """Its blocks go to others up to three times, in mid prime or in mid decode: it comes back with what it had cached."""
    rows = len(scene.request.tokens) + scene.request.max_tokens
    count = scene.rng.randint(1, MOST_WAYS_GIVEN)
    scene.script.give_way_at(scene.request.key, scene.rng.sample(range(1, rows), min(count, rows - 1)))
