"""Reads the cases, sends their requests to real servers, and keeps every answer with its timing.

A case of ``requests.jsonl`` is one JSON object:

- ``id``, ``area``, ``expect``: its name, its kind, and in words what must hold;
- ``method``, ``path``, ``headers``, and ``body``, or the exact bytes as ``raw`` or ``raw_b64``, or ``gen``: a
  ``template`` (a body) or ``raw_template`` (its text) whose ``<<NAME>>`` stands for what ``NAME`` describes;
- ``check``: what :func:`tests.cases.expect.check_answer` tests of the answer;
- ``needs``: the server that it takes, by default SmolLM2's; ``alone``: no other case may run beside it;
- ``repeat``: how often the request is sent; ``client``: how the client misbehaves, or which one it is;
- ``then``: further requests. ``when`` they are sent: before, concurrent or after. What they leave out is the
  first request's, or that of the request number ``copy_of``; ``set`` changes fields of the body, and ``null``
  takes them out; ``count`` repeats them; ``background`` leaves one that comes before running. ``derive`` says
  how ``<<NAME>>`` comes from earlier answers: values at paths that begin with a request's number, joined.

``MODEL`` stands for the served model's name.
"""

import base64
import http.client
import json
import math
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

import openai

DEADLINE_S = 90
"""For all requests of one case, some of which share the cores with those of other cases."""

AT_ONCE = 16
"""Requests of one step that are under way together."""

POLL_S = 0.02

THEN_KEYS = frozenset({"method", "path", "headers", "body", "raw", "check", "needs", "client"})
CASE_KEYS = THEN_KEYS | {"id", "area", "expect", "alone", "repeat", "raw_b64", "gen", "then"}
THEN_KEYS |= {"when", "copy_of", "set", "count", "background", "derive"}
SMOLLM2 = "SmolLM2"


class Target(Protocol):
    """A server under test."""

    url: str
    model: str
    pid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One request of a case, sent ``count`` times."""

    when: str
    method: str
    path: str
    headers: Mapping[str, str]
    body: Any = None
    raw: bytes | None = None
    needs: str = SMOLLM2
    check: Mapping[str, Any] | None = None
    count: int = 1
    client: Mapping[str, Any] = field(default_factory=dict)
    derive: Mapping[str, Sequence[str]] = field(default_factory=dict)
    is_background: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A case and its requests; the first one is number 0."""

    id: str
    expect: str
    check: Mapping[str, Any] | None
    is_alone: bool
    steps: tuple[Step, ...]


def load_cases() -> dict[str, Case]:
    """Return all cases by their id."""
    lines = Path(__file__).with_name("requests.jsonl").read_text().splitlines()
    cases = [read_case(json.loads(line)) for line in lines]
    found = {case.id: case for case in cases}
    assert len(found) == len(cases), "an id comes twice"
    return found


def read_case(stated: dict[str, Any]) -> Case:
    """Return a case as it is stated."""
    assert set(stated) <= CASE_KEYS, set(stated) - CASE_KEYS
    raw = stated["raw"].encode() if "raw" in stated else None
    if "raw_b64" in stated:
        raw = base64.b64decode(stated["raw_b64"])
    body = stated.get("body")
    if gen := stated.get("gen"):
        values = {name: _generated(value) for name, value in gen.items() if not name.endswith("template")}
        if "raw_template" in gen:
            raw = _filled(gen["raw_template"], values).encode()
        else:
            body = _filled(gen["template"], values)
    first = Step(
        when="first",
        method=stated["method"],
        path=stated["path"],
        headers=stated["headers"],
        body=body,
        raw=raw,
        needs=stated.get("needs", SMOLLM2),
        check=stated.get("check"),
        count=stated.get("repeat", 1),
        client=stated.get("client", {}),
    )
    steps = [first]
    for then in stated.get("then", ()):
        assert set(then) <= THEN_KEYS, set(then) - THEN_KEYS
        pattern = steps[then.get("copy_of", 0)]
        body, raw = then.get("body", pattern.body), None if "body" in then else pattern.raw
        if changes := then.get("set"):
            body = {name: value for name, value in (body | changes).items() if value is not None}
        steps.append(
            Step(
                when=then["when"],
                method=then.get("method", pattern.method),
                path=then.get("path", pattern.path),
                headers=then.get("headers", pattern.headers),
                body=body,
                raw=then["raw"].encode() if "raw" in then else raw,
                needs=then.get("needs", pattern.needs),
                check=then.get("check"),
                count=then.get("count", 1),
                client=then.get("client", {}),
                derive=then.get("derive", {}),
                is_background=then.get("background", False),
            )
        )
    return Case(
        id=stated["id"],
        expect=stated["expect"],
        check=first.check,
        is_alone=stated.get("alone", False),
        steps=tuple(steps),
    )


