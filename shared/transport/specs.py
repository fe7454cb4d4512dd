"""Streams and durable consumers, made as their specs say; one that cannot be brought to its spec is told with the field."""

from __future__ import annotations

from typing import Any, Final

from shared.errors import Conflict, NotFound, Unavailable
from shared.protocol.subjects import ConsumerSpec, StreamSpec
from shared.transport import jetstream
from shared.transport.wire import NobodyListens, Unanswered, Wire

_NS: Final = 1_000_000_000


def stream_config(spec: StreamSpec) -> dict[str, Any]:
    """The fields of a stream that are ours; others (replicas, placement) belong to who runs the server.

    A full stream refuses (discard new): dropping the oldest would lose work that was accepted.
    """
    config: dict[str, Any] = {
        "name": spec.name,
        "subjects": list(spec.subjects),
        "retention": "workqueue" if spec.work_queue else "limits",
        "storage": "file",
        "discard": "new",
        "max_bytes": spec.max_bytes,
        "max_age": spec.max_age_s * _NS,
        "max_msg_size": spec.max_msg_bytes,
        "max_msgs_per_subject": spec.max_msgs_per_subject,
        "duplicate_window": spec.duplicate_window_s * _NS,
        "allow_direct": True,
    }
    if spec.max_consumers is not None:
        config["max_consumers"] = spec.max_consumers
    if spec.bells is not None:
        tail = spec.subjects[0].partition(".")[2]
        config["republish"] = {
            "src": spec.subjects[0],
            "dest": f"{spec.bells}.{tail}",
            "headers_only": True,
        }
    return config


async def ensure_stream(wire: Wire, spec: StreamSpec) -> None:
    """Create the stream, or bring the one that is to the spec. Raises Conflict naming the field that cannot change."""
    wanted = stream_config(spec)
    try:
        await jetstream.insist(wire, f"STREAM.CREATE.{spec.name}", {**wanted, "num_replicas": 1})
        return
    except Conflict:
        known = (await jetstream.call(wire, f"STREAM.INFO.{spec.name}", {}))["config"]
    drift = differing(wanted, known)
    if not drift:
        return
    try:
        await jetstream.insist(wire, f"STREAM.UPDATE.{spec.name}", {**known, **wanted})
    except Unavailable as error:
        if isinstance(error, Unanswered | NobodyListens):
            raise
        if drift == ["max_consumers"] and known.get("max_consumers", -1) < 1:
            return  # a server that cannot change it has no limit where none is said
        raise Conflict(
            f"stream {spec.name} differs in {', '.join(drift)} and the server keeps it: {error}"
        ) from error


def consumer_config(spec: ConsumerSpec) -> dict[str, Any]:
    """The fields of a durable pull consumer. `max_deliver` is unlimited: poison is ours to count."""
    config: dict[str, Any] = {
        "name": spec.durable,
        "durable_name": spec.durable,
        "deliver_policy": "all",
        "ack_policy": "explicit",
        "replay_policy": "instant",
        "ack_wait": int(spec.ack_wait_s * _NS),
        "max_ack_pending": spec.max_ack_pending,
        "max_deliver": -1,
        "max_waiting": 512,
        "filter_subject": spec.filter_subject,
    }
    if spec.idle_limit_s is not None:
        config["inactive_threshold"] = int(spec.idle_limit_s * _NS)
    if spec.group is not None:
        config["priority_policy"] = "prioritized"
        config["priority_groups"] = [spec.group]
    return config


async def ensure_consumer(wire: Wire, spec: ConsumerSpec) -> None:
    """Create or update the consumer. Raises Conflict naming what differs when the server cannot change it, NotFound
    without its stream."""
    wanted = consumer_config(spec)
    operation = f"CONSUMER.CREATE.{spec.stream}.{spec.durable}.{spec.filter_subject}"
    try:
        await jetstream.insist(wire, operation, {"stream_name": spec.stream, "config": wanted, "action": ""})
        return
    except Unavailable as error:
        if isinstance(error, Unanswered | NobodyListens):
            raise
        refusal = error
    try:
        known = (await jetstream.call(wire, f"CONSUMER.INFO.{spec.stream}.{spec.durable}", {}))["config"]
    except NotFound:
        raise Conflict(f"consumer {spec.durable} was refused: {refusal}") from refusal
    drift = ", ".join(differing(wanted, known)) or "nothing that we set"
    raise Conflict(
        f"consumer {spec.durable} differs in {drift} and the server keeps it: {refusal}"
    ) from refusal


def differing(wanted: dict[str, Any], known: dict[str, Any]) -> list[str]:
    """The fields of `wanted` that `known` has otherwise (a field at its zero value may be absent there)."""
    return [name for name, value in wanted.items() if known.get(name, type(value)()) != value]
