"""LangChain's ChatOpenAI works on this server: messages, streams, logprobs, structured output, tools."""

from collections.abc import Iterator
from typing import Any

import openai
import pydantic
import pytest

from tests.contract.noise import ODD_METADATA
from tests.replies import GREETING, MODEL, RESULT, TOOLS
from tests.serving import ServerThread

pytestmark = [pytest.mark.usefixtures("only_this_machine"), ODD_METADATA]


class Event(pydantic.BaseModel):
    """An event."""

    name: str
    days: list[int]


@pytest.fixture
def asked(replying: ServerThread, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    # It reports to a service of its own, if the environment says so.
    monkeypatch.setenv("LANGSMITH_TRACING", "false")
    return {"model": MODEL, "base_url": f"{replying.url}/v1", "api_key": "none", "temperature": 0}


@pytest.fixture
def chat(asked: dict[str, Any]) -> Iterator[Any]:
    # Here, since the import takes two seconds.
    from langchain_openai import ChatOpenAI

    # Its own connections would stay open as long as the process lives.
    with openai.DefaultHttpxClient() as http_client:
        yield ChatOpenAI(**asked, http_client=http_client)


def test_it_chats_and_counts(chat: Any) -> None:
    answer = chat.invoke([("system", "Be brief."), ("human", "Hi.")])
    assert answer.content == GREETING
    assert answer.response_metadata["finish_reason"] == "stop"
    assert answer.response_metadata["model_name"] == MODEL
    assert answer.usage_metadata["output_tokens"] == len(GREETING.encode()) + 1


def test_it_streams(chat: Any) -> None:
    parts = list(chat.stream("Hi.", stream_usage=True))
    assert len(parts) > 2
    whole = parts[0]
    for part in parts[1:]:
        whole += part
    assert whole.content == GREETING
    assert whole.usage_metadata["output_tokens"] == len(GREETING.encode()) + 1


async def test_it_chats_and_streams_asynchronously(asked: dict[str, Any]) -> None:
    from langchain_openai import ChatOpenAI

    async with openai.DefaultAsyncHttpxClient() as http_client:
        chat = ChatOpenAI(**asked, http_async_client=http_client)
        assert (await chat.ainvoke("Hi.")).content == GREETING
        assert "".join([part.text async for part in chat.astream("Hi.")]) == GREETING
        answers = await chat.abatch(["Hi.", "Think."])
        assert [answer.content for answer in answers] == [GREETING, "It is 4."]


def test_it_has_logprobs_whole_and_streamed(chat: Any) -> None:
    bound = chat.bind(logprobs=True, top_logprobs=2)
    entries = bound.invoke("Hi.").response_metadata["logprobs"]["content"]
    assert b"".join(bytes(entry["bytes"]) for entry in entries).decode() == GREETING
    for entry in entries:
        best, other = entry["top_logprobs"]
        assert entry["logprob"] == best["logprob"] > other["logprob"]
    streamed: list[Any] = []
    for part in bound.stream("Hi."):
        streamed += part.response_metadata.get("logprobs", {}).get("content") or []
    assert streamed == entries


@pytest.mark.parametrize(
    ("method", "words"),
    [
        ("json_schema", "An event."),
        ("json_mode", "An event."),
        ("function_calling", "A call for an event."),
    ],
)
def test_it_has_structured_output(chat: Any, method: str, words: str) -> None:
    bound = chat.with_structured_output(Event, method=method, include_raw=True)
    answer = bound.invoke(words)
    assert answer["parsing_error"] is None
    assert answer["parsed"] == Event(name="Fair", days=[5, 6])


# The SDK's helper puts the parsed object into its answer, and LangChain dumps it as if there were none.
@pytest.mark.filterwarnings(
    r"ignore:Pydantic serializer warnings.\n  PydanticSer[^\n]*field_name='parsed'[^\n]*$:UserWarning"
)
def test_strict_structured_output_streams(chat: Any) -> None:
    bound = chat.with_structured_output(Event, method="json_schema", strict=True)
    assert list(bound.stream("An event."))[-1] == Event(name="Fair", days=[5, 6])


@pytest.mark.parametrize("tool_choice", [None, "any", "auto", "get_weather"])
def test_it_calls_tools_and_goes_on_with_their_results(chat: Any, tool_choice: str | None) -> None:
    from langchain_core.messages import HumanMessage, ToolMessage

    bound = chat.bind_tools(TOOLS, tool_choice=tool_choice)
    asked = HumanMessage("One call.")
    called = bound.invoke([asked])
    (call,) = called.tool_calls
    assert (call["name"], call["args"]) == ("get_weather", {"city": "Oslo"})
    assert call["id"]
    result = ToolMessage(RESULT, tool_call_id=call["id"])
    answer = chat.bind_tools(TOOLS).invoke([asked, called, result])
    assert answer.content == "It is 18 degrees in Oslo."
    assert answer.tool_calls == []


def test_it_puts_streamed_calls_together(chat: Any) -> None:
    parts = list(chat.bind_tools(TOOLS).stream("Two calls."))
    whole = parts[0]
    for part in parts[1:]:
        whole += part
    assert whole.content == "Sure."
    assert [(call["name"], call["args"]) for call in whole.tool_calls] == [
        ("get_weather", {"city": "Oslo"}),
        ("get_time", {"zone": "CET"}),
    ]


def test_it_raises_the_error_of_the_sdk_underneath(chat: Any) -> None:
    with pytest.raises(openai.UnprocessableEntityError) as caught:
        chat.invoke("Hi.", top_p=2)
    assert (caught.value.code, caught.value.param) == ("invalid_value", "top_p")
