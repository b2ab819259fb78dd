"""Client of the logitwire server: text, ids, logprobs and complete rows of logits, as numpy arrays."""

from logitwire.alignment import Alignment, align, common_prefix
from logitwire.client import ChatResult, Client, ScoreResult
from logitwire.errors import APIError, ConnectionFailedError, IncompleteStreamError, LogitwireError
from logitwire.files import RowFile, RowFileError, read_rows
from logitwire.iterations import Comparison, Iteration
from logitwire.metrics import entropy, jsd, kl, logprobs_of, perplexity, tvd
from logitwire.tracker import IterationTracker

__all__ = [
    "APIError",
    "Alignment",
    "ChatResult",
    "Client",
    "Comparison",
    "ConnectionFailedError",
    "IncompleteStreamError",
    "Iteration",
    "IterationTracker",
    "LogitwireError",
    "RowFile",
    "RowFileError",
    "ScoreResult",
    "align",
    "common_prefix",
    "entropy",
    "jsd",
    "kl",
    "logprobs_of",
    "perplexity",
    "read_rows",
    "tvd",
]
