"""``POST /v1/chat/completions``."""

import asyncio

from litestar import Request, post
from litestar.datastructures import State
from litestar.di import NamedDependency
from litestar.types import ASGIApp

from engine.engine import Engine
from schemas.chat import ChatRequest
from service.answers import answer_for
from service.convert.chat import ChatDialect, chat_prompt, check_chat, plan_chat
from service.metrics import Metrics
from service.negotiate import negotiate
from service.routes.body import read
from service.settings import Settings
from service.structured import compile_answer


@post("/v1/chat/completions", status_code=200, operation_id="createChatCompletion")
async def create_chat_completion(
    request: Request[object, object, State],
    engine: NamedDependency[Engine],
    metrics: NamedDependency[Metrics],
    settings: NamedDependency[Settings],
) -> ASGIApp:
    """Continue a conversation; see OpenAI's API, and this project's contract for rows."""
    form = negotiate(request.headers.get("accept"))
    chat = await read(request, ChatRequest, engine, settings, text_field="messages")
    check_chat(chat, form, settings)
    prompt = await asyncio.to_thread(chat_prompt, chat, engine.tokenizer, engine.info.max_model_len, settings)
    grammar = await compile_answer(engine, prompt.reading, chat.response_format)
    plan, requests = plan_chat(chat, form, prompt, engine.info, settings, grammar=grammar)
    dialect = ChatDialect(plan, engine.tokenizer, prompt.reading)
    return answer_for(form, is_stream=bool(chat.stream))(engine, metrics, dialect, requests)