def _generated(stated: dict[str, Any]) -> Any:
    """Return what stands for a name: a repeated text, a nesting, a list or a map of ids."""
    if "repeat" in stated:
        return stated["repeat"] * stated["count"]
    if "open" in stated:
        return stated["open"] * stated["count"] + stated["close"] * stated["count"]
    if "items" in stated:
        return [stated["items"]] * stated["count"]
    first, last = map(int, stated["ids"].split(".."))
    return {str(token_id): stated["value"] for token_id in range(first, last + 1)}


def _filled(template: Any, values: Mapping[str, Any]) -> Any:
    """Return a template with ``<<NAME>>`` replaced by its value: as it is, or inside a longer text."""
    if isinstance(template, dict):
        return {key: _filled(value, values) for key, value in template.items()}
    if isinstance(template, list):
        return [_filled(value, values) for value in template]
    if isinstance(template, str):
        for name, value in values.items():
            if template == f"<<{name}>>":
                return value
            if f"<<{name}>>" in template:
                template = template.replace(f"<<{name}>>", str(value))
    return template


# Answers.


def strict_json(text: str | bytes) -> Any:
    """Return what JSON states; NaN and infinities, which Python's reader would take, are an error."""

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    return json.loads(text, parse_constant=refuse)


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What came back for one request.

    Attributes:
        headers_s: Seconds until the head was there.
        seconds: Until the end.
        pauses: Seconds between two arrivals of bytes, the first one since the request was sent.
        failure: What ended the body before its time.
        peak_bytes: By how much the server's memory grew at most, where the client watches it.
        chunks: What the SDK gave out, where it was the client.
    """

    status: int
    headers: Mapping[str, str]
    body: bytes
    headers_s: float
    seconds: float
    pauses: Sequence[float] = ()
    failure: Exception | None = None
    peak_bytes: int = 0
    chunks: Sequence[Any] = ()

    @property
    def media_type(self) -> str:
        return self.headers.get("content-type", "").partition(";")[0].strip()

    @cached_property
    def json(self) -> Any:
        assert self.media_type == "application/json", self.body[:200]
        return strict_json(self.body)

    @property
    def error(self) -> dict[str, Any]:
        assert set(self.json) == {"error"}
        error = self.json["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert isinstance(error["message"], str)
        assert error["message"]
        assert "Traceback" not in error["message"]
        assert isinstance(error["type"], str)
        return error

    @cached_property
    def parts(self) -> list[str]:
        """The events of a stream as they are; each has ended with a blank line."""
        assert self.media_type == "text/event-stream", self.body[:200]
        text = self.body.decode()
        assert text.endswith("\n\n")
        return text[:-2].split("\n\n")

    @cached_property
    def events(self) -> list[Any]:
        """The data of a stream that ended well: every event but the comments and the last ``[DONE]``."""
        data = [part for part in self.parts if not part.startswith(":")]
        assert all(each.startswith("data: ") and "\n" not in each for each in data), data
        assert data.pop() == "data: [DONE]"
        events = [strict_json(each.removeprefix("data: ")) for each in data]
        assert not any("error" in event for event in events), events
        return events


@dataclass(frozen=True, slots=True)
class Run:
    """A case that was run: all answers to each of its requests."""

    case: Case
    answers: Mapping[int, Sequence[Answer]]

    def __getitem__(self, number: int) -> Answer:
        """Return the first answer to a request."""
        return self.answers[number][0]


# Running.


def run_case(case: Case, server_of: Callable[[str], Target]) -> Run:
    """Send all requests of a case in their order, and return the answers.

    Raises:
        TimeoutError: The case took too long.
    """
    # Started before the clock is.
    targets = {step.needs: server_of(step.needs) for step in case.steps}
    ends = time.monotonic() + DEADLINE_S
    answers: dict[int, list[Answer]] = {}
    background: dict[int, list[Future[Answer]]] = {}
    with ThreadPoolExecutor(AT_ONCE) as pool:

        def send(number: int) -> list[Future[Answer]]:
            step = case.steps[number]
            return [pool.submit(_send, step, targets[step.needs], answers, ends) for _ in range(step.count)]

        def keep(sent: Mapping[int, list[Future[Answer]]]) -> None:
            for number, futures in sent.items():
                answers[number] = [each.result(ends - time.monotonic()) for each in futures]

        for when in ("before", "now", "after"):
            numbers = [
                number
                for number, step in enumerate(case.steps)
                if when == {"first": "now", "concurrent": "now"}.get(step.when, step.when)
            ]
            if when == "now":
                keep({number: futures for number, futures in zip(numbers, map(send, numbers), strict=True)})
                continue
            for number in numbers:
                step = case.steps[number]
                if step.is_background:
                    background[number] = send(number)
                    _wait(lambda: metric(targets[step.needs], "vllm:num_requests_running") > 0, ends)  # noqa: B023
                else:
                    keep({number: send(number)})
        keep(background)
    return Run(case, answers)


def metric(target: Target, name: str) -> float:
    """Return one number of the server's metrics; one that is not there yet is 0."""
    connection = _connect(target, 10)
    connection.request("GET", "/metrics")
    lines = connection.getresponse().read().decode().splitlines()
    connection.close()
    return next((float(line.rpartition(" ")[2]) for line in lines if line.startswith(name)), 0.0)


