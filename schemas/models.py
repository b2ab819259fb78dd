"""The model list."""

from typing import Literal

from schemas.base import WireResponse


class ModelCard(WireResponse):
    """One served model. ``vocab_size`` is the width of a logits row, padding rows of the head included."""

    id: str
    created: int
    owned_by: str
    max_model_len: int
    vocab_size: int
    tokenizer_vocab_size: int
    dtype: str
    object: Literal["model"] = "model"


class ModelList(WireResponse):
    """All served models."""

    data: list[ModelCard]
    object: Literal["list"] = "list"
