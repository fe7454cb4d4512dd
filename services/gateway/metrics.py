"""The gateway's own figures for /metrics."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class Metrics:
    """One set a process; labels are bounded (route templates and models of this gateway, never what a caller wrote)."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.requests = Counter(
            "burstline_gateway_requests_total",
            "Responses, by route and status.",
            ("route", "status"),
            registry=registry,
        )
        self.seconds = Histogram(
            "burstline_gateway_request_seconds",
            "From the request's head to the last byte.",
            ("route",),
            buckets=_SECONDS,
            registry=registry,
        )
        self.first_token_seconds = Histogram(
            "burstline_gateway_first_token_seconds",
            "From the request's head to its first token frame.",
            ("model",),
            buckets=_SECONDS,
            registry=registry,
        )
        self.tokens = Counter(
            "burstline_gateway_tokens_total",
            "Tokens: prompt (cached ones included), cached, completion.",
            ("model", "kind"),
            registry=registry,
        )
        self.in_flight = Gauge("burstline_gateway_in_flight", "Generations that run now.", registry=registry)
        self.cut = Counter(
            "burstline_gateway_cut_total",
            "Generations that ended early, by reason.",
            ("reason",),
            registry=registry,
        )
        self.refused = Counter(
            "burstline_gateway_refused_total",
            "Requests refused because a limit on how many there may be was reached, by the error's code.",
            ("limit",),
            registry=registry,
        )
        self.routes = Counter(
            "burstline_gateway_routes_total", "Routing decisions.", ("reason",), registry=registry
        )
