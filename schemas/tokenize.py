"""Tokenising and back, and what kind of tokenizer it is; names as in vLLM."""

from typing import Annotated, Any

from msgspec import Meta

from schemas.base import TokenId, WireRequest, WireResponse
from schemas.chat import ChatMessage, Tool


class TokenizeRequest(WireRequest, frozen=True, kw_only=True):
    """The body of ``POST /tokenize``: either a text or a conversation.

    ``add_special_tokens`` is true for a text if it is absent, and false for a conversation, whose template
    writes its own.
    """

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Meta(min_length=1)] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None

    # With messages only.
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[Tool] | None = None


class TokenizeAnswer(WireResponse, frozen=True, kw_only=True):
    """The ids of a prompt. ``token_strs`` are the vocabulary's own spellings, such as ``Ġthe``."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeRequest(WireRequest, frozen=True, kw_only=True):
    """The body of ``POST /detokenize``."""

    model: str | None = None
    tokens: list[TokenId]


class DetokenizeAnswer(WireResponse, frozen=True, kw_only=True):
    """The text of ids, special tokens included."""

    prompt: str


class AddedTokenFacts(WireResponse, frozen=True, kw_only=True):
    """A token that was added to the vocabulary; special ones mark structure."""

    content: str
    single_word: bool
    lstrip: bool
    rstrip: bool
    normalized: bool
    special: bool


class TokenizerInfo(WireResponse, frozen=True, kw_only=True):
    """The answer of ``GET /tokenizer_info``, named as in a checkpoint's ``tokenizer_config.json``.

    ``model_max_length`` is the served context, which the checkpoint's own file often leaves open.
    """

    tokenizer_class: str
    model_max_length: int
    bos_token: str | None
    eos_token: str | None
    unk_token: str | None
    pad_token: str | None
    chat_template: str | None
    added_tokens_decoder: dict[int, AddedTokenFacts]
