"""What happens to a cell's request while it runs."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace

from services.gpu_worker.engine.requests import GenerateRequest, SamplingParams
from services.prove.driver import Driver
from services.prove.scene import Scene

NEIGHBOUR_TOKENS = 24
NEIGHBOUR_K = 3
LAUNCHES = 4
"""Prefill launches that may fail, beside the verifies of about half the budget."""
FAILURES = 2
"""Fewer than the failures in a row that end a request."""

CROWD_STEPS = 4
MOST_WAYS_GIVEN = 3
MOST_OVERSHOT = 7
CROWDS = 3
CROWD = 3
CROWD_TOKENS = 40
"""Three times three short requests: with the cell they are as many as the gate's upper bound."""


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
    """Its blocks go to others up to three times, wherever it is: it comes back with what it had cached."""
    rows = len(scene.request.tokens) + scene.request.max_tokens
    count = scene.rng.randint(1, MOST_WAYS_GIVEN)
    scene.script.give_way_at(scene.request.key, scene.rng.sample(range(1, rows), min(count, rows - 1)))


def preempted_in_prime(scene: Scene) -> None:
    """It gives way as soon as its first chunk is primed, and again when it is primed whole."""
    scene.script.give_way_at(scene.request.key, [1, len(scene.request.tokens)])


def preempted_in_decode(scene: Scene) -> None:
    """It gives way after its first tokens, in the middle, and before its last ones."""
    prompt, budget = len(scene.request.tokens), scene.request.max_tokens
    places = {prompt + 1, prompt + budget // 2, prompt + max(1, budget - 2)}
    scene.script.give_way_at(scene.request.key, sorted(places))


def overshot(scene: Scene) -> None:
    """Its last round takes columns past the end, and a hand-off is tried on what came of it (R-S1, R-S16)."""
    scene.script.overshoot_by(scene.request.key, scene.rng.randint(1, MOST_OVERSHOT))


def crowded(scene: Scene) -> None:
    """Short requests of others come and go in mid stream, so that the load passes the spec gate's bounds."""
    driver, start = scene.driver, scene.arrival + scene.rng.randint(2, 6)
    for number in range(CROWDS * CROWD):
        root = hashlib.sha256(f"{scene.request.request_id}/{number}".encode()).digest()
        other = replace(
            scene.request,
            request_id=f"{scene.request.request_id}/crowd-{number}",
            root=root,
            tokens=scene.request.tokens[:CROWD_TOKENS],
            chain=(),
            use_cache=False,
            max_tokens=CROWD_TOKENS // 8,
            stop_ids=frozenset(),
            emitted=(),
            capture_at=None,
            ckpt_at=None,
            top_logprobs=None,
        )
        driver.at(start + CROWD_STEPS * (number // CROWD), _submission(driver, other))


def _submission(driver: Driver, request: GenerateRequest) -> Callable[[], None]:
    return lambda: driver.submit(request)
