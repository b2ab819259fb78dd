"""``POST /tokenize``, ``POST /detokenize`` and ``GET /tokenizer_info``."""

import asyncio

import msgspec
from litestar import MediaType, Request, Response, get, post
from litestar.datastructures import State
from litestar.di import NamedDependency

from engine.engine import Engine
from schemas.tokenize import DetokenizeRequest, TokenizeRequest, TokenizerInfo
from service.convert.tokenize import check_tokenize, detokenize, tokenize, tokenizer_info
from service.routes.body import read, require_tokenizer
from service.settings import Settings


@post("/tokenize", status_code=200, operation_id="tokenize")
async def tokenize_prompt(
    request: Request[object, object, State],
    engine: NamedDependency[Engine],
    settings: NamedDependency[Settings],
) -> Response[bytes]:
    """Return the token ids of a text, or of a conversation as the chat endpoint would run it."""
    asked = await read(request, TokenizeRequest, engine, settings, text_field="prompt")
    chat = check_tokenize(asked, settings)
    # A long text has so many ids that to write them down is no work for the event loop either.
    body = await asyncio.to_thread(
        lambda: msgspec.json.encode(tokenize(asked, chat, engine.tokenizer, engine.info, settings))
    )
    return Response(body, media_type=MediaType.JSON)


@post("/detokenize", status_code=200, operation_id="detokenize")
async def detokenize_prompt(
    request: Request[object, object, State],
    engine: NamedDependency[Engine],
    settings: NamedDependency[Settings],
) -> Response[bytes]:
    """Return the text of token ids, special tokens included."""
    asked = await read(request, DetokenizeRequest, engine, settings, text_field="tokens")
    body = await asyncio.to_thread(
        lambda: msgspec.json.encode(detokenize(asked, engine.tokenizer, engine.info))
    )
    return Response(body, media_type=MediaType.JSON)


@get("/tokenizer_info", operation_id="tokenizerInfo")
async def get_tokenizer_info(engine: NamedDependency[Engine]) -> TokenizerInfo:
    """Describe the tokenizer as a checkpoint's ``tokenizer_config.json`` does."""
    require_tokenizer(engine, None)
    return tokenizer_info(engine.tokenizer, engine.info)
