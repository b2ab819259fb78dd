"""The OpenAPI 3.1 document, made from the wire's structs and the handlers of the routes.

A handler gives path, method, name and words; :data:`BODIES` adds what it reads and writes, since bodies are
read by ``service.decode`` and not by the framework.
"""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import msgspec
from litestar.handlers import HTTPRouteHandler
from msgspec import Struct

from schemas.arrow import MEDIA_TYPE
from schemas.base import WireRequest
from schemas.chat import ChatChunk, ChatCompletion, ChatRequest
from schemas.completions import Completion, CompletionRequest
from schemas.errors import ErrorEnvelope
from schemas.generate import (
    AbortAnswer,
    AbortRequest,
    DerenderedMessage,
    DerenderRequest,
    GenerateAnswer,
    GenerateRequest,
    IdLogprobs,
    RenderedRequest,
)
from schemas.health import Health, Readiness, Version
from schemas.logits import SelectedLogits
from schemas.meanings import MEANINGS
from schemas.models import ModelCard, ModelList
from schemas.scoring import DivergenceAnswer, DivergenceRequest, LogitsAnswer, LogitsRequest, RaggedLogits
from schemas.tokenize import (
    DetokenizeAnswer,
    DetokenizeRequest,
    TokenizeAnswer,
    TokenizeRequest,
    TokenizerInfo,
)
from service import __version__
from service.convert.generate import SAMPLING_PARAMS
from service.keys import OPEN_PATHS
from service.metrics import CONTENT_TYPE
from service.negotiate import EVENTS

Schema = dict[str, Any]

DESCRIPTION = """OpenAI's API on Transformers, with the complete raw row of logits for every token.

Ask for rows with `return_logits` (in JSON), or with `Accept: application/vnd.apache.arrow.stream`.
`null` means absent. A field that is not listed here is refused by name."""

FAILURES = {
    400: "This is no HTTP; or the body is no JSON in UTF-8, nested too deeply, or has a key twice.",
    401: "The server has API keys, and the request has none of them.",
    404: "There is no such model.",
    406: "No form of the answer that is asked for is served.",
    413: "Longer than the context, or a body over the limit.",
    414: "The address is too long.",
    415: "The body says that it is no JSON in UTF-8.",
    422: "A field is unknown, not supported, of the wrong type, out of range, or contradicts another one.",
    431: "The headers are too large.",
    500: "The model's numbers cannot be sent, or the server failed; its log says more.",
    503: "The queue is full, or the server is loading or stopping. `Retry-After` says when to come back.",
    504: "It waited or ran for longer than the server allows.",
    507: "Out of memory; the message says what to change. The server goes on.",
}

EVERYWHERE = (400, 414, 431)
READING = (404, 413, 415, 422, 500, 503)
RUNNING = (*READING, 406, 504, 507)


@dataclass(frozen=True, slots=True)
class Bodies:
    """What one operation reads and writes.

    Attributes:
        answer: The JSON of a success; a list of it for operations that answer with one.
        asked: The body of the request.
        chunk: An event of the stream, if it can be streamed.
        has_arrow: Whether the answer may be an Arrow stream.
        failures: Statuses beside 200, and beside those that every operation has.
        example: A body that can be sent as it is, to any model.
    """

    answer: Any
    asked: type[WireRequest] | None = None
    chunk: type[Struct] | None = None
    has_arrow: bool = False
    failures: Sequence[int] = ()
    example: dict[str, Any] | None = None


CHAT = {"messages": [{"role": "user", "content": "Say hi."}], "max_tokens": 8, "temperature": 0}
TEXT = {"prompt": "The capital of France is", "max_tokens": 8, "temperature": 0}
IDS = {"token_ids": [72, 101, 108], "sampling_params": {"max_tokens": 8, "temperature": 0}}
ROWS = {"sequences": [{"text": "To be or not to be"}], "return_logits": False, "token_stats": True}
CONTEXTS = {
    "p": {"text": "The capital of France is"},
    "q": {"text": "The capital of Italy is"},
    "completion": " Paris.",
}

