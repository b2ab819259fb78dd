"""Client of the logitwire server: text, ids, logprobs and complete rows of logits, as numpy arrays."""

from logitwire.client import ChatResult, Client, ScoreResult
from logitwire.errors import APIError, ConnectionFailedError, IncompleteStreamError, LogitwireError
from logitwire.metrics import jsd

__all__ = [
    "APIError",
    "ChatResult",
    "Client",
    "ConnectionFailedError",
    "IncompleteStreamError",
    "LogitwireError",
    "ScoreResult",
    "jsd",
]
