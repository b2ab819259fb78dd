"""API keys: who is let in, and what a refusal tells."""

import json
import logging
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import openai
import pytest

from engine.engine import Engine
from engine.loading import load
from service.__main__ import main
from service.app import create_app
from service.keys import ApiKeys, is_loopback
from service.settings import Settings, SettingsError, exposures, keys_of, load_settings
from tests.serving import Reply, ServerThread, eventually

KEYS = ("sk-first", "sk-second")
WITH_KEY = {"authorization": "Bearer sk-second"}


@pytest.fixture(scope="module")
def guarded() -> Iterator[ServerThread]:
    server = ServerThread(
        Settings(model_name="scripted", port=0, drain_timeout=5.0, api_keys=ApiKeys.of(KEYS))
    )
    server.start()
    yield server
    server.stop()


def raw(server: ServerThread, sent: bytes, *, then: bytes = b"") -> bytes:
    """Send bytes as they are; return all that comes back."""
    address = urlsplit(server.url)
    with socket.create_connection((address.hostname, address.port), timeout=20) as connection:
        connection.sendall(sent)
        if then:
            connection.sendall(then)
        received = b""
        while part := connection.recv(2**16):
            received += part
    return received


def routes(server: ServerThread) -> list[tuple[str, str]]:
    paths = server.request("GET", "/schema", headers=WITH_KEY).json["paths"]
    return [(method.upper(), path) for path, methods in paths.items() for method in methods]


def test_every_route_that_computes_refuses_without_a_key(guarded: ServerThread) -> None:
    is_open = {"/health", "/ready", "/metrics", "/version"}
    found = routes(guarded)
    assert len(found) > 15
    for method, path in found:
        reply = guarded.request(method, path.replace("{model_id}", "x"), b"{}")
        if path in is_open or path.startswith("/schema"):
            assert reply.status == 200
            continue
        assert reply.status == 401, path
        assert (reply.error["code"], reply.error["type"]) == ("invalid_api_key", "authentication_error")
        assert reply.headers["www-authenticate"] == "Bearer"
        assert reply.headers["x-request-id"]


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER"])
def test_each_key_is_let_in_whatever_the_case_of_the_scheme(
    guarded: ServerThread, scheme: str, key: str
) -> None:
    assert guarded.request("GET", "/v1/models", headers={"authorization": f"{scheme} {key}"}).status == 200


@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"Bearer",
        b"Bearer ",
        b"Bearer sk-firs",
        b"Bearer sk-first2",
        b"Bearer SK-FIRST",
        b"Bearer sk-first,sk-second",
        b"Bearer sk-first sk-second",
        b"Basic sk-first",
        b"sk-first",
        "Bearer sk-fïrst".encode(),
        b"Bearer \xff\xfe",
        b"Bearer " + b"x" * 50_000,
    ],
)
def test_all_else_is_refused_and_never_fails(guarded: ServerThread, value: bytes) -> None:
    head = b"GET /v1/models HTTP/1.1\r\nhost: x\r\nconnection: close\r\nauthorization: " + value + b"\r\n\r\n"
    assert raw(guarded, head).startswith(b"HTTP/1.1 401 ")


def test_two_authorization_headers_are_refused_even_if_both_are_right(guarded: ServerThread) -> None:
    line = b"authorization: Bearer sk-first\r\n"
    head = b"GET /v1/models HTTP/1.1\r\nhost: x\r\nconnection: close\r\n" + 2 * line + b"\r\n"
    assert raw(guarded, head).startswith(b"HTTP/1.1 401 ")


@pytest.mark.parametrize(
    ("method", "path", "headers"),
    [
        ("POST", "/nope", {}),
        ("DELETE", "/v1/chat/completions", {}),
        ("OPTIONS", "/v1/chat/completions", {}),
        ("POST", "/v1/chat/completions", {"accept": "image/png"}),
        ("POST", "/v1/chat/completions", {"content-type": "text/plain"}),
        ("POST", "//v1//chat/completions/", {}),
        ("POST", "/schema/../v1/chat/completions", {}),
        ("POST", "/health/../v1/chat/completions", {}),
        ("POST", "/metrics%2f..%2fv1%2fmodels", {}),
    ],
)
def test_a_refusal_tells_nothing_else(
    guarded: ServerThread, method: str, path: str, headers: dict[str, str]
) -> None:
    connection = guarded.connect()
    connection.request(method, path, b"no json", headers)
    reply = Reply(connection.getresponse())
    connection.close()
    if path.startswith("/schema/"):
        # What begins like the open documents is open, and leads nowhere else.
        assert reply.status in (404, 405)
    else:
        assert (reply.status, reply.error["code"]) == (401, "invalid_api_key")


def test_a_client_that_waits_for_100_continue_gets_the_refusal_alone(guarded: ServerThread) -> None:
    head = (
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\n"
        b"content-type: application/json\r\ncontent-length: 1000000\r\n\r\n"
    )
    answer = raw(guarded, head)
    assert answer.startswith(b"HTTP/1.1 401 ")
    assert b"connection: close" in answer.lower()


def test_a_client_that_sends_a_large_body_gets_the_refusal_too(guarded: ServerThread) -> None:
    for connection_header in ("close", "keep-alive"):
        connection = guarded.connect()
        connection.request(
            "POST", "/v1/chat/completions", b"x" * 30_000_000, {"connection": connection_header}
        )
        assert Reply(connection.getresponse()).error["code"] == "invalid_api_key"
        connection.close()


