"""``POST /v1/completions``."""

import asyncio

from litestar import Request, post
from litestar.datastructures import State
from litestar.di import NamedDependency
from litestar.types import ASGIApp

from engine.engine import Engine
from schemas.completions import CompletionRequest
from service.answers import answer_for
from service.convert.completions import (
    CompletionDialect,
    check_completion,
    completion_prompts,
    plan_completion,
)
from service.metrics import Metrics
from service.negotiate import negotiate
from service.routes.body import read
from service.settings import Settings
from service.structured import compile_format


@post("/v1/completions", status_code=200, operation_id="createCompletion")
async def create_completion(
    request: Request[object, object, State],
    engine: NamedDependency[Engine],
    metrics: NamedDependency[Metrics],
    settings: NamedDependency[Settings],
) -> ASGIApp:
    """Continue texts or token ids; see OpenAI's legacy API, and this project's contract for rows."""
    form = negotiate(request.headers.get("accept"))
    completion = await read(request, CompletionRequest, engine, settings, text_field="prompt")
    raw_prompts = check_completion(completion, form, settings)
    prompts = await asyncio.to_thread(
        completion_prompts, completion, raw_prompts, engine.tokenizer, engine.info
    )
    grammar = await compile_format(engine, completion.response_format)
    plan, requests = plan_completion(completion, form, prompts, engine.info, settings, grammar=grammar)
    dialect = CompletionDialect(plan, engine.tokenizer, prompts if completion.echo else None)
    return answer_for(form, is_stream=bool(completion.stream))(engine, metrics, dialect, requests)
