"""Cross-origin requests: off unless set, and then for every answer, refusals included."""

from collections.abc import Iterator

import pytest

from service.keys import ApiKeys
from service.settings import Settings, SettingsError, load_settings
from tests.conftest import Serve
from tests.serving import ServerThread

ARROW = "application/vnd.apache.arrow.stream"
PAGE = "https://page.example"
FROM_PAGE = {"origin": PAGE}
PREFLIGHT = {
    **FROM_PAGE,
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type,x-stainless-lang",
}


@pytest.fixture(scope="module")
def open_to_page() -> Iterator[ServerThread]:
    settings = Settings(
        model_name="scripted",
        port=0,
        drain_timeout=5.0,
        api_keys=ApiKeys.of(["sk-a"]),
        cors_origins=f"{PAGE}, http://localhost:5173",
    )
    server = ServerThread(settings)
    server.start()
    yield server
    server.stop()


def test_without_the_setting_no_answer_has_a_header_of_it(scripted: ServerThread) -> None:
    for method, path in (("OPTIONS", "/v1/chat/completions"), ("GET", "/v1/models"), ("GET", "/nope")):
        reply = scripted.request(method, path, headers=PREFLIGHT)
        assert not [name for name in reply.headers if name.lower().startswith("access-control")]


def test_a_preflight_brings_no_key_and_is_answered(open_to_page: ServerThread) -> None:
    reply = open_to_page.request("OPTIONS", "/v1/chat/completions", headers=PREFLIGHT)
    assert (reply.status, reply.body) == (204, b"")
    assert reply.headers["access-control-allow-origin"] == PAGE
    assert "POST" in reply.headers["access-control-allow-methods"]
    assert reply.headers["access-control-allow-headers"] == PREFLIGHT["access-control-request-headers"]
    assert int(reply.headers["access-control-max-age"]) > 0


@pytest.mark.parametrize("fields", [{}, {"stream": True}, {"headers": {"accept": ARROW}}])
def test_pages_of_the_origin_may_read_answers_of_every_form(
    open_to_page: ServerThread, fields: dict[str, object]
) -> None:
    headers = {"authorization": "Bearer sk-a", **FROM_PAGE, **fields.pop("headers", {})}  # type: ignore[dict-item]
    reply = open_to_page.chat(headers=headers, max_tokens=2, **fields)
    assert reply.status == 200
    assert reply.headers["access-control-allow-origin"] == PAGE
    assert {"x-request-id", "retry-after"} <= set(reply.headers["access-control-expose-headers"].split(", "))
    assert {each.lower() for each in reply.headers.get_all("vary")} == {"accept", "origin"}


@pytest.mark.parametrize(("path", "status"), [("/v1/models", 401), ("/v1/nope", 401), ("/health", 200)])
def test_pages_of_the_origin_may_read_refusals(open_to_page: ServerThread, path: str, status: int) -> None:
    reply = open_to_page.request("GET", path, headers=FROM_PAGE)
    assert reply.status == status
    assert reply.headers["access-control-allow-origin"] == PAGE


@pytest.mark.parametrize("origin", ["https://other.example", "null", "https://page.example.evil", ""])
def test_pages_of_other_origins_are_told_nothing(open_to_page: ServerThread, origin: str) -> None:
    reply = open_to_page.request("OPTIONS", "/v1/chat/completions", headers={**PREFLIGHT, "origin": origin})
    assert reply.status == 401
    assert "access-control-allow-origin" not in reply.headers
    assert reply.headers["vary"]
    reply = open_to_page.request("GET", "/health", headers={"origin": origin})
    assert (reply.status, reply.headers["access-control-allow-origin"]) == (200, None)


def test_a_star_allows_all_origins(serve: Serve) -> None:
    server = serve(cors_origins="*")
    assert server.request("GET", "/health", headers=FROM_PAGE).headers["access-control-allow-origin"] == "*"
    reply = server.request("OPTIONS", "/v1/logits", headers=PREFLIGHT)
    assert (reply.status, reply.headers["access-control-allow-origin"]) == (204, "*")


@pytest.mark.parametrize("value", ["page.example", "https://page.example/", "https://a, nonsense"])
def test_what_is_no_origin_stops_the_start(value: str) -> None:
    with pytest.raises(SettingsError, match="CORS_ORIGINS"):
        load_settings({"CORS_ORIGINS": value})
