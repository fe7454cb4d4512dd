"""The worker's Prometheus metrics. Counters are fed by events, gauges read the engine's newest picture at a scrape."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from services.gpu_worker.engine.events import Burst, SpecTelemetry
from services.gpu_worker.engine.stats import AffinityCounts, DecodedCounts, EngineStats, PoolCounts
from shared.protocol.messages import Terminal


class WorkerMetrics:
    """What a worker counts. One instance a process and registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        counter = partial(Counter, registry=registry)
        self.requests = counter(
            "burstline_worker_requests",
            "Attempts by how they ended (done, failed, cancelled, fenced, abandoned, refused, handed_back)",
            ["end"],
        )
        self.cache = counter("burstline_worker_cache_decisions", "Cache decisions of requests", ["decision"])
        self.captures = counter("burstline_worker_captures", "Boundary captures by outcome", ["outcome"])
        self.evictions = counter("burstline_worker_evictions", "Entries evicted, by reason", ["reason"])
        self.tokens = counter("burstline_worker_tokens", "Completion tokens")
        self.prompt_tokens = counter("burstline_worker_prompt_tokens", "Prompt tokens")
        self.cached_tokens = counter("burstline_worker_cached_tokens", "Prompt tokens served from entries")
        self.drafts = DraftMetrics(registry)
        self.parked = counter(
            "burstline_worker_parked_streams",
            "Streams set aside because a step did not fit into memory, or to give way to an older one",
        )
        self.epochs = counter(
            "burstline_worker_epochs_lost",
            "Epochs that the broker declared over: everything cached was given back",
        )
        self.frames = counter("burstline_worker_frames", "Token frames journalled")
        self.stalls = counter(
            "burstline_worker_stalled_requests", "Requests left to others for lack of progress"
        )
        self.unbegun = counter(
            "burstline_worker_unbegun",
            "Deliveries given back by a fault before anything could be written of them",
        )
        self.queue_depth = Gauge(
            "burstline_worker_queue_depth",
            "Requests in the queue, waiting or claimed: for any worker, by priority, and for this one first (own)",
            ["queue"],
            registry=registry,
        )
        self.taken = counter(
            "burstline_worker_taken",
            "Deliveries, by the queue they came from (own, high, normal, low; spill = what another worker left, orphans = from other numerics)",
            ["queue"],
        )
        self.queue_seconds = Histogram(
            "burstline_worker_queue_seconds",
            "From the gateway's publish to admission",
            buckets=(0.005, 0.02, 0.1, 0.5, 1, 2, 5, 10, 30, 60),
            registry=registry,
        )

    def ended(self, terminal: Terminal) -> None:
        """A terminal was journalled."""
        self.cache.labels(terminal.cache_decision).inc()
        self.prompt_tokens.inc(terminal.prompt_tokens)
        self.cached_tokens.inc(terminal.cached_tokens)
        self.queue_seconds.observe(terminal.queue_ns / 1e9)


class DraftMetrics:
    """What speculation did: rounds, drafts, and who drafted."""

    def __init__(self, registry: CollectorRegistry) -> None:
        counter = partial(Counter, registry=registry)
        self.rounds = counter(
            "burstline_worker_rounds", "Verify rounds, but for those over journalled tokens"
        )
        self.drafted = counter("burstline_worker_drafted_tokens", "Drafted tokens")
        self.accepted = counter("burstline_worker_accepted_tokens", "Accepted drafts")
        self.replayed = counter(
            "burstline_worker_replayed_tokens",
            "Tokens of ended streams that were verified again because a journal, or an earlier life of the stream, had them",
        )
        self.drafted_at = counter(
            "burstline_worker_position_drafted_tokens",
            "Drafted tokens of ended streams, by position in their draft (1 = the first)",
            ["position"],
        )
        self.accepted_at = counter(
            "burstline_worker_position_accepted_tokens",
            "Accepted drafts of ended streams, by position in their draft",
            ["position"],
        )
        self.chosen = counter(
            "burstline_worker_drafters_chosen",
            "Drafters that the worker chose, by drafter and reason (gain, probe, no_gain, switch)",
            ["drafter", "reason"],
        )
        self.off = counter(
            "burstline_worker_drafters_off",
            "Streams that lost their drafter, by drafter and reason (load, acceptance, context, absent, prompt, draft_rows)",
            ["drafter", "reason"],
        )

    def verified(self, burst: Burst) -> None:
        """A burst ended."""
        self.rounds.inc(burst.rounds)
        self.drafted.inc(burst.drafted)
        self.accepted.inc(burst.accepted)

    def spent(self, telemetry: SpecTelemetry) -> None:
        """A stream ended: what its drafts came to, and its journal."""
        self.replayed.inc(telemetry.replayed)
        for counter, counts in (
            (self.drafted_at, telemetry.drafted_at),
            (self.accepted_at, telemetry.accepted_at),
        ):
            for position, count in enumerate(counts, start=1):
                counter.labels(str(position)).inc(count)


