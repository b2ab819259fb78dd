"""Tokenising: requests to ids, ids to text, and the tokenizer's facts."""

import sys
from dataclasses import fields

from engine.tokenizer import Tokenizer
from engine.types import ModelInfo
from schemas.chat import ChatRequest
from schemas.tokenize import (
    AddedTokenFacts,
    DetokenizeAnswer,
    DetokenizeRequest,
    TokenizeAnswer,
    TokenizeRequest,
    TokenizerInfo,
)
from service.convert.chat import chat_prompt, check_chat
from service.errors import Problem, ProblemsError
from service.negotiate import Representation
from service.settings import Settings

_OF_CHATS = (
    "add_generation_prompt",
    "continue_final_message",
    "chat_template",
    "chat_template_kwargs",
    "tools",
)


def check_tokenize(request: TokenizeRequest, settings: Settings) -> ChatRequest | None:
    """Refuse what contradicts itself.

    Returns:
        The chat whose prompt is asked for; ``None`` if it is a text's.

    Raises:
        ProblemsError: With every problem found.
    """
    if (request.prompt is None) == (request.messages is None):
        message = "expected either prompt or messages" + ("" if request.prompt is None else ", not both")
        raise ProblemsError([Problem("invalid_value", message, "prompt")])
    of_chat = {name: value for name in _OF_CHATS if (value := getattr(request, name)) is not None}
    if request.messages is None:
        if of_chat:
            raise ProblemsError(
                [Problem("invalid_value", "goes with messages, not with a prompt", name) for name in of_chat]
            )
        return None
    chat = ChatRequest(messages=request.messages, **of_chat)
    check_chat(chat, Representation.JSON, settings)
    return chat


def tokenize(
    request: TokenizeRequest,
    chat: ChatRequest | None,
    tokenizer: Tokenizer,
    info: ModelInfo,
    settings: Settings,
) -> TokenizeAnswer:
    """Return the ids of a text, or those that a chat would run.

    Prompts longer than the context are tokenised too: who measures them wants to know how much to cut.
    Takes long for long prompts: not for the event loop.

    Raises:
        InvalidRequestError: The chat template refuses the messages.
        ProblemsError: The model's way of calling tools is not known.
    """
    if chat is not None:
        token_ids = chat_prompt(
            chat, tokenizer, sys.maxsize, settings, add_special_tokens=bool(request.add_special_tokens)
        ).token_ids
    else:
        assert request.prompt is not None
        token_ids = tokenizer.encode(
            request.prompt, add_special_tokens=request.add_special_tokens is not False
        )
    return TokenizeAnswer(
        count=len(token_ids),
        max_model_len=info.max_model_len,
        tokens=token_ids,
        token_strs=tokenizer.pieces(token_ids) if request.return_token_strs else None,
    )


def detokenize(request: DetokenizeRequest, tokenizer: Tokenizer, info: ModelInfo) -> DetokenizeAnswer:
    """Return the text of ids. Padding rows of the head have none.

    Takes long for many ids: not for the event loop.

    Raises:
        ProblemsError: An id is not in the vocabulary.
    """
    for place, token_id in enumerate(request.tokens):
        if token_id >= info.vocab_size:
            message = f"token id {token_id} is not in 0..{info.vocab_size - 1}"
            raise ProblemsError([Problem("invalid_value", message, f"tokens[{place}]")])
    return DetokenizeAnswer(prompt=tokenizer.decode(request.tokens, skip_special_tokens=False))


def tokenizer_info(tokenizer: Tokenizer, info: ModelInfo) -> TokenizerInfo:
    """Return what a client needs to know to tokenise like the server."""
    facts = tokenizer.facts()
    return TokenizerInfo(
        tokenizer_class=facts.class_name,
        model_max_length=info.max_model_len,
        bos_token=facts.bos_token,
        eos_token=facts.eos_token,
        unk_token=facts.unk_token,
        pad_token=facts.pad_token,
        chat_template=facts.chat_template,
        added_tokens_decoder={
            token_id: AddedTokenFacts(**{field.name: getattr(token, field.name) for field in fields(token)})
            for token_id, token in facts.added_tokens.items()
        },
    )
