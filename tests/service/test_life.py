"""Loading, leaving, stalling, stopping: what happens around requests."""

import asyncio
import http.client
import json
import logging
import signal
import socket
import threading
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import pytest
import torch

from engine.config import EngineConfig
from service.answers import Answer
from service.server import announce
from tests.conftest import Serve
from tests.fakes import hooked_load
from tests.serving import Reply, ServerThread, eventually

ARROW = "application/vnd.apache.arrow.stream"


class Gate:
    def __init__(self) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()

    def __call__(self, place: int, row: torch.Tensor) -> None:
        self.reached.set()
        assert self.opened.wait(20)


def in_thread(call: Callable[[], Reply]) -> tuple[threading.Thread, list[Reply]]:
    replies: list[Reply] = []
    thread = threading.Thread(target=lambda: replies.append(call()))
    thread.start()
    return thread, replies


def test_while_the_model_loads_the_server_lives_but_is_not_ready() -> None:
    from service.settings import Settings

    opened = threading.Event()

    def slow_load(config: EngineConfig) -> Any:
        assert opened.wait(20)
        return hooked_load()(config)

    server = ServerThread(Settings(port=0), slow_load)
    server.start(wait_ready=False)
    try:
        assert server.request("GET", "/health").status == 200
        for reply in (server.request("GET", "/ready"), server.chat(), server.request("GET", "/v1/models")):
            assert (reply.status, reply.error["code"]) == (503, "loading")
            assert int(reply.headers["retry-after"]) > 0
        opened.set()
        eventually(lambda: server.request("GET", "/ready").status == 200)
        assert server.chat().status == 200
    finally:
        opened.set()
        server.stop()


def test_health_answers_while_a_step_blocks(serve: Serve) -> None:
    gate = Gate()
    server = serve(hooked_load(gate))
    thread, replies = in_thread(server.chat)
    assert gate.reached.wait(20)
    assert server.request("GET", "/health").status == 200
    assert server.request("GET", "/ready").json["running"] == 1
    gate.opened.set()
    thread.join()
    assert replies[0].status == 200


def test_head_leaves_the_connection_in_order(
    scripted: ServerThread, caplog: pytest.LogCaptureFixture
) -> None:
    connection: http.client.HTTPConnection = scripted.connect()
    for method, size in (("HEAD", 0), ("GET", 15), ("HEAD", 0)):
        connection.request(method, "/health")
        reply = Reply(connection.getresponse())
        assert (reply.status, len(reply.body), reply.headers["content-length"]) == (200, size, "15")
    connection.close()
    assert not [each for each in caplog.records if each.levelno >= logging.ERROR]


def test_a_step_that_failed_turns_ready_red_until_one_succeeds(serve: Serve) -> None:
    failing = True

    def hook(place: int, row: torch.Tensor) -> None:
        if failing and place == 1:
            raise RuntimeError("boom")

    server = serve(hooked_load(hook))
    assert server.chat().status == 500
    reply = server.request("GET", "/ready")
    assert (reply.status, reply.error["code"]) == (503, "internal_error")
    failing = False
    assert server.chat().status == 200
    assert server.request("GET", "/ready").status == 200


def test_a_dead_worker_fails_its_requests_and_turns_ready_red(serve: Serve) -> None:
    class Killed(BaseException):
        """Not an Exception, so no step survives it."""

    def hook(place: int, row: torch.Tensor) -> None:
        raise Killed

    server = serve(hooked_load(hook))
    for _ in range(2):
        reply = server.chat()
        assert (reply.status, reply.error["code"]) == (500, "internal_error")
    reply = server.request("GET", "/ready")
    assert (reply.status, reply.error["code"]) == (503, "internal_error")
    assert "Killed" in reply.error["message"]
    assert server.request("GET", "/health").status == 200