def test_a_connection_goes_on_behind_a_refusal(guarded: ServerThread) -> None:
    connection = guarded.connect()
    connection.request("POST", "/v1/chat/completions", b"{}")
    assert connection.getresponse().read()
    body = json.dumps({"messages": [{"role": "user", "content": "x"}], "max_tokens": 1})
    connection.request("POST", "/v1/chat/completions", body, WITH_KEY)
    assert Reply(connection.getresponse()).status == 200
    connection.close()


def test_the_openai_sdk_works_with_its_key_and_says_what_is_wrong_without(guarded: ServerThread) -> None:
    def sdk(key: str) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{guarded.url}/v1", api_key=key, max_retries=0)

    with sdk("sk-first") as client:
        assert client.models.list().data[0].id == "scripted"
    with sdk("sk-wrong") as client, pytest.raises(openai.AuthenticationError) as found:
        client.models.list()
    assert found.value.code == "invalid_api_key"


def test_without_keys_everybody_is_let_in(scripted: ServerThread) -> None:
    assert scripted.request("GET", "/v1/models").status == 200
    assert scripted.request("GET", "/v1/models", headers={"authorization": "Bearer x"}).status == 200


def test_no_key_is_in_any_line_of_the_log(guarded: ServerThread, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    guarded.chat(headers=WITH_KEY, max_tokens=1)
    guarded.chat(headers={"authorization": "Bearer sk-secret-guess"})
    eventually(lambda: sum(each.name == "service.request" for each in caplog.records) == 2)
    lines = [repr(vars(each)) for each in caplog.records]
    assert not [line for line in lines if "sk-second" in line or "secret-guess" in line]


# Settings.


def test_keys_come_from_the_list_and_from_the_file(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("# ours\nsk-a # Ada\n\n  sk-b\n")
    settings = load_settings({"API_KEYS": " sk-c , sk-d ", "API_KEYS_FILE": str(path)})
    keys = keys_of(settings)
    assert all(keys.admits(key) for key in (b"sk-a", b"sk-b", b"sk-c", b"sk-d"))
    assert not any(keys.admits(key) for key in (b"", b"sk-e", b"Ada", b"# ours"))


@pytest.mark.parametrize(
    ("text", "key"),
    [
        (b"\xef\xbb\xbfsk-a\r\n", b"sk-a"),
        (b"sk-a#1\n", b"sk-a#1"),
        (b"sk-a\t# Ada\n", b"sk-a"),
        (b"\t#sk-b\nsk-a\nsk-a\n", b"sk-a"),
    ],
)
def test_a_line_of_the_file_is_a_whole_key_however_it_was_written(
    tmp_path: Path, text: bytes, key: bytes
) -> None:
    path = tmp_path / "keys"
    path.write_bytes(text)
    keys = keys_of(load_settings({"API_KEYS_FILE": str(path)}))
    assert str(keys) == "1 key"
    assert keys.admits(key)


def test_keys_may_come_through_a_pipe_which_can_be_read_only_once() -> None:
    reader, writer = os.pipe()
    os.write(writer, b"sk-a\n")
    os.close(writer)
    settings = load_settings({"API_KEYS": "sk-b", "API_KEYS_FILE": f"/dev/fd/{reader}"})
    os.close(reader)
    assert keys_of(settings).admits(b"sk-a")
    assert keys_of(settings).admits(b"sk-b")
    create_app(settings, Engine(settings.engine_config(), load))


def test_settings_never_show_a_key() -> None:
    settings = load_settings({"API_KEYS": "sk-c,sk-d"})
    assert "sk-c" not in repr(settings) + str(settings.api_keys)
    assert str(settings.api_keys) == "2 keys"


@pytest.mark.parametrize("value", [" ", ",", "sk-a,schlüssel", "sk a", "sk-a,\x01"])
def test_keys_that_cannot_work_stop_the_start_and_are_not_repeated(value: str) -> None:
    with pytest.raises(SettingsError, match="API_KEYS") as found:
        load_settings({"API_KEYS": value})
    assert "sk" not in str(found.value)
    assert "schl" not in str(found.value)


def test_a_file_that_is_missing_or_empty_stops_the_start_with_its_name(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.write_text("# none yet\n")
    for path in (tmp_path / "missing", empty, tmp_path):
        with pytest.raises(SettingsError, match=f"API_KEYS_FILE='{path}'"):
            load_settings({"API_KEYS_FILE": str(path)})
        # However the server is built, it never starts without the keys that it was to have.
        settings = Settings(api_keys_file=str(path))
        engine = Engine(settings.engine_config(), load)
        with pytest.raises(SettingsError):
            create_app(settings, engine)


def test_what_lets_others_in_is_warned_of(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("sk-a\n")
    path.chmod(0o644)
    assert exposures(Settings()) == []
    (warning,) = exposures(Settings(host="0.0.0.0"))
    assert "API_KEYS" in warning
    (warning,) = exposures(Settings(host="0.0.0.0", api_keys_file=str(path)))
    assert "chmod" in warning
    path.chmod(0o600)
    assert exposures(Settings(host="0.0.0.0", api_keys_file=str(path))) == []


@pytest.mark.parametrize(
    ("host", "expected"),
    [("127.0.0.1", True), ("127.9.9.9", True), ("::1", True), ("localhost", True), ("0.0.0.0", False)],
)
def test_loopback_addresses_are_known(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected
    assert not is_loopback("::")
    assert not is_loopback("node17")


def test_a_server_that_cannot_have_its_keys_ends_before_it_listens(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("API_KEYS", "sk-good,sk bad")
    assert main([]) == 2
    printed = "".join(capsys.readouterr())
    assert "API_KEYS" in printed
    assert "sk" not in printed
