"""When a client asks again."""

import pickle
from email.utils import formatdate
from typing import Any

import pytest

from logitwire import (
    APIConnectionError,
    APIError,
    APITimeoutError,
    AuthenticationError,
    BadRequestError,
    ContextLengthError,
    IncompleteStreamError,
    NotFoundError,
    OverloadedError,
    PermissionDeniedError,
    RateLimitError,
    ServerError,
    UnprocessableEntityError,
    errors,
)
from logitwire.errors import api_error
from logitwire.retries import MAX_DELAY_S, retry_after_s, retry_delay_s


def refused(status: int | None, **headers: str) -> APIError:
    return api_error(status, b"{}", {name.replace("_", "-"): value for name, value in headers.items()})


@pytest.mark.parametrize("status", [408, 409, 429, 500, 502, 503, 504, 599])
def test_what_may_pass_is_tried_again(status: int) -> None:
    assert retry_delay_s(refused(status), 0, 2) is not None
    assert retry_delay_s(refused(status, x_should_retry="false"), 0, 2) is None


@pytest.mark.parametrize("status", [301, 400, 401, 403, 404, 413, 422, 507, None])
def test_what_cannot_succeed_is_not_tried_again(status: int | None) -> None:
    assert retry_delay_s(refused(status), 0, 2) is None
    if status is not None:
        assert retry_delay_s(refused(status, x_should_retry="true"), 0, 2) is not None


def test_no_answer_is_tried_again_and_a_broken_one_is_not() -> None:
    assert retry_delay_s(APIConnectionError("x"), 0, 1) is not None
    assert retry_delay_s(APITimeoutError("x"), 0, 1) is not None
    assert retry_delay_s(IncompleteStreamError("x"), 0, 1) is None


def test_tries_are_counted_and_pauses_double_up_to_a_limit() -> None:
    error = refused(500)
    for num_retries in range(8):
        longest = min(0.5 * 2**num_retries, MAX_DELAY_S)
        for _ in range(20):
            delay = retry_delay_s(error, num_retries, 8)
            assert delay is not None
            assert 0.75 * longest <= delay <= longest
    assert retry_delay_s(error, 8, 8) is None
    assert retry_delay_s(error, 0, 0) is None


NOW = 1_800_000_000.0


@pytest.mark.parametrize(
    ("headers", "pause"),
    [
        ({}, None),
        ({"retry-after": "3"}, 3.0),
        ({"retry-after": " 1.5 "}, 1.5),
        ({"retry-after": "0"}, 0.0),
        ({"retry-after": formatdate(NOW + 7, usegmt=True)}, 7.0),
        ({"retry-after": formatdate(NOW - 7, usegmt=True)}, 0.0),
        ({"retry-after-ms": "250", "retry-after": "3"}, 0.25),
        ({"retry-after-ms": "soon", "retry-after": "3"}, 3.0),
        ({"retry-after": "soon"}, None),
        ({"retry-after": "-3"}, None),
        ({"retry-after": "nan"}, None),
        ({"retry-after": "inf"}, None),
        ({"retry-after": ""}, None),
    ],
)
def test_the_servers_pause_is_read_as_seconds_milliseconds_or_a_date(
    headers: dict[str, str], pause: float | None
) -> None:
    assert retry_after_s(headers, NOW) == pause


def test_the_servers_pause_is_kept_and_a_long_one_ends_the_tries() -> None:
    assert retry_delay_s(refused(503, retry_after="2"), 1, 2) == 2
    assert retry_delay_s(refused(503, retry_after="3600"), 0, 2) is None


@pytest.mark.parametrize(
    ("status", "detail", "kind"),
    [
        (400, {"code": "malformed_json"}, BadRequestError),
        (401, {}, AuthenticationError),
        (403, {}, PermissionDeniedError),
        (404, {"code": "model_not_found"}, NotFoundError),
        (406, {}, BadRequestError),
        (413, {"code": "context_length_exceeded"}, ContextLengthError),
        (413, {"code": "request_too_large"}, BadRequestError),
        (422, {"code": "invalid_value", "param": "n"}, UnprocessableEntityError),
        (429, {}, RateLimitError),
        (500, {"code": "internal_error"}, ServerError),
        (503, {"code": "queue_full"}, OverloadedError),
        (507, {"code": "out_of_memory"}, ServerError),
        (None, {"code": "non_finite_logits", "type": "server_error"}, ServerError),
        (None, {"code": "x"}, APIError),
        (302, {}, APIError),
    ],
)
def test_each_status_has_its_exception_which_survives_pickling(
    status: int | None, detail: dict[str, Any], kind: type[APIError]
) -> None:
    body = errors.msgspec.json.encode({"error": {"message": "why", **detail}})
    error = api_error(status, body, {"a": "b"}, "r1")
    for each in (error, pickle.loads(pickle.dumps(error))):
        assert type(each) is kind
        assert str(each) == "why"
        assert (each.status, each.code, each.param) == (status, detail.get("code"), detail.get("param"))
        assert (each.request_id, each.body, each.headers) == ("r1", body, {"a": "b"})


@pytest.mark.parametrize(
    "body", [b"", b"<html>", b"\xff", b"[]", b'{"error": "why"}', b'{"error": {}}', b"[" * 9999]
)
def test_a_refusal_that_is_no_envelope_is_raised_all_the_same(body: bytes) -> None:
    error = api_error(502, body, {})
    assert type(error) is ServerError
    assert str(error)
    assert error.code is None
