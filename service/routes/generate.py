"""Tokens in, tokens out: generate, render, derender, and ending requests early."""

import asyncio
from collections.abc import Sequence

import msgspec
from litestar import Request, Response, post
from litestar.datastructures import State
from litestar.di import NamedDependency
from litestar.types import ASGIApp

from engine.engine import Engine
from schemas.base import WireResponse
from schemas.chat import ChatRequest
from schemas.completions import CompletionRequest
from schemas.generate import (
    AbortAnswer,
    AbortRequest,
    DerenderRequest,
    GenerateRequest,
)
from service.answers import answer_for
from service.convert.chat import chat_prompt, check_chat
from service.convert.completions import check_completion, completion_prompts
from service.convert.generate import (
    SAMPLING_PARAMS,
    GenerateDialect,
    check_generate,
    derender,
    plan_generate,
    rendered_chat,
    rendered_completions,
    text_field_of,
)
from service.metrics import Metrics
from service.negotiate import Representation, negotiate
from service.routes.body import read, require_tokenizer
from service.settings import Settings
from service.structured import compile_answer


@post("/inference/v1/generate", status_code=200, operation_id="generate")
async def generate(
    request: Request[object, object, State],
    engine: NamedDependency[Engine],
    metrics: NamedDependency[Metrics],
    settings: NamedDependency[Settings],
) -> ASGIApp:
    """Continue token ids; see vLLM's API of the same path."""
    form = negotiate(request.headers.get("accept"))
    asked = await read(request, GenerateRequest, engine, settings, SAMPLING_PARAMS)
    reading = check_generate(asked, form, engine.info, settings)
    if (needing := text_field_of(asked)) is not None:
        require_tokenizer(engine, needing)
    grammar = await compile_answer(engine, reading, asked.response_format)
    plan, requests = plan_generate(asked, form, engine.info, settings, reading=reading, grammar=grammar)
    dialect = GenerateDialect(plan, engine.tokenizer, reading, asked)
    return answer_for(form, is_stream=bool(asked.stream))(engine, metrics, dialect, requests)


@post("/v1/chat/completions/render", status_code=200, operation_id="renderChatCompletion")
async def render_chat(
    request: Request[object, object, State],
    engine: NamedDependency[Engine],
    settings: NamedDependency[Settings],
) -> Response[bytes]:
    """Return what to post to ``/inference/v1/generate`` for the answer that the chat would get."""
    chat = await read(request, ChatRequest, engine, settings, text_field="messages")
    check_chat(chat, Representation.JSON, settings)
    prompt = await asyncio.to_thread(chat_prompt, chat, engine.tokenizer, engine.info.max_model_len, settings)
    return _json(rendered_chat(chat, prompt, settings.served_model_name or engine.info.name))


@post("/v1/completions/render", status_code=200, operation_id="renderCompletion")
async def render_completion(
    request: Request[object, object, State],
    engine: NamedDependency[Engine],
    settings: NamedDependency[Settings],
) -> Response[bytes]:
    """Return what to post to ``/inference/v1/generate``, one body per prompt."""
    asked = await read(request, CompletionRequest, engine, settings, text_field="prompt")
    raw = check_completion(asked, Representation.JSON, settings)
    prompts = await asyncio.to_thread(completion_prompts, asked, raw, engine.tokenizer, engine.info)
    return _json(rendered_completions(asked, prompts, settings.served_model_name or engine.info.name))


@post("/v1/chat/completions/derender", status_code=200, operation_id="derenderChatCompletion")
async def derender_chat(
    request: Request[object, object, State],
    engine: NamedDependency[Engine],
    settings: NamedDependency[Settings],
) -> Response[bytes]:
    """Return the chat message that token ids spell."""
    asked = await read(request, DerenderRequest, engine, settings, text_field="token_ids")
    return _json(await asyncio.to_thread(derender, asked, engine.tokenizer, engine.info))


@post("/abort_requests", status_code=200, operation_id="abortRequests")
async def abort_requests(
    request: Request[object, object, State],
    engine: NamedDependency[Engine],
    settings: NamedDependency[Settings],
) -> Response[bytes]:
    """End requests now; their readers get what there is so far, and the finish reason ``abort``."""
    asked = await read(request, AbortRequest, engine, settings)
    return _json(AbortAnswer(aborted=engine.abort(asked.request_ids)))


def _json(answer: WireResponse | Sequence[WireResponse]) -> Response[bytes]:
    return Response(msgspec.json.encode(answer), media_type="application/json")
