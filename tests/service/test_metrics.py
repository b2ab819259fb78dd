"""``/metrics``: each thing that can happen is counted once, under the right name."""

import contextlib
import http.client
import json
import threading
from typing import Any

import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families

from engine.config import EngineConfig
from engine.runner import CacheFullError
from service.settings import Settings
from tests.conftest import Serve
from tests.fakes import hooked_load
from tests.service.test_life import Gate, in_thread, send_raw
from tests.serving import ServerThread, eventually

ARROW = "application/vnd.apache.arrow.stream"

OF_THE_ENGINE = {
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "vllm:prompt_tokens",
    "vllm:generation_tokens",
    "vllm:prefix_cache_queries",
    "vllm:prefix_cache_hits",
    "vllm:num_preemptions",
    "vllm:request_success",
    "vllm:time_to_first_token_seconds",
    "vllm:inter_token_latency_seconds",
    "vllm:e2e_request_latency_seconds",
    "vllm:request_queue_time_seconds",
    "vllm:request_prefill_time_seconds",
    "vllm:request_decode_time_seconds",
    "vllm:request_prompt_tokens",
    "vllm:request_generation_tokens",
    "vllm:iteration_tokens_total",
    "logitwire:rows",
    "logitwire:row_bytes",
    "logitwire:requests_refused",
    "logitwire:step_seconds",
    "logitwire:step_batch_size",
}
OF_THE_SERVICE = {
    "logitwire:answers",
    "logitwire:http_requests",
    "logitwire:http_request_duration_seconds",
    "logitwire:build_info",
    "process_resident_memory_bytes",
    "process_cpu_seconds",
    "process_open_fds",
    "python_info",
    "python_gc_collections",
}


def families(server: ServerThread) -> dict[str, Any]:
    text = server.request("GET", "/metrics").body.decode()
    found = list(text_string_to_metric_families(text))
    assert len({each.name for each in found}) == len(found)
    return {each.name: each for each in found}


def value(server: ServerThread, name: str, **labels: str) -> float:
    """Return a sample's value; 0 if there is no such sample."""
    samples = [sample for family in families(server).values() for sample in family.samples]
    found = [each.value for each in samples if each.name == name and labels.items() <= each.labels.items()]
    assert len(found) <= 1
    return found[0] if found else 0.0


def ends(server: ServerThread) -> dict[str, float]:
    samples = families(server)["vllm:request_success"].samples
    return {each.labels["finished_reason"]: each.value for each in samples if each.value}


def outcomes(server: ServerThread) -> dict[str, float]:
    samples = families(server)["logitwire:answers"].samples
    return {
        each.labels["outcome"]: each.value
        for each in samples
        if each.name == "logitwire:answers_total" and each.value
    }


def test_the_text_is_prometheus_and_has_every_metric(serve: Serve) -> None:
    server = serve(served_model_name="org/name")
    assert server.chat().status == 200
    assert server.request("GET", "/metrics").headers["content-type"].startswith("text/plain; version=0.0.4")
    found = families(server)
    assert set(found) >= OF_THE_ENGINE | OF_THE_SERVICE
    assert all(each.documentation for each in found.values())
    for name in OF_THE_ENGINE:
        assert {each.labels["model_name"] for each in found[name].samples} == {"org/name"}


def test_before_there_is_a_model_nothing_is_said_of_one() -> None:
    opened = threading.Event()

    def slow_load(config: EngineConfig) -> Any:
        assert opened.wait(20)
        return hooked_load()(config)

    server = ServerThread(Settings(port=0), slow_load)
    server.start(wait_ready=False)
    try:
        found = set(families(server))
        assert not found & OF_THE_ENGINE
        assert found >= OF_THE_SERVICE - {"logitwire:http_requests"}
        opened.set()
        eventually(lambda: set(families(server)) >= OF_THE_ENGINE)
    finally:
        opened.set()
        server.stop()


def test_tokens_and_rows_are_counted_as_the_answer_counts_them(serve: Serve) -> None:
    server = serve()
    assert value(server, "vllm:generation_tokens_total") == 0
    usage = server.chat(max_tokens=5, return_logits=True).json["usage"]
    assert value(server, "vllm:generation_tokens_total") == 5
    assert value(server, "vllm:prompt_tokens_total") == usage["prompt_tokens"]
    assert value(server, "vllm:prefix_cache_queries_total") == usage["prompt_tokens"]
    assert value(server, "vllm:prefix_cache_hits_total") == 0
    assert value(server, "logitwire:rows_total") == 5
    assert value(server, "logitwire:row_bytes_total") == 5 * 512 * 2
    assert ends(server) == {"length": 1}
    server.chat(return_prompt_logits=True, logits_encoding="b64_fp32", max_tokens=0)
    rows = 5 + usage["prompt_tokens"] - 1
    assert value(server, "logitwire:rows_total") == rows
    assert value(server, "logitwire:row_bytes_total") == 5 * 512 * 2 + (rows - 5) * 512 * 4