BODIES = {
    "createChatCompletion": Bodies(ChatCompletion, ChatRequest, ChatChunk, True, RUNNING, CHAT),
    "createCompletion": Bodies(Completion, CompletionRequest, Completion, True, RUNNING, TEXT),
    "generate": Bodies(GenerateAnswer, GenerateRequest, GenerateAnswer, True, RUNNING, IDS),
    "renderChatCompletion": Bodies(RenderedRequest, ChatRequest, failures=READING, example=CHAT),
    "renderCompletion": Bodies(list[RenderedRequest], CompletionRequest, failures=READING, example=TEXT),
    "derenderChatCompletion": Bodies(
        DerenderedMessage, DerenderRequest, failures=READING, example={"token_ids": [72, 101, 108]}
    ),
    "abortRequests": Bodies(AbortAnswer, AbortRequest, failures=READING, example={"request_ids": ["a"]}),
    "createLogits": Bodies(LogitsAnswer, LogitsRequest, has_arrow=True, failures=RUNNING, example=ROWS),
    "createDivergence": Bodies(DivergenceAnswer, DivergenceRequest, failures=RUNNING, example=CONTEXTS),
    "tokenize": Bodies(TokenizeAnswer, TokenizeRequest, failures=READING, example={"prompt": "Say hi."}),
    "detokenize": Bodies(
        DetokenizeAnswer, DetokenizeRequest, failures=READING, example={"tokens": [72, 101, 108]}
    ),
    "tokenizerInfo": Bodies(TokenizerInfo, failures=(422, 500, 503)),
    "listModels": Bodies(ModelList, failures=(500, 503)),
    "retrieveModel": Bodies(ModelCard, failures=(404, 500, 503)),
    "health": Bodies(Health),
    "ready": Bodies(Readiness, failures=(503,)),
    "version": Bodies(Version),
    "metrics": Bodies(None),
}

# Structs that stand in fields whose type msgspec cannot describe.
OTHERS: tuple[type[Struct], ...] = (ErrorEnvelope, IdLogprobs, SelectedLogits, RaggedLogits)


@cache
def document(handlers: tuple[HTTPRouteHandler, ...]) -> bytes:
    """Return the document of some handlers, as JSON.

    Raises:
        KeyError: A handler's operation is not in :data:`BODIES`.
    """
    kinds: list[Any] = [*OTHERS]
    for bodies in BODIES.values():
        kinds += [each for each in (bodies.answer, bodies.asked, bodies.chunk) if each is not None]
    refs, schemas = msgspec.json.schema_components(kinds, ref_template="#/components/schemas/{name}")
    ref_of = dict(zip(map(repr, kinds), refs, strict=True))
    for schema in schemas.values():
        _tidy(schema)
    asked = {bodies.asked.__name__ for bodies in BODIES.values() if bodies.asked is not None}
    for name in sorted(asked | {"GivenSequence"}):
        _explain(schemas[name])
    schemas["GenerateRequest"] = _with_sampling_params(schemas["GenerateRequest"])
    paths: dict[str, Any] = {}
    for handler in handlers:
        (path,) = handler.paths
        (method,) = handler.http_methods - {"OPTIONS"}
        operation = _operation(handler, BODIES[str(handler.operation_id)], ref_of)
        paths.setdefault(path.replace(":path}", "}"), {})[method.lower()] = operation
    return msgspec.json.encode(
        {
            "openapi": "3.1.0",
            "info": {"title": "logitwire", "version": __version__, "description": DESCRIPTION},
            "security": [{}, {"key": []}],
            "paths": paths,
            "components": {
                "schemas": schemas,
                "responses": {str(status): _failure(status, words) for status, words in FAILURES.items()},
                "parameters": {
                    "RequestId": {
                        "name": "x-request-id",
                        "in": "header",
                        "description": "Comes back with the answer, and stands in the server's log. One with "
                        "other characters than `A-Za-z0-9._:@/+=-`, or more than 128, is replaced.",
                        "schema": {"type": "string"},
                    }
                },
                "headers": {"RequestId": {"description": "Of this request.", "schema": {"type": "string"}}},
                "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
            },
        }
    )


