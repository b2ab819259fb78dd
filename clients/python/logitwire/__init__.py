"""Client of the logitwire server: text, ids, logprobs and complete rows of logits, as numpy arrays."""

from logitwire.aio import AsyncClient, AsyncRowStream
from logitwire.client import Client, RowStream
from logitwire.errors import (
    APIConnectionError,
    APIError,
    APITimeoutError,
    AuthenticationError,
    BadRequestError,
    ContextLengthError,
    IncompleteStreamError,
    LogitwireError,
    NotFoundError,
    OverloadedError,
    PermissionDeniedError,
    RateLimitError,
    ServerError,
    UnprocessableEntityError,
)
from logitwire.metrics import jsd
from logitwire.results import Divergence, DivergenceStep, Generation, Row, Score

__all__ = [
    "APIConnectionError",
    "APIError",
    "APITimeoutError",
    "AsyncClient",
    "AsyncRowStream",
    "AuthenticationError",
    "BadRequestError",
    "Client",
    "ContextLengthError",
    "Divergence",
    "DivergenceStep",
    "Generation",
    "IncompleteStreamError",
    "LogitwireError",
    "NotFoundError",
    "OverloadedError",
    "PermissionDeniedError",
    "RateLimitError",
    "Row",
    "RowStream",
    "Score",
    "ServerError",
    "UnprocessableEntityError",
    "jsd",
]
