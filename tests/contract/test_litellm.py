"""litellm works on this server as on any that speaks OpenAI's API."""

import inspect
import json
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import openai
import pydantic
import pytest

from tests.contract.noise import ODD_METADATA, loop_of_its_own
from tests.replies import GREETING, MODEL, RESULT, TOOLS
from tests.serving import ServerThread

pytestmark = [
    pytest.mark.usefixtures("only_this_machine"),
    ODD_METADATA,
    # Its own types; pydantic says so when the first stream needs them.
    pytest.mark.filterwarnings(
        "ignore:Item '.*' on TypedDict class 'ChatCompletion.* `ReadOnly`:UserWarning"
    ),
    # It looks at all attributes of a chunk, the deprecated ones too.
    pytest.mark.filterwarnings("ignore:Accessing the 'model_.*' attribute:DeprecationWarning"),
]


class Event(pydantic.BaseModel):
    name: str
    days: list[int]


@pytest.fixture(autouse=True)
def no_loop_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    with nullcontext() if inspect.iscoroutinefunction(request.function) else loop_of_its_own():
        yield


@pytest.fixture
def litellm(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    # Else its import fetches a price list.
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    # Here, since the import takes five seconds.
    import litellm

    # Of its two transports, the one of the SDK, whose connections end with their client.
    monkeypatch.setattr(litellm, "disable_aiohttp_transport", True)
    yield litellm
    for client in litellm.in_memory_llm_clients_cache.cache_dict.values():
        if isinstance(client, openai.OpenAI):
            client.close()
    litellm.in_memory_llm_clients_cache.flush_cache()


@pytest.fixture
def asked(replying: ServerThread) -> dict[str, Any]:
    return {
        "model": f"openai/{MODEL}",
        "api_base": f"{replying.url}/v1",
        "api_key": "none",
        "messages": [{"role": "user", "content": "Hi."}],
        "temperature": 0,
    }


def test_it_chats_with_logprobs(litellm: Any, asked: dict[str, Any]) -> None:
    answer = litellm.completion(**asked, logprobs=True, top_logprobs=2)
    (choice,) = answer.choices
    assert choice.message.content == GREETING
    assert choice.finish_reason == "stop"
    entries = choice.logprobs.content
    assert b"".join(bytes(entry.bytes) for entry in entries).decode() == GREETING
    assert all(entry.logprob == entry.top_logprobs[0].logprob for entry in entries)
    assert answer.usage.completion_tokens == len(GREETING.encode()) + 1


def test_it_streams(litellm: Any, asked: dict[str, Any]) -> None:
    chunks = list(litellm.completion(**asked, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == GREETING
    whole = litellm.stream_chunk_builder(chunks)
    assert whole.choices[0].message.content == GREETING
    assert whole.usage.completion_tokens == len(GREETING.encode()) + 1


async def test_it_works_asynchronously(litellm: Any, asked: dict[str, Any]) -> None:
    answer = await litellm.acompletion(**asked)
    assert answer.choices[0].message.content == GREETING
    stream = await litellm.acompletion(**asked, stream=True)
    assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == GREETING
    await litellm.close_litellm_async_clients()


def test_it_keeps_reasoning_apart(litellm: Any, asked: dict[str, Any]) -> None:
    asked["messages"] = [{"role": "user", "content": "Think."}]
    message = litellm.completion(**asked).choices[0].message
    assert (message.reasoning_content, message.content) == ("Two and two.", "It is 4.")
    deltas = [chunk.choices[0].delta for chunk in litellm.completion(**asked, stream=True)]
    assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == "Two and two."
    assert "".join(delta.content or "" for delta in deltas) == "It is 4."


def test_it_continues_texts(litellm: Any, asked: dict[str, Any]) -> None:
    del asked["messages"]
    asked |= {"model": f"text-completion-openai/{MODEL}", "prompt": "Hi", "max_tokens": 60}
    (choice,) = litellm.text_completion(**asked, logprobs=1).choices
    assert choice.text == GREETING
    assert len(choice.logprobs.tokens) == len(GREETING.encode()) + 1
    stream = litellm.text_completion(**asked, stream=True)
    assert "".join(chunk.choices[0].text or "" for chunk in stream) == GREETING


def test_it_calls_tools_and_goes_on_with_their_results(litellm: Any, asked: dict[str, Any]) -> None:
    messages: list[Any] = [{"role": "user", "content": "One call."}]
    asked |= {"messages": messages, "tools": TOOLS}
    for tool_choice in ("auto", "required", {"type": "function", "function": {"name": "get_weather"}}):
        message = litellm.completion(**asked, tool_choice=tool_choice).choices[0].message
        (call,) = message.tool_calls
        assert call.function.name == "get_weather"
        assert json.loads(call.function.arguments) == {"city": "Oslo"}
    streamed = litellm.stream_chunk_builder(list(litellm.completion(**asked, stream=True)))
    assert streamed.choices[0].finish_reason == "tool_calls"
    assert streamed.choices[0].message.tool_calls[0].function.arguments == call.function.arguments
    messages += [message, {"role": "tool", "tool_call_id": call.id, "content": RESULT}]
    assert litellm.completion(**asked).choices[0].message.content == "It is 18 degrees in Oslo."


def test_it_has_structured_output(litellm: Any, asked: dict[str, Any]) -> None:
    asked["messages"] = [{"role": "user", "content": "An event."}]
    answer = litellm.completion(**asked, response_format=Event)
    assert Event.model_validate_json(answer.choices[0].message.content) == Event(name="Fair", days=[5, 6])


def test_it_knows_what_went_wrong(litellm: Any, asked: dict[str, Any]) -> None:
    asked["model"] = "openai/other"
    with pytest.raises(litellm.NotFoundError):
        litellm.completion(**asked)
    asked |= {"model": f"openai/{MODEL}", "top_p": 2}
    # Its name for any 4xx that has none of its own.
    with pytest.raises(litellm.BadRequestError) as caught:
        litellm.completion(**asked)
    assert "top_p" in str(caught.value)
