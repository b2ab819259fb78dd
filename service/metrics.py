"""Counters and gauges for Prometheus, under vLLM's names where they mean the same."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from engine.engine import Engine
from engine.types import Finish

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Metrics:
    """What one server has done since its start, and what it does now."""

    def __init__(self, engine: Engine) -> None:
        self._registry = CollectorRegistry()
        self._prompt_tokens = self._counter("vllm:prompt_tokens", "Prompt tokens of finished requests")
        self._generation_tokens = self._counter("vllm:generation_tokens", "Tokens generated")
        self._prefix_queries = self._counter(
            "vllm:prefix_cache_queries", "Prompt tokens looked up in the cache"
        )
        self._prefix_hits = self._counter("vllm:prefix_cache_hits", "Prompt tokens found there")
        self._rows = self._counter("logitwire:rows", "Rows of logits sent")
        self._row_bytes = self._counter("logitwire:row_bytes", "Bytes of rows sent, before any encoding")
        self._success = Counter(
            "vllm:request_success", "Sequences by finish reason", ["finished_reason"], registry=self._registry
        )
        self._outcomes = Counter(
            "logitwire:answers", "Answers by outcome", ["outcome"], registry=self._registry
        )
        self._queue_s = self._histogram("vllm:request_queue_time_seconds", "Time until admission")
        self._first_token_s = self._histogram(
            "vllm:time_to_first_token_seconds", "Time until the first token"
        )
        running = Gauge("vllm:num_requests_running", "Requests that run", registry=self._registry)
        running.set_function(lambda: max(0, engine.num_requests - engine.num_waiting))
        waiting = Gauge("vllm:num_requests_waiting", "Requests that wait", registry=self._registry)
        waiting.set_function(lambda: engine.num_waiting)

    def finished(self, num_prompt: int, num_tokens: int, finish: Finish) -> None:
        """Count one sequence that ended by itself."""
        self._prompt_tokens.inc(num_prompt)
        self._generation_tokens.inc(num_tokens)
        self._prefix_queries.inc(num_prompt)
        self._prefix_hits.inc(finish.num_cached)
        self._success.labels(finish.reason.value).inc()
        self._queue_s.observe(finish.timings.queue_s)
        self._first_token_s.observe(finish.timings.queue_s + finish.timings.prefill_s)

    def answered(self, outcome: str, num_rows: int, num_bytes: int) -> None:
        """Count one answer, however it ended."""
        self._outcomes.labels(outcome).inc()
        self._rows.inc(num_rows)
        self._row_bytes.inc(num_bytes)

    def text(self) -> bytes:
        """Return everything in Prometheus' text format."""
        return generate_latest(self._registry)

    def _counter(self, name: str, help_text: str) -> Counter:
        return Counter(name, help_text, registry=self._registry)

    def _histogram(self, name: str, help_text: str) -> Histogram:
        return Histogram(name, help_text, registry=self._registry)