def test_a_request_past_its_deadline_is_504(serve: Serve) -> None:
    gate = Gate()
    server = serve(hooked_load(gate), deadline=0.05)
    thread, replies = in_thread(server.chat)
    assert gate.reached.wait(20)
    time.sleep(0.1)  # the time that it may take goes by
    gate.opened.set()
    thread.join()
    assert (replies[0].status, replies[0].error["code"]) == (504, "deadline_exceeded")


def test_a_full_queue_is_refused_at_once_and_says_when_to_come_back(serve: Serve) -> None:
    gate = Gate()
    server = serve(hooked_load(gate), max_queue=1, max_batch_size=1)
    threads = [in_thread(server.chat)]
    assert gate.reached.wait(20)
    threads.append(in_thread(server.chat))
    eventually(lambda: server.engine.num_waiting == 1)
    reply = server.chat()
    assert (reply.status, reply.error["code"]) == (503, "queue_full")
    assert reply.headers["retry-after"] == "1"
    gate.opened.set()
    for thread, replies in threads:
        thread.join()
        assert replies[0].status == 200


def send_raw(server: ServerThread, accept: str, **fields: Any) -> socket.socket:
    address = urlsplit(server.url)
    connection = socket.create_connection((address.hostname, address.port), timeout=20)
    body = json.dumps({"messages": [{"role": "user", "content": "x"}], "temperature": 0, **fields}).encode()
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\naccept: {accept}\r\nconnection: close\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    connection.sendall(head.encode() + body)
    return connection


def drain(connection: socket.socket) -> bytes:
    """Read what has come of an answer that is cut; return the end of it."""
    last = b""
    try:
        while received := connection.recv(2**20):
            last = received
    except ConnectionResetError:
        return last
    raise AssertionError("the kernel keeps the rest for a reader that takes nothing")


@pytest.mark.parametrize("accept", ["application/json", ARROW])
def test_a_client_that_leaves_frees_its_place(serve: Serve, accept: str) -> None:
    gate = Gate()
    server = serve(hooked_load(gate, max_model_len=10**9), max_batch_size=1)
    connection = send_raw(server, accept, ignore_eos=True, return_logits=False, max_tokens=10**8)
    assert gate.reached.wait(20)
    connection.close()
    gate.opened.set()
    # With one place only, this waits for ever unless the first request is gone.
    assert server.chat().status == 200
    eventually(lambda: server.engine.num_requests == 0)


def test_many_clients_that_leave_at_once_leave_nothing_behind(scripted: ServerThread) -> None:
    for _ in range(100):
        send_raw(scripted, ARROW, ignore_eos=True, max_tokens=500).close()
    assert scripted.chat().status == 200
    eventually(lambda: scripted.engine.num_requests == 0)
    assert scripted.engine.num_waiting == 0


def test_a_reader_that_stalls_is_cut_and_others_go_on(serve: Serve) -> None:
    vocab_size = 100_000
    server = serve(
        hooked_load(vocab_size=vocab_size),
        outbox_bytes=4 * vocab_size,
        stall_timeout=0.3,
        max_logit_tokens=10**6,
    )
    connection = send_raw(server, ARROW, ignore_eos=True, max_tokens=4000)
    assert server.chat().status == 200
    # It reads nothing; the socket's buffers fill, then its outbox, then its time is over.
    eventually(lambda: server.engine.num_requests == 0)
    # What the kernel holds still arrives, but no closing chunk: no client takes it for a whole answer.
    assert not drain(connection).endswith(b"0\r\n\r\n")
    connection.close()
    assert server.chat().status == 200


