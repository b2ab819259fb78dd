"""Tool calls over HTTP: offered, forced, sent back."""

import json
from typing import Any

import pytest

from engine.fake import CHAT_TEMPLATE
from tests.conftest import Serve
from tests.fakes import hooked_load
from tests.serving import ServerThread

PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Rome", "Oslo"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "weather", "description": "w", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "clock"}},
]
NAMED = {"type": "function", "function": {"name": "weather"}}


@pytest.mark.parametrize("tool_parser", ["auto", "hermes", "llama3", "mistral"])
@pytest.mark.parametrize("temperature", [0, 1])
def test_a_named_function_is_called(serve: Serve, tool_parser: str, temperature: float) -> None:
    server = serve(hooked_load(script="I would rather not."), tool_parser=tool_parser)
    for seed in range(3):
        reply = server.chat(
            tools=TOOLS, tool_choice=NAMED, temperature=temperature, seed=seed, max_tokens=200, logprobs=True
        )
        assert reply.status == 200, reply.body
        choice = reply.json["choices"][0]
        # OpenAI's word for it, since the model had no choice.
        assert choice["finish_reason"] == "stop"
        assert choice["message"]["content"] is None
        (call,) = choice["message"]["tool_calls"]
        assert call["function"]["name"] == "weather"
        arguments = json.loads(call["function"]["arguments"])
        assert arguments["city"] in ("Rome", "Oslo")
        assert 1 <= arguments["days"] <= 9
        assert choice["logprobs"]["content"] == []


@pytest.mark.parametrize("tool_parser", ["hermes", "llama3", "mistral"])
def test_some_function_is_called_if_one_must_be(serve: Serve, tool_parser: str) -> None:
    server = serve(hooked_load(script="No."), tool_parser=tool_parser)
    for seed in range(4):
        reply = server.chat(
            tools=TOOLS,
            tool_choice="required",
            parallel_tool_calls=False,
            temperature=1,
            seed=seed,
            max_tokens=300,
        )
        choice = reply.json["choices"][0]
        (call,) = choice["message"]["tool_calls"]
        assert call["function"]["name"] in ("weather", "clock")
        if choice["finish_reason"] != "length":
            assert choice["finish_reason"] == "tool_calls"
            json.loads(call["function"]["arguments"])


def test_reasoning_comes_before_a_forced_call(serve: Serve) -> None:
    # A template that opens the reasoning itself.
    template = CHAT_TEMPLATE.replace("assistant\n' }}", "assistant\n<think>\n' }}")
    assert "<think>" in template
    server = serve(
        hooked_load(script="Hm, hm.</think>No!", chat_template=template), reasoning_parser="<think>,</think>"
    )
    choice = server.chat(tools=TOOLS, tool_choice=NAMED, max_tokens=200).json["choices"][0]
    assert choice["message"]["reasoning_content"] == "Hm, hm."
    assert choice["message"]["tool_calls"][0]["function"]["name"] == "weather"
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": PARAMETERS}}
    choice = server.chat(response_format=wanted, max_tokens=200).json["choices"][0]
    assert choice["message"]["reasoning_content"] == "Hm, hm."
    assert json.loads(choice["message"]["content"])["city"] in ("Rome", "Oslo")


def prompt_of(server: ServerThread, **fields: Any) -> str:
    reply = server.chat(return_token_ids=True, max_tokens=1, **fields)
    assert reply.status == 200, reply.body
    return bytes(each for each in reply.json["prompt_token_ids"] if each < 256).decode()


CONVERSATION = [
    {"role": "user", "content": "Weather?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
        ],
    },
    {"role": "tool", "tool_call_id": "1", "content": "sunny"},
]


def test_a_template_without_tools_gets_them_as_text(scripted: ServerThread) -> None:
    prompt = prompt_of(scripted, messages=CONVERSATION, tools=TOOLS)
    assert prompt.startswith("system\n")
    assert '"name": "clock"' in prompt
    assert '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>' in prompt
    assert "user\n<tool_response>\nsunny\n</tool_response>" in prompt
    own = [{"role": "system", "content": "Be kind."}, *CONVERSATION]
    assert prompt_of(scripted, messages=own, tools=TOOLS).startswith("system\nBe kind.\n\n")
    assert "clock" not in prompt_of(scripted, messages=CONVERSATION, tools=TOOLS, tool_choice="none")


NATIVE = (
    "{% for tool in tools or [] %}[{{ tool.function.name }}]{% endfor %}"
    "{% for message in messages %}{{ message.role }}:"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function.arguments.city }}{% endfor %}"
    "{{ message.content }};{% endfor %}"
)


def test_a_template_with_tools_gets_them_as_they_are(serve: Serve) -> None:
    server = serve(hooked_load(chat_template=NATIVE))
    prompt = prompt_of(server, messages=CONVERSATION, tools=TOOLS)
    assert prompt == "[weather][clock]user:Weather?;assistant:<tool_call>Rome;tool:sunny;"


def test_a_template_with_calls_in_an_unknown_form_is_refused(serve: Serve) -> None:
    server = serve(hooked_load(chat_template=NATIVE.replace("<tool_call>", "<call>")))
    reply = server.chat(tools=TOOLS)
    assert reply.status == 422
    assert (reply.error["code"], reply.error["param"]) == ("unsupported_parameter", "tools")
    assert "TOOL_PARSER" in reply.error["message"]


def test_tools_can_be_turned_off(serve: Serve) -> None:
    reply = serve(tool_parser="off").chat(tools=TOOLS)
    assert (reply.status, reply.error["param"]) == (422, "tools")


def test_a_schema_that_cannot_be_obeyed_names_its_tool(scripted: ServerThread) -> None:
    bad = {"type": "function", "function": {"name": "bad", "parameters": {"type": "nothing"}}}
    reply = scripted.chat(tools=[TOOLS[0], bad], tool_choice="required")
    assert reply.status == 422
    assert reply.error["param"] == "tools[1].function.parameters"


def test_a_request_may_bring_a_template_only_where_that_is_allowed(serve: Serve) -> None:
    server = serve(allow_chat_template=True)
    assert prompt_of(server, chat_template="{{ messages[0].content }}!") == "Say hi.!"
    reply = server.chat(chat_template="{{ messages[0].content")
    assert (reply.status, reply.error["code"]) == (422, "invalid_value")


@pytest.mark.parametrize(
    ("choice", "code", "param"),
    [
        ({"type": "allowed_tools"}, "unsupported_parameter", "tool_choice.type"),
        ({"type": "function"}, "invalid_value", "tool_choice.function.name"),
        ("any", "invalid_value", "tool_choice"),
    ],
)
def test_a_choice_of_another_kind_is_refused(
    scripted: ServerThread, choice: Any, code: str, param: str
) -> None:
    reply = scripted.chat(tools=TOOLS, tool_choice=choice)
    assert (reply.status, reply.error["code"], reply.error["param"]) == (422, code, param)


def test_a_misspelt_key_of_a_tool_is_named(scripted: ServerThread) -> None:
    reply = scripted.chat(tools=[{"type": "function", "function": {"name": "f", "paramters": {}}}])
    assert (reply.error["code"], reply.error["param"]) == ("unknown_parameter", "tools[0].function.paramters")
