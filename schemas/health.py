"""Liveness, readiness, and the versions of everything that shapes logits."""

from typing import Literal

from schemas.base import WireResponse


class Health(WireResponse, frozen=True, kw_only=True):
    """The process answers."""

    status: Literal["ok"] = "ok"


class Readiness(WireResponse, frozen=True, kw_only=True):
    """The model is loaded, and the last step succeeded.

    ``path`` says how sequences are run: ``one_at_a_time`` each on its own cache, or ``batched``.
    """

    status: Literal["ready"]
    model: str
    path: str
    running: int
    waiting: int


class Version(WireResponse, frozen=True, kw_only=True):
    """Versions of the server and of the libraries that shape logits."""

    logitwire: str
    python: str
    torch: str
    transformers: str
    accelerate: str
    tokenizers: str
    numpy: str
    pyarrow: str
