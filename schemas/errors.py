"""The one error envelope, and the closed list of its codes."""

from typing import Literal

from schemas.base import WireResponse

ErrorCode = Literal[
    "malformed_request",
    "malformed_json",
    "invalid_value",
    "unknown_parameter",
    "unsupported_parameter",
    "logit_budget_exceeded",
    "context_length_exceeded",
    "request_too_large",
    "unsupported_media_type",
    "not_found",
    "method_not_allowed",
    "model_not_found",
    "not_acceptable",
    "invalid_api_key",
    "queue_full",
    "shutting_down",
    "loading",
    "deadline_exceeded",
    "out_of_memory",
    "non_finite_logits",
    "logits_overflow",
    "internal_error",
]

ErrorType = Literal["invalid_request_error", "authentication_error", "server_error"]


class ErrorDetail(WireResponse, frozen=True, kw_only=True):
    """What went wrong; ``param`` is the path of the field at fault, such as ``messages[2].content``."""

    message: str
    type: ErrorType
    param: str | None
    code: ErrorCode


class ErrorEnvelope(WireResponse, frozen=True, kw_only=True):
    """The body of every answer that is not a success."""

    error: ErrorDetail
