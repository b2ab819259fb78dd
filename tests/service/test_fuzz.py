"""What no client should send, a fixed number of it each time; `just fuzz` sends more."""

import logging
import socket
from urllib.parse import urlsplit

import pytest

from ops.fuzz.__main__ import raw, schema
from tests.conftest import Serve
from tests.serving import ServerThread, eventually


def test_requests_made_from_the_openapi_document_find_nothing_amiss(serve: Serve) -> None:
    server = serve(max_model_len=512)
    ran = schema(server.url, 6, has_coverage=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "No issues found" in ran.stdout


def test_raw_bytes_are_answered_or_refused_and_leave_nothing_behind(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    server = serve(max_model_len=512)
    report = raw(server.url, 500, seed=0)
    assert report.violations == []
    # All kinds of requests were among them, those that are right included.
    assert len(report.outcomes) == 30
    seen = {outcome for counts in report.outcomes.values() for outcome in counts}
    assert {"200", "400", "404", "413", "415", "422", "closed", "left"} <= seen
    assert server.chat().status == 200
    assert not [each for each in caplog.records if each.levelno >= logging.ERROR]


def test_a_request_that_is_wrong_in_two_ways_is_refused_once(
    scripted: ServerThread, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "service.request")
    address = urlsplit(scripted.url)
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: text/plain\r\n"
    with socket.create_connection((address.hostname, address.port), timeout=20) as connection:
        # The app would refuse it too, for its type, and a little later.
        connection.sendall(head + b"transfer-encoding: chunked\r\n\r\nzz\r\n")
        received = b"".join(iter(lambda: connection.recv(65536), b""))
    assert received.startswith(b"HTTP/1.1 400 ")
    assert received.count(b"HTTP/1.1") == 1
    eventually(lambda: any(each.name == "service.request" for each in caplog.records))
    # What goes wrong in the app is logged behind that line, and before anything else is answered.
    assert scripted.request("GET", "/health").status == 200
    assert not [each for each in caplog.records if each.levelno >= logging.ERROR]
