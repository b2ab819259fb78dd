"""``POST /v1/chat/completions``."""

import asyncio

from litestar import Request, post
from litestar.datastructures import State
from litestar.di import NamedDependency
from litestar.types import ASGIApp

from engine.engine import Engine
from schemas.chat import ChatRequest
from service.answers import ArrowAnswer, JsonAnswer
from service.convert import chat_prompt, check_chat, plan_chat
from service.decode import check_content_type, decode, read_body
from service.errors import ServiceError
from service.metrics import Metrics
from service.negotiate import Representation, negotiate
from service.settings import Settings
from service.structured import compile_response_format


@post("/v1/chat/completions", status_code=200, operation_id="createChatCompletion")
async def create_chat_completion(
    request: Request[object, object, State],
    engine: NamedDependency[Engine],
    metrics: NamedDependency[Metrics],
    settings: NamedDependency[Settings],
) -> ASGIApp:
    """Continue a conversation; see OpenAI's API, and this project's contract for rows."""
    check_content_type(request.headers.get("content-type"))
    form = negotiate(request.headers.get("accept"))
    chat = decode(ChatRequest, await read_body(request), ignore_unknown=settings.unknown_fields == "ignore")
    engine.check_ready()
    served = settings.served_model_name or engine.info.name
    if chat.model not in (None, served):
        raise ServiceError("model_not_found", f"this server has {served}", "model")
    check_chat(chat, form, settings)
    prompt_token_ids = await asyncio.to_thread(chat_prompt, chat, engine.tokenizer, engine.info.max_model_len)
    grammar = await compile_response_format(engine, chat.response_format)
    plan, requests = plan_chat(chat, form, prompt_token_ids, engine.info, settings, grammar=grammar)
    answer = ArrowAnswer if form is Representation.ARROW else JsonAnswer
    return answer(engine, metrics, plan, requests)
