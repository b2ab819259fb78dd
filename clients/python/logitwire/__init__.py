"""Client of the logitwire server: text, ids, logprobs and complete rows of logits, as numpy arrays."""

from logitwire.aio import AsyncClient, AsyncRowStream
from logitwire.alignment import Alignment, align, common_prefix
from logitwire.capture import Capture, CaptureError, check_capture, open_capture
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
from logitwire.files import RowFile, RowFileError, read_rows
from logitwire.iterations import Comparison, Iteration
from logitwire.metrics import entropy, jsd, kl, logprobs_of, perplexity, tvd
from logitwire.results import Divergence, DivergenceStep, Generation, Row, Score
from logitwire.tracker import IterationTracker

__all__ = [
    "APIConnectionError",
    "APIError",
    "APITimeoutError",
    "Alignment",
    "AsyncClient",
    "AsyncRowStream",
    "AuthenticationError",
    "BadRequestError",
    "Capture",
    "CaptureError",
    "Client",
    "Comparison",
    "ContextLengthError",
    "Divergence",
    "DivergenceStep",
    "Generation",
    "IncompleteStreamError",
    "Iteration",
    "IterationTracker",
    "LogitwireError",
    "NotFoundError",
    "OverloadedError",
    "PermissionDeniedError",
    "RateLimitError",
    "Row",
    "RowFile",
    "RowFileError",
    "RowStream",
    "Score",
    "ServerError",
    "UnprocessableEntityError",
    "align",
    "check_capture",
    "common_prefix",
    "entropy",
    "jsd",
    "kl",
    "logprobs_of",
    "open_capture",
    "perplexity",
    "read_rows",
    "tvd",
]
