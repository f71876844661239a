"""What a server tells Prometheus about itself. Knows nothing about what is counted."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from knnlm.server.engine.scheduler import Scheduler


TYPE = CONTENT_TYPE_LATEST

_SECONDS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300)


class _OfEngine(Collector):
    """Reads what the engine counts for itself when it is asked, so that the engine does nothing for it."""

    def __init__(self, engine: Scheduler) -> None:
        self.engine = engine

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        """Give the figures."""
        engine = self.engine
        gauges = {
            "knnlm_texts_active": ("Texts being read or written.", engine.active),
            "knnlm_requests_waiting": ("Requests that wait for a slot.", engine.waiting),
            "knnlm_ready": ("1 where the first query would succeed.", float(engine.ready.is_set() and engine.alive)),
            "knnlm_traces": ("Texts that can be scored again.", len(engine.recall)),
            "knnlm_trace_bytes": ("Bytes of what is remembered of them.", engine.recall.bytes),
        }
        counters = {
            "knnlm_tokens_read": ("Tokens that went through the model.", engine.tokens_read),
            "knnlm_tokens_generated": ("Tokens that were written.", engine.tokens_made),
            "knnlm_turns": ("Turns of the engine: forward passes over all texts.", engine.turns),
            "knnlm_forward_seconds": ("Time in the model.", engine.forward_seconds),
            "knnlm_search_seconds": ("Time in searching the memory.", engine.times.search),
            "knnlm_searches": ("Contexts that were searched for.", engine.times.searched),
            "knnlm_reopened": ("Times the memory had changed and was opened anew.", engine.reopened),
        }
        for name, (what, value) in gauges.items():
            yield GaugeMetricFamily(name, what, value=value)
        for name, (what, value) in counters.items():
            yield CounterMetricFamily(name, what, value=value)


class Metrics:
    """The figures of one server."""

    def __init__(self, engine: Scheduler) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(_OfEngine(engine))
        self.requests = Counter(
            "knnlm_requests", "Requests by route and status.", ["route", "status"], registry=self.registry
        )
        self.seconds = Histogram(
            "knnlm_request_seconds",
            "Time from a request to the end of its answer.",
            ["route"],
            buckets=_SECONDS,
            registry=self.registry,
        )

    def seen(self, route: str, status: int, seconds: float) -> None:
        """Count a request."""
        self.requests.labels(route, str(status)).inc()
        self.seconds.labels(route).observe(seconds)

    def text(self) -> bytes:
        """Give all figures as Prometheus reads them."""
        return generate_latest(self.registry)
