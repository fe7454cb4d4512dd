"""docs/operations.md says what there is: every setting with its default, every metric with its kind and labels."""

from __future__ import annotations

import re
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.metrics import MetricWrapperBase

from services.cache_broker.config import BrokerSettings
from services.cache_broker.handlers import Handlers
from services.cache_broker.hearing import Hearing
from services.cache_broker.journals import Journals
from services.cache_broker.settle import Settler
from services.cache_broker.sweeper import Sweeper
from services.embedded.config import EmbeddedSettings
from services.gateway.config import GatewaySettings
from services.gateway.metrics import Metrics
from services.gpu_worker.config import WorkerSettings
from services.gpu_worker.metrics import EngineCollector, WorkerMetrics
from services.models.config import ModelSettings
from shared.clock import SYSTEM
from shared.config import CommonSettings, Settings
from tests.unit.services.gpu_worker.scripted import ScriptedEngine

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
ROWS = [[cell.strip() for cell in row.strip("|").split("|")] for row in TEXT.splitlines() if row[:1] == "|"]
CLASSES = (CommonSettings, GatewaySettings, WorkerSettings, BrokerSettings, EmbeddedSettings, ModelSettings)
IN_WORDS = {"BURSTLINE_GATEWAY_MODELS", "BURSTLINE_WORKER_MODEL_FOLDER", "BURSTLINE_WORKER_WORKER_ID"}
"""Their defaults are of the machine, or drawn."""
UNITS = ("_seconds", "_bytes", "_total")


def _spelled(value: Any) -> str:
    """A default as the table writes it."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, Enum):
        value = value.value
    return f"`{value:.10g}`" if isinstance(value, float) else f"`{value}`"


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_every_setting_is_told_with_its_default(kind: type[Settings]) -> None:
    told = {row[0].strip("`"): row[1] for row in ROWS if row[0].startswith("`BURSTLINE_")}
    expected = dict(zip(kind.variables(), kind.model_fields.values(), strict=True))
    assert expected.keys() - told.keys() == set()
    wrong = {
        name: (told[name], _spelled(field.default))
        for name, field in expected.items()
        if name not in IN_WORDS and told[name] != _spelled(field.default)
    }
    assert wrong == {}


def test_no_setting_is_told_that_is_not() -> None:
    told = {row[0].strip("`") for row in ROWS if row[0].startswith("`BURSTLINE_")}
    assert told - {name for kind in CLASSES for name in kind.variables()} == set()


def _registry() -> CollectorRegistry:
    """The metrics of all services; nothing behind them runs."""
    registry = CollectorRegistry(auto_describe=True)
    nothing: Any = None
    settings = BrokerSettings()
    hearing = Hearing(settings, SYSTEM)
    Metrics(registry)
    WorkerMetrics(registry)
    engine = ScriptedEngine(clock=SYSTEM)  # type: ignore[arg-type]
    registry.register(EngineCollector(engine.stats))
    Handlers(nothing, settings, SYSTEM, registry, hearing)
    Sweeper(nothing, settings, SYSTEM, registry, hearing)
    Journals(nothing, SYSTEM, registry, grace_s=1.0)
    Settler(nothing, registry, ended=nothing, replay_s=1)
    return registry


def _known() -> dict[str, tuple[str, frozenset[str]]]:
    """Name as it is scraped -> kind and labels."""
    registry, found = _registry(), {}
    for collector, names in registry._collector_to_names.items():
        if isinstance(collector, MetricWrapperBase):
            labels = {name: frozenset(collector._labelnames) for name in names}
        else:
            metrics = list(collector.collect())
            labels = {
                metric.name: frozenset(key for sample in metric.samples for key in sample.labels)
                for metric in metrics
            }
        for metric in collector.collect():
            name = f"{metric.name}_total" if metric.type == "counter" else metric.name
            assert metric.documentation, f"{name} has no help"
            found[name] = (metric.type, labels[metric.name])
    return found


def test_every_metric_is_told_with_its_kind_and_labels() -> None:
    told = {
        row[0].strip("`"): (row[1], frozenset(filter(None, row[2].split(", "))))
        for row in ROWS
        if row[0].startswith("`burstline_")
    }
    assert told == _known()


def test_metrics_are_named_as_prometheus_wants_it() -> None:
    for name, (kind, labels) in _known().items():
        assert re.fullmatch(r"burstline_(gateway|worker|broker)_[a-z_]+", name), name
        assert name.endswith("_total") == (kind == "counter"), name
        assert kind != "histogram" or name.endswith(UNITS), f"{name} has no unit"
        assert labels.isdisjoint({"tenant", "request", "key", "prompt", "user"}), name
        assert not name.endswith(("_ms", "_ns", "_us")), f"{name} is not in base units"