def test_a_reader_that_goes_on_after_the_engine_gave_it_up_is_cut_too(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def never(_: Answer) -> None:
        await asyncio.Event().wait()

    # The engine and the answer watch the reader, each on its own; here the engine is first.
    monkeypatch.setattr(Answer, "_stalled", never)
    vocab_size = 100_000
    server = serve(hooked_load(vocab_size=vocab_size), outbox_bytes=4 * vocab_size, stall_timeout=0.3)
    connection = send_raw(server, ARROW, ignore_eos=True, max_tokens=4000)
    eventually(lambda: "sequence failed" in caplog.messages)
    assert not drain(connection).endswith(b"0\r\n\r\n")
    connection.close()


@pytest.mark.parametrize("accept", ["application/json", ARROW])
def test_a_reader_that_stalls_once_all_is_generated_is_cut_too(serve: Serve, accept: str) -> None:
    vocab_size = 500_000
    server = serve(hooked_load(vocab_size=vocab_size), stall_timeout=0.3)
    connection = send_raw(server, accept, return_logits=True, max_tokens=9)
    eventually(lambda: server.engine.num_requests == 1)
    # All nine rows fit the outbox, and are more than the socket's buffers hold.
    eventually(lambda: server.engine.num_requests == 0)
    assert not drain(connection).endswith(b"0\r\n\r\n")
    connection.close()


def test_a_stopping_server_refuses_new_work_and_finishes_what_runs(serve: Serve) -> None:
    gate = Gate()
    server = serve(hooked_load(gate), drain_timeout=20)
    thread, replies = in_thread(server.chat)
    assert gate.reached.wait(20)
    server.loop.call_soon_threadsafe(server.server.begin_drain)
    eventually(lambda: server.chat().status == 503)
    refused = server.chat()
    assert (refused.error["code"], refused.headers["retry-after"]) == ("shutting_down", "5")
    gate.opened.set()
    thread.join()
    assert replies[0].status == 200


def test_a_second_signal_ends_the_drain_with_the_envelope(serve: Serve) -> None:
    gate = Gate()
    server = serve(hooked_load(gate), drain_timeout=60, max_batch_size=1)
    calls = [in_thread(server.chat) for _ in range(3)]
    assert gate.reached.wait(20)
    eventually(lambda: server.engine.num_requests == 3)
    server.loop.call_soon_threadsafe(server.server.begin_drain)
    eventually(lambda: server.engine.state == "draining")
    server.loop.call_soon_threadsafe(server.server.begin_drain)
    eventually(lambda: server.engine.state == "stopped")
    gate.opened.set()
    for thread, replies in calls:
        thread.join()
        assert (replies[0].status, replies[0].error["code"]) == (503, "shutting_down")


def test_signals_that_come_at_once_are_one(serve: Serve) -> None:
    gate = Gate()
    server = serve(hooked_load(gate), drain_timeout=60)
    thread, replies = in_thread(server.chat)
    assert gate.reached.wait(20)
    # GNU timeout passes on what the terminal has sent to all.
    server.server.handle_exit(signal.SIGINT, None)
    server.server.handle_exit(signal.SIGINT, None)
    eventually(lambda: server.engine.state == "draining")
    gate.opened.set()
    thread.join()
    assert replies[0].status == 200


def test_what_outlasts_the_drain_fails_loudly(serve: Serve) -> None:
    gate = Gate()
    server = serve(hooked_load(gate), drain_timeout=0.01)
    thread, replies = in_thread(server.chat)
    assert gate.reached.wait(20)
    server.loop.call_soon_threadsafe(server.server.begin_drain)
    eventually(lambda: server.engine.state == "stopped")
    gate.opened.set()
    thread.join()
    assert (replies[0].status, replies[0].error["code"]) == (503, "shutting_down")


@pytest.mark.parametrize(
    ("address", "called"),
    [
        ("http://0.0.0.0:8000", "curl -s http://127.0.0.1:8000/"),
        ("http://[::]:8000", "curl -s http://[::1]:8000/"),
        ("http://10.1.2.3:8000", "curl -s http://10.1.2.3:8000/"),
    ],
)
def test_the_line_to_paste_calls_an_address_that_can_be_called(
    address: str, called: str, capsys: pytest.CaptureFixture[str]
) -> None:
    announce(address, "a model", needs_key=False)
    said = capsys.readouterr().out
    assert f"serves a model at {address}\n" in said
    assert called in said