def test_histograms_hold_one_value_for_each_thing_that_happened(serve: Serve) -> None:
    server = serve()
    answers = [server.chat(max_tokens=each).json for each in (1, 4)] + [server.chat(n=2, max_tokens=3).json]
    num_prompt = answers[0]["usage"]["prompt_tokens"]
    expected = {
        "vllm:time_to_first_token_seconds": 4,
        "vllm:e2e_request_latency_seconds": 4,
        "vllm:request_queue_time_seconds": 4,
        "vllm:request_prefill_time_seconds": 4,
        "vllm:request_decode_time_seconds": 4,
        "vllm:request_prompt_tokens": 4,
        "vllm:request_generation_tokens": 4,
        "vllm:inter_token_latency_seconds": 0 + 3 + 2 + 2,
    }
    assert {name: value(server, f"{name}_count") for name in expected} == expected
    assert value(server, "vllm:request_generation_tokens_sum") == 1 + 4 + 3 + 3
    assert value(server, "vllm:request_prompt_tokens_sum") == 4 * num_prompt
    # Every token is run but the last one of each.
    eventually(lambda: value(server, "vllm:iteration_tokens_total_sum") == 4 * num_prompt + 0 + 3 + 2 + 2)
    num_steps = value(server, "logitwire:step_seconds_count")
    assert value(server, "logitwire:step_batch_size_count") == num_steps
    assert value(server, "vllm:iteration_tokens_total_count") == num_steps
    for name in OF_THE_ENGINE:
        buckets = [each for each in families(server)[name].samples if each.name.endswith("_bucket")]
        assert [each.value for each in buckets] == sorted(each.value for each in buckets)
        assert [each.labels["le"] for each in buckets[-1:]] in ([], ["+Inf"])


@pytest.mark.parametrize("accept", ["application/json", ARROW])
def test_an_answer_that_ends_by_itself(serve: Serve, accept: str) -> None:
    server = serve()
    assert server.chat(headers={"accept": accept}).status == 200
    assert ends(server) == {"stop": 1}
    eventually(lambda: outcomes(server) == {"answered": 1})


def test_each_choice_is_a_sequence_of_one_answer(serve: Serve) -> None:
    server = serve()
    assert server.chat(n=3, max_tokens=2).status == 200
    assert ends(server) == {"length": 3}
    eventually(lambda: outcomes(server) == {"answered": 1})


@pytest.mark.parametrize("place", [0, 2])
@pytest.mark.parametrize("fields", [{}, {"stream": True}, {"headers": {"accept": ARROW}}])
def test_an_answer_that_fails(serve: Serve, place: int, fields: dict[str, Any]) -> None:
    def hook(at: int, row: torch.Tensor) -> None:
        if at == place:
            raise RuntimeError("boom")

    server = serve(hooked_load(hook))
    with contextlib.suppress(http.client.IncompleteRead):
        server.chat(**fields)
    eventually(lambda: outcomes(server) == {"failed": 1})
    assert ends(server) == {"error": 1}
    assert value(server, "vllm:e2e_request_latency_seconds_count") == 0


def test_a_request_that_cannot_be_run_is_no_failure(scripted: ServerThread) -> None:
    before = outcomes(scripted)
    reply = scripted.chat(logit_token_ids=[10**6])
    assert reply.status == 422
    eventually(lambda: outcomes(scripted).get("refused", 0) == before.get("refused", 0) + 1)
    assert outcomes(scripted).get("failed") == before.get("failed")


def test_a_client_that_leaves(serve: Serve) -> None:
    gate = Gate()
    server = serve(hooked_load(gate, max_model_len=10**9))
    connection = send_raw(server, ARROW, ignore_eos=True, return_logits=False, max_tokens=10**8)
    assert gate.reached.wait(20)
    connection.close()
    gate.opened.set()
    eventually(lambda: outcomes(server) == {"client_left": 1})
    eventually(lambda: ends(server) == {"abort": 1})


def test_a_reader_that_stalls(serve: Serve) -> None:
    vocab_size = 500_000
    server = serve(hooked_load(vocab_size=vocab_size), stall_timeout=0.2)
    connection = send_raw(server, ARROW, return_logits=True, max_tokens=9)
    eventually(lambda: outcomes(server) == {"stalled": 1})
    connection.close()


