"""From exception to answer: the one table, and the handlers that use it.

Besides the engine's tree the service raises :class:`ProblemsError`, :class:`ServiceError` and, for `/ready`,
:class:`NotReadyError`.
"""

import logging
from dataclasses import dataclass, field

import msgspec
from litestar import MediaType, Request, Response
from litestar.exceptions import HTTPException

from engine import errors as engine_errors
from schemas.errors import ErrorCode, ErrorDetail, ErrorEnvelope, ErrorType
from service.telemetry import note

logger = logging.getLogger(__name__)

MAX_PROBLEMS = 10
MAX_ECHO = 200


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong with a request; ``param`` is the path of the field."""

    code: ErrorCode
    message: str
    param: str | None = None


class ProblemsError(Exception):
    """A request has one or more problems; answered with 422, or 400 if it could not be read at all."""

    def __init__(self, problems: list[Problem]) -> None:
        super().__init__("; ".join(problem.message for problem in problems))
        self.problems = problems


class ServiceError(Exception):
    """A refusal of the service itself, with its code."""

    def __init__(self, code: ErrorCode, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.param = param


class NotReadyError(Exception):
    """The cause, an engine's error, keeps the server from being ready: 503, whatever it is elsewhere."""


@dataclass(frozen=True, slots=True)
class Answer:
    """How one kind of failure is answered."""

    status: int
    code: ErrorCode
    headers: dict[str, str] = field(default_factory=dict)


NO_RETRY = {"x-should-retry": "false"}

# The nearest base class in an exception's ancestry counts.
ENGINE_ANSWERS: dict[type[engine_errors.EngineError], Answer] = {
    engine_errors.EngineError: Answer(500, "internal_error"),
    engine_errors.RequestError: Answer(422, "invalid_value"),
    engine_errors.ContextLengthError: Answer(413, "context_length_exceeded"),
    engine_errors.UnavailableError: Answer(503, "loading", {"retry-after": "5"}),
    engine_errors.LoadingError: Answer(503, "loading", {"retry-after": "5"}),
    engine_errors.QueueFullError: Answer(503, "queue_full", {"retry-after": "1"}),
    engine_errors.ShuttingDownError: Answer(503, "shutting_down", {"retry-after": "5"}),
    engine_errors.OutOfMemoryError: Answer(507, "out_of_memory", NO_RETRY),
    engine_errors.ModelFaultError: Answer(500, "non_finite_logits", NO_RETRY),
    engine_errors.LogitsOverflowError: Answer(500, "logits_overflow", NO_RETRY),
    engine_errors.DeadlineError: Answer(504, "deadline_exceeded"),
    engine_errors.StalledReaderError: Answer(504, "deadline_exceeded"),
}

STATUSES: dict[ErrorCode, int] = {
    "malformed_request": 400,
    "malformed_json": 400,
    "invalid_api_key": 401,
    "not_found": 404,
    "model_not_found": 404,
    "method_not_allowed": 405,
    "not_acceptable": 406,
    "request_too_large": 413,
    "unsupported_media_type": 415,
}

HTTP_CODES: dict[int, ErrorCode] = {
    400: "malformed_json",
    401: "invalid_api_key",
    404: "not_found",
    405: "method_not_allowed",
    406: "not_acceptable",
    413: "request_too_large",
    415: "unsupported_media_type",
}


def status_of(code: ErrorCode) -> int:
    """Return the status of a refusal that is no engine failure."""
    return STATUSES.get(code, 422)


def describe(error: BaseException) -> tuple[int, dict[str, str], ErrorEnvelope]:
    """Return status, extra headers and body for any exception."""
    match error:
        case ProblemsError():
            first = error.problems[0]
            shown = error.problems[:MAX_PROBLEMS]
            text = "; ".join(
                f"{problem.param}: {problem.message}" if problem.param else problem.message
                for problem in shown
            )
            if len(error.problems) > len(shown):
                text += f"; and {len(error.problems) - len(shown)} more"
            return _envelope(status_of(first.code), first.code, text, first.param)
        case ServiceError():
            return _envelope(status_of(error.code), error.code, str(error), error.param)
        case NotReadyError(__cause__=engine_errors.EngineError() as cause):
            _, headers, envelope = describe(cause)
            return 503, {"retry-after": "5"} | headers, envelope
        case engine_errors.EngineError():
            answer = next(ENGINE_ANSWERS[kind] for kind in type(error).__mro__ if kind in ENGINE_ANSWERS)
            param = getattr(error, "param", None)
            # What loading says is full of paths.
            is_private = isinstance(error, engine_errors.LoadError)
            message = "the model could not be loaded; the server's log has more" if is_private else str(error)
            return _envelope(answer.status, answer.code, message, param, answer.headers)
        case HTTPException(status_code=status) if status < 500:
            code = HTTP_CODES.get(status, "invalid_value")
            headers = {name.lower(): value for name, value in (error.headers or {}).items()}
            return _envelope(status, code, error.detail, None, headers)
        case _:
            return _envelope(
                500, "internal_error", f"unforeseen {type(error).__name__}; the server's log has more"
            )


def _envelope(
    status: int,
    code: ErrorCode,
    message: str,
    param: str | None = None,
    headers: dict[str, str] | None = None,
) -> tuple[int, dict[str, str], ErrorEnvelope]:
    kind: ErrorType = "invalid_request_error"
    if status == 401:
        kind = "authentication_error"
    elif status >= 500:
        kind = "server_error"
    detail = ErrorDetail(message=message, type=kind, param=param, code=code)
    return status, dict(headers or {}), ErrorEnvelope(error=detail)


def encode_error(error: BaseException) -> bytes:
    """Return the envelope of any exception, as JSON."""
    return msgspec.json.encode(describe(error)[2])


def handle(request: Request, error: Exception) -> Response[bytes]:  # type: ignore[type-arg]
    """Answer any exception; registered for all of them."""
    status, headers, envelope = describe(error)
    note(request.scope, error_code=envelope.error.code)
    if envelope.error.code == "internal_error" and not isinstance(error, NotReadyError):
        logger.error("request failed", exc_info=error, extra={"path": request.url.path})
    return Response(
        msgspec.json.encode(envelope),
        status_code=status,
        headers={"vary": "accept", **headers},
        media_type=MediaType.JSON,
    )


def echo(text: str) -> str:
    """Return input as an error message may repeat it."""
    return text if len(text) <= MAX_ECHO else text[:MAX_ECHO] + "…"