def _operation(handler: HTTPRouteHandler, bodies: Bodies, ref_of: dict[str, Schema]) -> Schema:
    """Return the description of one operation."""
    words = inspect.cleandoc(handler.fn.__doc__ or "").replace("``", "")
    summary, _, description = words.partition("; ")
    parameters: list[Schema] = [{"$ref": "#/components/parameters/RequestId"}]
    if any("{model_id" in path for path in handler.paths):
        name = {"name": "model_id", "in": "path", "required": True, "schema": {"type": "string"}}
        parameters.append(name)
    success = {"description": "Success.", "headers": _HEADERS, "content": _content(bodies, ref_of)}
    is_open = not OPEN_PATHS.isdisjoint(handler.paths)
    statuses = sorted({*EVERYWHERE, *bodies.failures, *(() if is_open else (401,))})
    failures = {str(status): {"$ref": f"#/components/responses/{status}"} for status in statuses}
    operation = {
        "operationId": handler.operation_id,
        "summary": summary.rstrip("."),
        "parameters": parameters,
        "responses": {"200": success, **failures},
    }
    if is_open:
        operation["security"] = []
    if description:
        operation["description"] = description[0].upper() + description[1:]
    if bodies.asked is not None:
        content = {"application/json": {"schema": ref_of[repr(bodies.asked)], "example": bodies.example}}
        operation["requestBody"] = {"required": True, "content": content}
    return operation


_HEADERS = {"x-request-id": {"$ref": "#/components/headers/RequestId"}}


def _content(bodies: Bodies, ref_of: dict[str, Schema]) -> Schema:
    """Return the forms of a success."""
    if bodies.answer is None:
        return {CONTENT_TYPE: {"schema": {"type": "string"}}}
    content: Schema = {"application/json": {"schema": ref_of[repr(bodies.answer)]}}
    if bodies.chunk is not None:
        content[EVENTS] = {"schema": _event(ref_of[repr(bodies.chunk)])}
    if bodies.has_arrow:
        content[MEDIA_TYPE] = {}
    return content


def _event(chunk: Schema) -> Schema:
    """Return the schema of a server-sent event; a failure has its envelope there, and the end its mark."""
    options = [chunk, {"$ref": "#/components/schemas/ErrorEnvelope"}]
    spelled = {"contentMediaType": "application/json", "contentSchema": {"anyOf": options}}
    data = {"type": "string", "anyOf": [spelled, {"const": "[DONE]"}]}
    return {"type": "object", "required": ["data"], "properties": {"data": data}}


def _failure(status: int, words: str) -> Schema:
    headers: Schema = dict(_HEADERS)
    if status == 401:
        headers["www-authenticate"] = {"schema": {"type": "string"}}
    elif status == 503:
        headers["retry-after"] = {"description": "Seconds.", "schema": {"type": "integer"}}
    content = {"application/json": {"schema": {"$ref": "#/components/schemas/ErrorEnvelope"}}}
    return {"description": words, "headers": headers, "content": content}


def _tidy(schema: Any) -> None:
    """Drop, in place, what says nothing: null as a default, and that encoded JSON may stand for a value."""
    if isinstance(schema, list):
        for each in schema:
            _tidy(each)
    elif isinstance(schema, dict):
        if "default" in schema and schema["default"] is None:
            del schema["default"]
        if {} in schema.get("anyOf", ()):
            kept = [each for each in schema.pop("anyOf") if each]
            schema |= kept[0] if len(kept) == 1 else {"anyOf": kept}
        for each in schema.values():
            _tidy(each)


def _explain(schema: Schema) -> None:
    """Add, in place, what the fields of a request mean."""
    for name, field in schema["properties"].items():
        if name in MEANINGS:
            field["description"] = MEANINGS[name]


def _with_sampling_params(schema: Schema) -> Schema:
    """Return the schema of a body whose fields may also stand in an object inside of it."""
    fields = schema["properties"]
    inside = {name: each for name, each in fields.items() if name not in SAMPLING_PARAMS.beside}
    nested = {"type": "object", "properties": inside, "additionalProperties": False}
    named = {SAMPLING_PARAMS.name: {"anyOf": [nested, {"type": "null"}]}}
    return {**schema, "properties": {**fields, **named}}