def test_a_request_that_is_aborted(serve: Serve) -> None:
    gate = Gate()
    server = serve(hooked_load(gate, max_model_len=10**9))
    body = {
        "token_ids": [1],
        "request_id": "mine",
        "sampling_params": {"ignore_eos": True, "max_tokens": 10**8},
    }
    thread, replies = in_thread(lambda: server.request("POST", "/inference/v1/generate", body))
    assert gate.reached.wait(20)
    assert server.request("POST", "/abort_requests", {"request_ids": ["mine"]}).status == 200
    gate.opened.set()
    thread.join()
    assert replies[0].status == 200
    assert ends(server) == {"abort": 1}
    eventually(lambda: outcomes(server) == {"answered": 1})


def test_a_full_queue(serve: Serve) -> None:
    gate = Gate()
    server = serve(hooked_load(gate), max_queue=1, max_batch_size=1)
    calls = [in_thread(server.chat)]
    assert gate.reached.wait(20)
    calls.append(in_thread(server.chat))
    eventually(lambda: value(server, "vllm:num_requests_waiting") == 1)
    assert value(server, "vllm:num_requests_running") == 1
    assert server.chat().status == 503
    assert value(server, "logitwire:requests_refused_total") == 1
    gate.opened.set()
    for thread, _ in calls:
        thread.join()
    assert ends(server) == {"stop": 2}
    eventually(lambda: outcomes(server) == {"answered": 2, "refused": 1})
    eventually(lambda: value(server, "vllm:num_requests_running") == 0)
    assert value(server, "vllm:num_requests_waiting") == 0


def test_the_cache_and_those_that_make_way_for_others(serve: Serve) -> None:
    gate = Gate()
    has_failed = False

    def hook(place: int, row: torch.Tensor) -> None:
        nonlocal has_failed
        if place == 2:
            gate(place, row)
        if place == 3 and not has_failed:
            has_failed = True
            raise CacheFullError

    def load(config: EngineConfig) -> Any:
        model, info = hooked_load(hook)(config)
        model.runner.capacity_tokens = 1000
        return model, info

    server = serve(load)
    thread, replies = in_thread(server.chat)
    assert gate.reached.wait(20)
    usage = value(server, "vllm:kv_cache_usage_perc")
    gate.opened.set()
    thread.join()
    num_prompt = replies[0].json["usage"]["prompt_tokens"]
    assert usage == (num_prompt + 1) / 1000
    assert value(server, "vllm:num_preemptions_total") == 1
    assert value(server, "vllm:prompt_tokens_total") == num_prompt
    assert ends(server) == {"stop": 1}
    assert value(server, "vllm:kv_cache_usage_perc") == 0


def test_http_requests_are_counted_by_route_and_status(serve: Serve) -> None:
    server = serve()
    server.chat(max_tokens=1)
    server.chat(max_tokens=-1)
    server.request("GET", "/v1/models/none")
    server.request("HEAD", "/health")
    for place in range(5):
        server.request("GET", f"/invented/{place}")
    server.request("DELETE", "/v1/chat/completions")

    def counts() -> dict[tuple[str, str], float]:
        samples = families(server)["logitwire:http_requests"].samples
        return {
            (each.labels["route"], each.labels["status"]): each.value
            for each in samples
            if each.name.endswith("_total") and each.labels["route"] != "/metrics"
        }

    eventually(lambda: sum(counts().values()) == 10)
    found = counts()
    assert found["/v1/chat/completions", "200"] == 1
    assert found["/v1/chat/completions", "422"] == 1
    assert found["/health", "200"] == 1
    # However many paths are invented, they share one line.
    assert found["other", "404"] == 5
    assert sum(each for (_, status), each in found.items() if status == "405") == 1
    assert value(server, "logitwire:http_request_duration_seconds_count", route="/health") == 1


def test_scoring_counts_its_prompts_and_both_contexts_of_a_divergence(serve: Serve) -> None:
    server = serve()
    body = {"sequences": [{"token_ids": list(range(10))}, {"token_ids": list(range(20))}]}
    assert server.request("POST", "/v1/logits", body).status == 200
    assert value(server, "vllm:prompt_tokens_total") == 30
    assert value(server, "logitwire:rows_total") == 9 + 19
    assert value(server, "vllm:time_to_first_token_seconds_count") == 0
    both = {"p": {"token_ids": [1, 2, 3]}, "q": {"token_ids": [4, 5]}, "completion": {"token_ids": [6, 7]}}
    assert server.request("POST", "/v1/divergence", json.dumps(both).encode()).status == 200
    assert value(server, "vllm:prompt_tokens_total") == 30 + 5 + 4
    assert ends(server) == {"length": 3}
