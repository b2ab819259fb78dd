"""Requests on a raw socket that uvicorn alone would take otherwise."""

import http.client
import json
import socket
from urllib.parse import urlsplit

import pytest

from ops.fuzz.firing import Reader
from tests.serving import Reply, ServerThread

BODY = json.dumps({"messages": [{"role": "user", "content": "Say hi."}], "max_tokens": 3, "temperature": 0})
LENGTH = f"content-length: {len(BODY)}\r\n\r\n{BODY}"
CHUNKED = f"transfer-encoding: chunked\r\n\r\n{len(BODY):x}\r\n{BODY}\r\n0\r\n\r\n"
H2C = "connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABkAAQAoAAAAAIAAAAA\r\n"
WEBSOCKET = "connection: upgrade\r\nupgrade: websocket\r\nsec-websocket-version: 13\r\n"


def answers(server: ServerThread, *pieces: str, num: int = 1) -> list[Reply]:
    """Send pieces of requests one after another, and return the answers."""
    address = urlsplit(server.url)
    replies = []
    with socket.create_connection((address.hostname, address.port), timeout=20) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for piece in pieces:
            connection.sendall(piece.encode())
        reader = Reader(connection)
        for _ in range(num):
            response = http.client.HTTPResponse(reader)  # type: ignore[arg-type]
            response.begin()
            replies.append(Reply(response))
    return replies


@pytest.mark.parametrize("offer", [H2C, WEBSOCKET])
@pytest.mark.parametrize("rest", [LENGTH, CHUNKED])
def test_a_request_that_offers_an_upgrade_is_answered_without_it(
    scripted: ServerThread, offer: str, rest: str
) -> None:
    head = "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    (reply,) = answers(scripted, head + offer + rest)
    assert reply.status == 200
    assert reply.json["choices"][0]["message"]["content"] == "Hel"


def test_its_parts_may_come_one_by_one_and_other_requests_behind_it(scripted: ServerThread) -> None:
    head = "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n" + H2C
    request = head + LENGTH
    pieces = [request[start : start + 40] for start in range(0, len(request), 40)]
    replies = answers(scripted, *pieces, request, "GET /health HTTP/1.1\r\nhost: x\r\n\r\n", num=3)
    assert [reply.status for reply in replies] == [200] * 3
    assert replies[2].json == {"status": "ok"}


def test_a_tunnel_is_refused_with_the_envelope(scripted: ServerThread) -> None:
    (reply,) = answers(scripted, "CONNECT /v1/chat/completions HTTP/1.1\r\nhost: x\r\n\r\nwhatever follows")
    assert reply.error["code"] == "method_not_allowed"


@pytest.mark.parametrize("hosts", ["", "host: x\r\nhost: y\r\n"])
def test_a_request_names_one_host_unless_it_is_an_old_one(scripted: ServerThread, hosts: str) -> None:
    (reply,) = answers(scripted, f"GET /health HTTP/1.1\r\n{hosts}\r\n")
    assert (reply.status, reply.error["code"]) == (400, "malformed_request")
    (reply,) = answers(scripted, "GET /health HTTP/1.0\r\n\r\n")
    assert reply.status == 200
