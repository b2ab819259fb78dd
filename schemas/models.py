"""The model list."""

from typing import Literal

from schemas.base import WireResponse


class ModelCard(WireResponse, frozen=True, kw_only=True):
    """One served model. ``vocab_size`` is the width of a logits row, padding rows of the head included."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str
    max_model_len: int
    vocab_size: int
    tokenizer_vocab_size: int
    dtype: str


class ModelList(WireResponse, frozen=True, kw_only=True):
    """All served models."""

    object: Literal["list"] = "list"
    data: list[ModelCard]