def wait_idle(target: Target) -> None:
    """Wait until nothing runs and nothing waits."""
    ends = time.monotonic() + DEADLINE_S
    _wait(
        lambda: not metric(target, "vllm:num_requests_running") + metric(target, "vllm:num_requests_waiting"),
        ends,
    )


def resident_bytes(pid: int) -> int:
    """Return how much memory a process has now."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmRSS"))


def _wait(is_done: Callable[[], bool], ends: float) -> None:
    while not is_done():
        if time.monotonic() > ends:
            raise TimeoutError("the server did not get there in time")


def _connect(target: Target, timeout_s: float) -> http.client.HTTPConnection:
    return http.client.HTTPConnection(urlsplit(target.url).netloc, timeout=max(timeout_s, 0.1))


def _named(text: str, target: Target) -> str:
    return text.replace("MODEL", target.model)


def _send(step: Step, target: Target, answers: Mapping[int, Sequence[Answer]], ends: float) -> Answer:
    """Send one request, and read the answer as its client does."""
    values = {name: _joined(paths, answers) for name, paths in step.derive.items()}
    body = step.raw
    if body is not None:
        body = _named(body.decode(errors="surrogateescape"), target).encode(errors="surrogateescape")
    elif step.body is not None:
        body = _named(json.dumps(_filled(step.body, values)), target).encode()
    if step.client.get("sdk"):
        return _send_by_sdk(target, json.loads(body or b""), ends)
    connection = _connect(target, ends - time.monotonic())
    if step.client.get("stall"):
        # Small, so that it is the server that holds what is not read, and not the kernel.
        connection.sock = socket.create_connection((connection.host, connection.port), connection.timeout)
        connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**16)
    try:
        if step.needs == "memory probe" and step.when == "first":
            return _watched(lambda: _exchange(connection, step, target, body, ends), target)
        return _exchange(connection, step, target, body, ends)
    finally:
        connection.close()


def _exchange(
    connection: http.client.HTTPConnection, step: Step, target: Target, body: bytes | None, ends: float
) -> Answer:
    began = last = time.perf_counter()
    stalled = 'logitwire:answers_total{outcome="stalled"}'
    num_stalled = metric(target, stalled) if step.client.get("stall") else 0
    connection.request(step.method, _named(step.path, target), body, dict(step.headers))
    response = connection.getresponse()
    headers_s = time.perf_counter() - began
    pieces: list[bytes] = []
    pauses = [headers_s]
    failure: Exception | None = None
    if step.client.get("close_after_headers"):
        response.close()
    else:
        if step.client.get("stall") and response.status == 200:
            _wait(lambda: metric(target, stalled) > num_stalled, ends)
        try:
            while piece := response.read1():
                pieces.append(piece)
                now = time.perf_counter()
                pauses.append(now - last)
                last = now
        except (http.client.HTTPException, ConnectionError) as error:
            failure = error
        if response.length or (response.chunked and failure is None and response.chunk_left is not None):
            failure = http.client.IncompleteRead(b"")
    return Answer(
        status=response.status,
        headers={name.lower(): value for name, value in response.getheaders()},
        body=b"".join(pieces),
        headers_s=headers_s,
        seconds=time.perf_counter() - began,
        pauses=pauses,
        failure=failure,
    )


def _watched(exchange: Callable[[], Answer], target: Target) -> Answer:
    """Return an answer with the memory that the server took meanwhile."""
    ended = threading.Event()
    before = resident_bytes(target.pid)
    peak = before

    def watch() -> None:
        nonlocal peak
        while not ended.wait(POLL_S):
            peak = max(peak, resident_bytes(target.pid))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        answer = exchange()
    finally:
        ended.set()
        thread.join()
    return Answer(**{**vars(answer), "peak_bytes": peak - before})


def _send_by_sdk(target: Target, body: dict[str, Any], ends: float) -> Answer:
    """Send a streamed chat by OpenAI's own client."""
    began = time.perf_counter()
    timeout_s = ends - time.monotonic()
    with openai.OpenAI(base_url=f"{target.url}/v1", api_key="none", timeout=timeout_s, max_retries=0) as sdk:
        chunks = list(sdk.chat.completions.create(**body))
    return Answer(
        status=200,
        headers={},
        body=b"",
        headers_s=math.nan,
        seconds=time.perf_counter() - began,
        chunks=chunks,
    )


def _joined(paths: Sequence[str], answers: Mapping[int, Sequence[Answer]]) -> Any:
    values = []
    for path in paths:
        number, _, inner = path.partition(".")
        values.append(at(answers[int(number)][0].json, inner))
    first, *others = values
    for value in others:
        first = first + value
    return first


def at(value: Any, path: str) -> Any:
    """Return what stands at a path such as ``choices.0.text``."""
    for name in path.split("."):
        with suppress(ValueError):
            value = value[int(name)]
            continue
        value = value[name]
    return value
