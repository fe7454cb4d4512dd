"""A request into the engine: all of its choices between the same two steps, or none."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import UnsetType

from services.gpu_worker import claim
from services.gpu_worker.api import EngineApi
from services.gpu_worker.core import Core
from services.gpu_worker.engine.requests import GenerateRequest
from services.gpu_worker.intake import Intake
from shared.errors import BurstlineError
from shared.protocol.messages import Failure


async def submit(
    core: Core, intake: Intake, choices: Sequence[GenerateRequest], grammar: str | UnsetType
) -> Failure | None:
    """Submit them, each to follow the `grammar`; why not, if it or the engine refuses. A cancellation that came
    meanwhile is passed on."""
    engine_id = choices[0].request_id
    intake.submitted = True
    try:
        choices = await core.grammars.constrain(choices, grammar)
        await core.host.call(lambda engine: _submit_all(engine, choices), urgent=True)
    except BurstlineError as error:
        # Of several choices some may run already: none of them is wanted without the others.
        core.host.cancel(engine_id, "refused")
        intake.submitted = False
        return claim.failure_of(error)
    for choice, cut in intake.outcome.cuts.items():
        core.host.cancel(engine_id, cut.reason, choice)
    return None


def _submit_all(engine: EngineApi, choices: Sequence[GenerateRequest]) -> None:
    """Together, so that they share what the first one finds."""
    for choice in choices:
        engine.submit(choice)
