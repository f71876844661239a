"""Prometheus metrics."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from knnlm.index.base import RemoteStatus, remote_status

if TYPE_CHECKING:
    from knnlm.server.engine.scheduler import Scheduler

CONTENT_TYPE = CONTENT_TYPE_LATEST

_SECONDS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300)


class _SchedulerCollector(Collector):
    """Reads the scheduler's counters when metrics are requested."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        """Yield the metrics."""
        scheduler = self.scheduler
        gauges = {
            "knnlm_sequences_active": ("Sequences being read or generated.", scheduler.active),
            "knnlm_requests_waiting": ("Requests that wait for a slot.", scheduler.waiting),
            "knnlm_ready": ("1 if requests are processed.", float(scheduler.ready.is_set() and scheduler.alive)),
            "knnlm_traces": ("Texts that can be rescored.", len(scheduler.traces)),
            "knnlm_trace_bytes": ("Bytes of the traces.", scheduler.traces.bytes),
        }
        counters = {
            "knnlm_tokens_read": ("Tokens read by the model.", scheduler.tokens_read),
            "knnlm_tokens_generated": ("Tokens generated.", scheduler.tokens_generated),
            "knnlm_steps": ("Steps of the scheduler: forward passes over all sequences.", scheduler.steps),
            "knnlm_forward_seconds": ("Seconds in the model.", scheduler.forward_seconds),
            "knnlm_search_seconds": ("Seconds in searches.", scheduler.times.search),
            "knnlm_searches": ("Contexts searched for.", scheduler.times.searched),
            "knnlm_reloads": ("Reloads of the store after a change.", scheduler.reloads),
        }
        if scheduler.drafts is not None:
            counters["knnlm_tokens_drafted"] = ("Tokens drafted.", scheduler.drafts.drafted)
            counters["knnlm_tokens_accepted"] = (
                "Drafted tokens that became part of a text.",
                scheduler.drafts.accepted,
            )
        for status in _remote_statuses(scheduler):
            gauges["knnlm_shards"] = ("Shards that other processes hold.", status.shards)
            gauges["knnlm_shards_unreachable"] = ("Shards that are not searched.", len(status.unreachable))
            counters["knnlm_degraded_searches"] = ("Searches without some of the shards.", status.degraded)
            counters["knnlm_shard_retries"] = ("Calls of shards that were repeated.", status.retries)
            counters["knnlm_shard_timeouts"] = ("Calls of shards that took too long.", status.timeouts)
        for name, (description, value) in gauges.items():
            yield GaugeMetricFamily(name, description, value=value)
        for name, (description, value) in counters.items():
            yield CounterMetricFamily(name, description, value=value)


def _remote_statuses(scheduler: Scheduler) -> list[RemoteStatus]:
    """Return the counters of searches in other processes: one, as all stores share them, or none."""
    indexes = [getattr(memory, "index", None) for memory in scheduler.mixture.memories]
    found = [status for index in indexes if (status := remote_status(index)) is not None]
    return found[:1]


@dataclass(frozen=True)
class MetricValues:
    """A metric as data, for another process."""

    name: str
    description: str
    kind: str
    values: tuple[tuple[str, dict[str, str], float], ...]  # name, labels and value of each sample


def merged_metrics(replicas: Iterable[tuple[str, Iterable[MetricValues]]]) -> Iterator[Metric]:
    """Yield the metrics of several replicas; each value has the label `replica`."""
    merged: dict[str, Metric] = {}
    for replica, metrics in replicas:
        for metric in metrics:
            one = merged.setdefault(metric.name, Metric(metric.name, metric.description, metric.kind))
            for name, labels, value in metric.values:
                one.add_sample(name, {**labels, "replica": replica}, value)
    yield from merged.values()


class Metrics:
    """The metrics of one server; without a scheduler, those of requests only."""

    def __init__(self, scheduler: Scheduler | None = None) -> None:
        self.registry = CollectorRegistry()
        if scheduler is not None:
            self.registry.register(_SchedulerCollector(scheduler))
        self.requests = Counter(
            "knnlm_requests", "Requests by route and status.", ["route", "status"], registry=self.registry
        )
        self.seconds = Histogram(
            "knnlm_request_seconds",
            "Seconds from a request to the end of its response.",
            ["route"],
            buckets=_SECONDS,
            registry=self.registry,
        )

    def text(self, others: Iterable[Metric] = ()) -> bytes:
        """Return all metrics in Prometheus' format, and others after them."""
        return generate_latest(self.registry) + generate_latest(_Given(list(others)))

    def values(self) -> list[MetricValues]:
        """Return all metrics that have values as data."""
        return [
            MetricValues(metric.name, metric.documentation, metric.type, tuple(sample[:3] for sample in metric.samples))
            for metric in self.registry.collect()
            if metric.samples
        ]


class _Given(CollectorRegistry):
    """A registry of metrics with their values."""

    def __init__(self, metrics: list[Metric]) -> None:
        super().__init__()
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics."""
        yield from self._metrics
