"""Tokens in, tokens out: generate, render, derender, and ending requests early."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import msgspec
from litestar import Request, Response, post
from litestar.datastructures import State
from litestar.di import NamedDependency
from litestar.types import ASGIApp

from engine.engine import Engine
from engine.errors import InvalidRequestError
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
from service.convert.chat import chat_prompt, check_chat, max_tokens_of
from service.convert.completions import check_completion, completion_prompts
from service.convert.generate import (
    SAMPLING_PARAMS,
    GenerateDialect,
    check_fits,
    check_generate,
    derender,
    plan_generate,
    rendered_chat,
    rendered_completions,
    text_field_of,
)
from service.convert.reading import Reading
from service.decode import nested_path
from service.errors import ProblemsError, ServiceError
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
    try:
        reading = check_generate(asked, form, engine.info, settings)
        if (needing := text_field_of(asked)) is not None:
            require_tokenizer(engine, needing)
        grammar = await compile_answer(engine, reading, asked.response_format)
        plan, requests = plan_generate(asked, form, engine.info, settings, reading=reading, grammar=grammar)
    except (ProblemsError, ServiceError, InvalidRequestError) as error:
        raise _as_stated(error, await request.body()) from error
    dialect = GenerateDialect(plan, engine.tokenizer, reading, asked)
    return answer_for(form, is_stream=bool(asked.stream))(engine, metrics, dialect, requests)


def _as_stated(error: Exception, body: bytes) -> Exception:
    """Return a refusal that names its fields where the body has them."""
    if isinstance(error, ProblemsError):
        problems = [
            replace(each, param=nested_path(body, SAMPLING_PARAMS, each.param)) for each in error.problems
        ]
        return ProblemsError(problems)
    if isinstance(error, ServiceError):
        return ServiceError(error.code, str(error), nested_path(body, SAMPLING_PARAMS, error.param))
    assert isinstance(error, InvalidRequestError)
    return InvalidRequestError(str(error), nested_path(body, SAMPLING_PARAMS, error.param))


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
    # What is rendered must be fit to be posted, so it is refused here as it would be there.
    check_fits(len(prompt.token_ids), max_tokens_of(chat), engine.info)
    await compile_answer(engine, prompt.reading, chat.response_format)
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
    for prompt in prompts:
        check_fits(len(prompt.token_ids), asked.max_tokens, engine.info)
    await compile_answer(engine, Reading(), asked.response_format)
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
