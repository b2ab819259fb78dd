"""What the server has done and does now, for Prometheus.

Names are vLLM's where they mean the same, so that its dashboards work; the rest begins with ``logitwire:``.
The engine's numbers are read when somebody asks; to count them costs its steps next to nothing.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from prometheus_client import (
    CollectorRegistry,
    Counter,
    GCCollector,
    Histogram,
    Info,
    PlatformCollector,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from engine.engine import Engine
from engine.stats import SECONDS, Stats, Tally
from service.versions import versions

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

UNKNOWN_ROUTE = "other"
"""Stands for all paths that are none of the server's, or were refused before it looked."""


class Metrics:
    """Counts answers, and states everything as text."""

    def __init__(self, engine: Engine, served_model_name: str) -> None:
        """Begin at zero.

        Args:
            engine: Whose numbers are stated too.
            served_model_name: The model's name in the API; empty takes the engine's.
        """
        registry = self._registry = CollectorRegistry()
        self._outcomes = Counter(
            "logitwire:answers",
            "Answers of the routes that run the model, by outcome; `refused` is what the engine did not take",
            ["outcome"],
            registry=registry,
        )
        for outcome in ("answered", "failed", "refused", "client_left", "stalled"):
            self._outcomes.labels(outcome)
        self._requests = Counter(
            "logitwire:http_requests", "HTTP requests", ["route", "status"], registry=registry
        )
        self._request_s = Histogram(
            "logitwire:http_request_duration_seconds",
            "Time from a request's head to the end of its answer",
            ["route"],
            buckets=SECONDS,
            registry=registry,
        )
        Info("logitwire:build", "Versions of what shapes logits", registry=registry).info(versions())
        registry.register(_EngineCollector(engine, served_model_name))
        ProcessCollector(registry=registry)
        PlatformCollector(registry=registry)
        GCCollector(registry=registry)

    def answered(self, outcome: str) -> None:
        """Count one answer of a route that runs the model, however it ended."""
        self._outcomes.labels(outcome).inc()

    def served(self, route: str, status: int | None, seconds: float) -> None:
        """Count one HTTP request.

        Args:
            route: As the app declares it, or ``UNKNOWN_ROUTE``.
            status: ``None`` if the client left before there was one.
            seconds: That it took.
        """
        self._requests.labels(route, "none" if status is None else str(status)).inc()
        self._request_s.labels(route).observe(seconds)

    def text(self) -> bytes:
        """Return everything in Prometheus' text format."""
        return generate_latest(self._registry)


class _EngineCollector(Collector):
    """Reads the engine's numbers, once there is a model."""

    def __init__(self, engine: Engine, served_model_name: str) -> None:
        self._engine = engine
        self._served_model_name = served_model_name

    def collect(self) -> Iterator[Metric]:
        """Give out all metrics of the engine, each with the model's name."""
        engine, stats = self._engine, self._engine.stats
        if not engine.is_loaded:
            return
        model = self._served_model_name or engine.info.name
        for name, text, value in _gauges(engine):
            yield _with(GaugeMetricFamily(name, text, labels=["model_name"]), [model], value)
        for name, text, value in _counters(stats):
            yield _with(CounterMetricFamily(name, text, labels=["model_name"]), [model], value)
        for name, text, tally in _tallies(stats):
            histogram = HistogramMetricFamily(name, text, labels=["model_name"])
            histogram.add_metric([model], list(_buckets(tally)), tally.total)
            yield histogram
        ends = CounterMetricFamily(
            "vllm:request_success",
            "Sequences by how they ended; `error` is those that failed",
            labels=["model_name", "finished_reason"],
        )
        for reason, num in sorted(stats.ends.items()):
            ends.add_metric([model, reason], num)
        yield ends


def _gauges(engine: Engine) -> Iterable[tuple[str, str, float]]:
    return (
        ("vllm:num_requests_running", "Sequences that run", engine.num_running),
        ("vllm:num_requests_waiting", "Sequences that wait", engine.num_waiting),
        (
            "vllm:kv_cache_usage_perc",
            "Share of the KV cache that running sequences fill, 0 to 1; 0 without a limit",
            engine.kv_usage,
        ),
    )


def _counters(stats: Stats) -> Iterable[tuple[str, str, float]]:
    return (
        ("vllm:prompt_tokens", "Prompt tokens run, or found in the cache", stats.num_prompt_tokens),
        ("vllm:generation_tokens", "Tokens generated", stats.num_completion_tokens),
        ("vllm:prefix_cache_queries", "Prompt tokens looked up in the cache", stats.num_looked_up),
        ("vllm:prefix_cache_hits", "Prompt tokens found there", stats.num_cached),
        ("vllm:num_preemptions", "Running sequences that had to make way", stats.num_preemptions),
        ("logitwire:rows", "Whole rows of logits taken off the device", stats.num_rows),
        ("logitwire:row_bytes", "Bytes of those rows, before any encoding", stats.row_bytes),
        ("logitwire:requests_refused", "Sequences that found the queue full", stats.num_refused),
    )


def _tallies(stats: Stats) -> Iterable[tuple[str, str, Tally]]:
    return (
        ("vllm:time_to_first_token_seconds", "Time to the first token", stats.first_token_s),
        ("vllm:inter_token_latency_seconds", "Time from a token to the next", stats.inter_token_s),
        ("vllm:e2e_request_latency_seconds", "Time of a sequence, waiting included", stats.e2e_s),
        ("vllm:request_queue_time_seconds", "Time until admission", stats.queue_s),
        ("vllm:request_prefill_time_seconds", "Time from admission to the prompt's end", stats.prefill_s),
        ("vllm:request_decode_time_seconds", "Time from there to the end", stats.decode_s),
        ("vllm:request_prompt_tokens", "Prompt tokens of a sequence", stats.prompt_tokens),
        ("vllm:request_generation_tokens", "Generated tokens of a sequence", stats.completion_tokens),
        ("vllm:iteration_tokens_total", "Tokens that a step ran", stats.step_tokens),
        ("logitwire:step_seconds", "Time of a step", stats.step_s),
        ("logitwire:step_batch_size", "Sequences that a step ran", stats.step_batch),
    )


def _with(family: Any, labels: Sequence[str], value: float) -> Metric:
    family.add_metric(labels, value)
    metric: Metric = family
    return metric


def _buckets(tally: Tally) -> Iterator[tuple[str, float]]:
    """Give out each bound with the number of values up to it."""
    names = [*map(floatToGoString, tally.bounds), "+Inf"]
    return zip(names, tally.cumulative(), strict=True)
