"""The engine's events as spans of the request's trace. They are told after the fact, with the engine's own times."""

from __future__ import annotations

from services.gpu_worker.engine.events import (
    Admitted,
    Burst,
    Captured,
    DrafterChosen,
    DrafterOff,
    Event,
    Parked,
    Primed,
)
from shared.protocol.messages import Terminal
from shared.telemetry import Parent, Telemetry


def record(telemetry: Telemetry, parent: Parent, event: Event) -> None:
    """One event, one span; ends are told by the request's own span."""
    match event:
        case Admitted():
            _admitted(telemetry, parent, event)
        case Primed():
            telemetry.record("engine.prime", parent, event.start_ns, event.end_ns, _primed(event))
        case Burst():
            telemetry.record("engine.burst", parent, event.start_ns, event.end_ns, _burst(event))
        case Captured():
            telemetry.record("cache.capture", parent, event.end_ns, event.end_ns, _captured(event))
        case DrafterChosen():
            telemetry.record("engine.drafter", parent, event.end_ns, event.end_ns, _chosen(event))
        case DrafterOff():
            telemetry.record("engine.drafter_off", parent, event.end_ns, event.end_ns, _drafter_off(event))
        case Parked():
            telemetry.record("engine.parked", parent, event.end_ns, event.end_ns, _parked(event))
        case _:
            pass


def _admitted(telemetry: Telemetry, parent: Parent, event: Admitted) -> None:
    restore_start = event.end_ns - event.restore_ns
    telemetry.record(
        "engine.queue",
        parent,
        restore_start - event.queue_ns,
        restore_start,
        {"burstline.choice": event.choice},
    )
    if event.hit_key is not None or event.reuse == "decode":
        telemetry.record(
            "cache.restore",
            parent,
            restore_start,
            event.end_ns,
            {
                "burstline.choice": event.choice,
                "burstline.cached_tokens": event.cached_tokens,
                "burstline.reuse": event.reuse,
            },
        )


def _primed(event: Primed) -> dict[str, int]:
    return {
        "burstline.choice": event.choice,
        "burstline.tokens": event.tokens,
        "burstline.chunks": event.chunks,
    }


def _captured(event: Captured) -> dict[str, int]:
    return {
        "burstline.position": event.position,
        "burstline.state_bytes": event.state_bytes,
        "burstline.kv_bytes": event.kv_bytes,
    }


def _parked(event: Parked) -> dict[str, int]:
    return {
        "burstline.choice": event.choice,
        "burstline.retries": event.retries,
        "burstline.preempted": event.preempted,
        "burstline.tokens": event.emitted,
    }


def _burst(event: Burst) -> dict[str, int]:
    return {
        "burstline.choice": event.choice,
        "burstline.offset": event.offset,
        "burstline.tokens": len(event.tokens),
        **({"burstline.replayed": event.replayed} if event.replayed else {}),
        "burstline.rounds": event.rounds,
        "burstline.drafted": event.drafted,
        "burstline.accepted": event.accepted,
    }


def end(terminal: Terminal) -> dict[str, str | int | bool]:
    """What the request's own span says at its end."""
    return {
        "burstline.cache_decision": terminal.cache_decision,
        "burstline.prompt_tokens": terminal.prompt_tokens,
        "burstline.cached_tokens": terminal.cached_tokens,
        "burstline.reuse": terminal.reuse,
        "burstline.exact": terminal.exact,
        "burstline.scored_tokens": terminal.scored_tokens,
        "burstline.completion_tokens": terminal.completion_tokens,
        "burstline.failure": terminal.failure.code if terminal.failure else "",
    }


def _chosen(event: DrafterChosen) -> dict[str, int | str | float]:
    told: dict[str, int | str | float] = {
        "burstline.choice": event.choice,
        "burstline.drafter": event.drafter,
        "burstline.reason": event.reason.value,
    }
    return told | {f"burstline.gain.{kind}": round(gain, 3) for kind, gain in event.gains}


def _drafter_off(event: DrafterOff) -> dict[str, int | str | float]:
    return {
        "burstline.choice": event.choice,
        "burstline.drafter": event.drafter,
        "burstline.reason": event.reason.value,
        "burstline.tokens_per_verify": event.tokens_per_verify,
    }