class EngineCollector(Collector):
    """Gauges of the pools and queues."""

    def __init__(self, stats: Callable[[], EngineStats | None]) -> None:
        self._stats = stats

    def collect(self) -> Iterable[Metric]:
        """Nothing before the engine is built."""
        stats = self._stats()
        if stats is None:
            return
        pools = GaugeMetricFamily(
            "burstline_worker_pool", "Pool pieces by pool and holder", labels=["pool", "holder"]
        )
        for name, counts in (
            ("blocks", stats.blocks),
            ("slots", stats.slots),
            ("snapshots", stats.snapshots),
        ):
            for holder, value in _holders(counts):
                pools.add_metric([name, holder], value)
        yield pools
        queue = GaugeMetricFamily(
            "burstline_worker_sequences", "Sequences by phase, captures, entries", labels=["phase"]
        )
        for phase in ("waiting", "priming", "decoding", "speculating", "pending_captures", "entries"):
            queue.add_metric([phase], getattr(stats, phase))
        yield queue
        yield from _affinity(stats.affinity)
        yield from _turns(stats.affinity)
        yield from _decoded(stats.decoded)
        yield from _host_tier(stats)


def _affinity(counts: AffinityCounts) -> Iterable[Metric]:
    parked = GaugeMetricFamily("burstline_worker_parked_sessions", "Sessions parked for their next turn")
    parked.add_metric([], counts.parked)
    yield parked
    prompts = CounterMetricFamily(
        "burstline_worker_affinity_prompts",
        "Prompts that went on from a parked session (served), and those that did not, by reason",
        labels=["outcome"],
    )
    prompts.add_metric(["served"], counts.served)
    for reason, count in counts.declined:
        prompts.add_metric([f"declined_{reason}"], count)
    yield prompts


def _turns(counts: AffinityCounts) -> Iterable[Metric]:
    turns = CounterMetricFamily(
        "burstline_worker_decoded_turns",
        "Prompts of reuse=decode: served from what an earlier turn decoded, or why not",
        labels=["outcome"],
    )
    for outcome, count in ({"served": 0} | dict(counts.turns)).items():
        turns.add_metric([outcome], count)
    yield turns


def _decoded(counts: DecodedCounts) -> Iterable[Metric]:
    held = GaugeMetricFamily(
        "burstline_worker_decoded_states",
        "Decode-made states kept beside the tree: checkpoints of streams, and turns that wait for their next one",
        labels=["kind"],
    )
    held.add_metric(["checkpoint"], counts.held - counts.parked)
    held.add_metric(["parked"], counts.parked)
    yield held
    moves = CounterMetricFamily(
        "burstline_worker_decoded_state_moves", "Decode-made states by what became of them", labels=["move"]
    )
    for move in ("kept", "restored", "dropped"):
        moves.add_metric([move], getattr(counts, move))
    yield moves


def _host_tier(stats: EngineStats) -> Iterable[Metric]:
    held = GaugeMetricFamily("burstline_worker_host_tier_bytes", "What the host tier holds")
    held.add_metric([], stats.host_bytes)
    yield held
    moves = CounterMetricFamily(
        "burstline_worker_host_tier_moves",
        "Blocks and states that went to the host tier, came back, or were not what had been taken (each a miss)",
        labels=["move"],
    )
    for move in ("spilled", "brought_back", "mismatches"):
        moves.add_metric([move], getattr(stats, move))
    yield moves


def _holders(counts: PoolCounts) -> tuple[tuple[str, int], ...]:
    return (("free", counts.free), ("owned", counts.owned), ("cached", counts.cached))
