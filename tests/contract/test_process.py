"""The real process is told to stop, or killed, in the middle of its work: what each client sees."""

import http.client
import json
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import openai
import pyarrow as pa
import pytest
import requests
import urllib3

from logitwire import Client, LogitwireError
from ops.bench.clients import Ask, ask
from ops.process import ServerProcess
from schemas.arrow import MEDIA_TYPE
from tests.conftest import Serve
from tests.serving import eventually

MESSAGES = [{"role": "user", "content": "Say hi."}]
CHAT = "/v1/chat/completions"
ENDLESS = {"messages": MESSAGES, "temperature": 0, "ignore_eos": True, "max_tokens": 3500}

Start = Callable[..., ServerProcess]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start one process with the scripted model; it is gone at the end, however it ended."""
    started: list[ServerProcess] = []

    def serve(**environ: str) -> ServerProcess:
        environ = {"MODEL_NAME": "scripted", "THREADS": "1", **environ}
        started.append(ServerProcess(tmp_path / "log", **environ))
        return started[0]

    yield serve
    for each in started:
        each.stop(signal.SIGKILL)


def metric(url: str, *names: str) -> float:
    """Return the sum of all series of these names."""
    lines = httpx.get(f"{url}/metrics").text.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(names))


def mixed(num: int, max_tokens: int) -> list[Ask]:
    """Return requests of all forms, in turn."""
    body = {**ENDLESS, "max_tokens": max_tokens}
    return [
        (
            Ask("arrow", CHAT, body, is_arrow=True),
            Ask("events", CHAT, {**body, "stream": True}),
            Ask("json", CHAT, {**body, "return_logits": True}),
            Ask("generate", "/inference/v1/generate", {"token_ids": [1, 2], "max_tokens": max_tokens}),
        )[place % 4]
        for place in range(num)
    ]


def under_load(url: str, asks: list[Ask]) -> tuple[ThreadPoolExecutor, list[Future[str]]]:
    """Have all of them asked at once, more than run at a time, and wait until all are taken."""
    pool = ThreadPoolExecutor(len(asks))
    asked = [pool.submit(ask, url, each) for each in asks]
    taken = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:request_success_total")
    eventually(lambda: metric(url, *taken) == len(asks))
    return pool, asked


def test_a_process_that_is_told_to_stop_finishes_all_that_it_took_and_takes_nothing_new(start: Start) -> None:
    server = start(MAX_BATCH_SIZE="4", DRAIN_TIMEOUT="100")
    asks = mixed(32, max_tokens=250)
    pool, asked = under_load(server.url, asks)
    with pool:
        server.send_signal(signal.SIGTERM)
        refused = Ask("new", CHAT, {"messages": MESSAGES})
        eventually(lambda: ask(server.url, refused) == "refused shutting_down")
        assert [each.result() for each in asked] == ["whole"] * 32
    assert server.wait() == 0


def test_an_echo_of_the_signal_does_not_change_the_exit_code(start: Start) -> None:
    server = start()
    server.send_signal(signal.SIGTERM)
    eventually(lambda: "Finished server process" in server.log_path.read_text())
    assert server.stop(signal.SIGTERM) == 0


def test_what_outlasts_the_drain_fails_in_each_form(serve: Serve) -> None:
    server = serve(max_batch_size=4, drain_timeout=0.1)
    pool, asked = under_load(server.url, mixed(32, max_tokens=3500))
    with pool:
        server.loop.call_soon_threadsafe(server.server.begin_drain)
        ends = {each.result() for each in asked}
    # Streams that had begun end by an error of their own, the others by its status.
    assert ends - {"whole"} == {"failed shutting_down", "refused shutting_down"}


def whole_with_client(url: str, began: Callable[[], None]) -> object:
    began()
    return Client(url).chat(MESSAGES, max_tokens=3500, temperature=0, ignore_eos=True)


def table_with_http_client(url: str, began: Callable[[], None]) -> object:
    with closing(http.client.HTTPConnection(urlsplit(url).netloc, timeout=60)) as connection:
        connection.request("POST", CHAT, json.dumps(ENDLESS), {"accept": MEDIA_TYPE})
        response = connection.getresponse()
        began()
        return pa.ipc.open_stream(response).read_all()


def table_with_urllib3(url: str, began: Callable[[], None]) -> object:
    with urllib3.PoolManager() as pool:
        headers = {"accept": MEDIA_TYPE}
        response = pool.request("POST", url + CHAT, json=ENDLESS, headers=headers, preload_content=False)
        began()
        return pa.ipc.open_stream(response).read_all()


def table_with_requests(url: str, began: Callable[[], None]) -> object:
    headers = {"accept": MEDIA_TYPE}
    with requests.post(url + CHAT, json=ENDLESS, headers=headers, stream=True, timeout=60) as response:
        began()
        return pa.ipc.open_stream(response.content).read_all()


def table_with_httpx(url: str, began: Callable[[], None]) -> object:
    with httpx.stream(
        "POST", url + CHAT, json=ENDLESS, headers={"accept": MEDIA_TYPE}, timeout=60
    ) as response:
        began()
        return pa.ipc.open_stream(response.read()).read_all()


def events_with_the_sdk(url: str, began: Callable[[], None]) -> object:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as sdk:
        body: Any = {"messages": MESSAGES, "max_tokens": 3500, "extra_body": {"ignore_eos": True}}
        chunks = sdk.chat.completions.create(model="scripted", stream=True, **body)
        first = next(iter(chunks))
        began()
        return [first, *chunks]


def json_with_httpx(url: str, began: Callable[[], None]) -> object:
    began()
    return httpx.post(url + CHAT, json={**ENDLESS, "return_logits": True}, timeout=60).json()


def json_with_the_sdk(url: str, began: Callable[[], None]) -> object:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as sdk:
        began()
        body: Any = {"messages": MESSAGES, "max_tokens": 3500, "extra_body": {"ignore_eos": True}}
        return sdk.chat.completions.create(model="scripted", **body)


READERS = [
    whole_with_client,
    table_with_http_client,
    table_with_urllib3,
    table_with_requests,
    table_with_httpx,
    events_with_the_sdk,
    json_with_httpx,
    json_with_the_sdk,
]

FAILURES = (
    LogitwireError,
    http.client.IncompleteRead,
    urllib3.exceptions.ProtocolError,
    requests.RequestException,
    httpx.TransportError,
    openai.APIConnectionError,
)


def test_every_client_of_a_process_that_is_killed_sees_a_failure(start: Start) -> None:
    server = start(MAX_BATCH_SIZE="16")
    # Two of each. All have begun to read when it is killed, and none has all.
    began = threading.Barrier(2 * len(READERS) + 1, timeout=60)
    with ThreadPoolExecutor(2 * len(READERS)) as pool:
        asked = [(each, pool.submit(each, server.url, began.wait)) for each in READERS * 2]
        began.wait()
        eventually(lambda: metric(server.url, "vllm:num_requests_running") == 2 * len(READERS))
        time.sleep(0.2)  # some rows more, so that the cut is anywhere in a stream
        assert server.stop(signal.SIGKILL) == -signal.SIGKILL
        for reader, answer in asked:
            error = answer.exception(timeout=60)
            assert isinstance(error, FAILURES), f"{reader.__name__}: {error!r}"
