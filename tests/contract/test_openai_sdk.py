"""The OpenAI SDK for Python does with this server all that it does with OpenAI."""

import json
from collections.abc import Iterator
from typing import Any

import openai
import pydantic
import pytest
from openai.types.chat import ChatCompletionMessageParam

from tests.conftest import Serve
from tests.contract.noise import ODD_METADATA
from tests.fakes import hooked_load
from tests.replies import GREETING, MODEL, RESULT, TOOLS
from tests.serving import ServerThread

pytestmark = [pytest.mark.usefixtures("only_this_machine"), ODD_METADATA]


class Event(pydantic.BaseModel):
    name: str
    days: list[int]


def said(text: str) -> list[ChatCompletionMessageParam]:
    return [{"role": "user", "content": text}]


@pytest.fixture
def sdk(replying: ServerThread) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{replying.url}/v1", api_key="none") as client:
        yield client


def was_sent_once(error: openai.APIStatusError) -> bool:
    """Tell whether the SDK gave up at its first try."""
    return error.request.headers["x-stainless-retry-count"] == "0"


# Chat.


def test_a_stream_adds_up_to_the_whole_answer(sdk: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": MODEL, "messages": said("Hi."), "temperature": 0, "logprobs": True}
    (whole,) = sdk.chat.completions.create(**asked, top_logprobs=2).choices
    text, entries, finish_reasons = "", [], []
    with sdk.chat.completions.create(
        **asked, top_logprobs=2, stream=True, stream_options={"include_usage": True}
    ) as stream:
        *chunks, last = stream
    assert last.choices == []
    assert last.usage is not None
    assert last.usage.total_tokens == last.usage.prompt_tokens + last.usage.completion_tokens
    for chunk in chunks:
        (part,) = chunk.choices
        text += part.delta.content or ""
        entries += (part.logprobs and part.logprobs.content) or []
        finish_reasons.append(part.finish_reason)
    assert text == whole.message.content == GREETING
    assert whole.logprobs is not None
    assert entries == whole.logprobs.content
    assert b"".join(bytes(each.bytes or []) for each in entries).decode() == GREETING
    assert finish_reasons[-1] == whole.finish_reason == "stop"
    assert not any(finish_reasons[:-1])


def test_the_helper_for_streams_puts_the_answer_together(sdk: openai.OpenAI) -> None:
    with sdk.chat.completions.stream(
        model=MODEL,
        messages=said("Hi."),
        temperature=0,
        logprobs=True,
        stream_options={"include_usage": True},
    ) as stream:
        events = list(stream)
        final = stream.get_final_completion()
    assert final.choices[0].message.content == GREETING
    assert final.choices[0].logprobs is not None
    assert len(final.choices[0].logprobs.content or []) == len(GREETING.encode())
    assert final.usage is not None
    assert final.usage.completion_tokens == len(GREETING.encode()) + 1
    kinds = {event.type for event in events}
    assert {"content.delta", "content.done", "logprobs.content.delta", "logprobs.content.done"} <= kinds


def test_reasoning_stays_out_of_the_content(sdk: openai.OpenAI) -> None:
    (choice,) = sdk.chat.completions.create(model=MODEL, messages=said("Think."), temperature=0).choices
    assert choice.message.content == "It is 4."
    assert choice.message.model_extra == {"reasoning_content": "Two and two."}
    reasoning = content = ""
    for chunk in sdk.chat.completions.create(
        model=MODEL, messages=said("Think."), temperature=0, stream=True
    ):
        delta = chunk.choices[0].delta
        content += delta.content or ""
        reasoning += getattr(delta, "reasoning_content", "")
    assert (reasoning, content) == ("Two and two.", "It is 4.")


def test_several_choices_come_side_by_side(sdk: openai.OpenAI) -> None:
    answer = sdk.chat.completions.create(model=MODEL, messages=said("Hi."), n=2, max_completion_tokens=3)
    assert [(each.index, each.finish_reason) for each in answer.choices] == [(0, "length"), (1, "length")]
    with sdk.chat.completions.stream(model=MODEL, messages=said("Hi."), n=2) as stream:
        final = stream.until_done().get_final_completion()
    assert [each.message.content for each in final.choices] == [GREETING, GREETING]


# Structured output.


def test_an_answer_is_parsed_into_a_model(sdk: openai.OpenAI) -> None:
    answer = sdk.chat.completions.parse(
        model=MODEL, messages=said("An event."), response_format=Event, temperature=0
    )
    message = answer.choices[0].message
    assert message.parsed == Event(name="Fair", days=[5, 6])
    assert message.refusal is None


def test_a_streamed_answer_is_parsed_into_a_model(sdk: openai.OpenAI) -> None:
    with sdk.chat.completions.stream(
        model=MODEL, messages=said("An event."), response_format=Event, temperature=0
    ) as stream:
        final = stream.until_done().get_final_completion()
    assert final.choices[0].message.parsed == Event(name="Fair", days=[5, 6])


def test_an_answer_that_is_cut_is_no_model(sdk: openai.OpenAI) -> None:
    with pytest.raises(openai.LengthFinishReasonError):
        sdk.chat.completions.parse(
            model=MODEL, messages=said("An event."), response_format=Event, max_completion_tokens=4
        )


def test_json_mode_gives_json(sdk: openai.OpenAI) -> None:
    answer = sdk.chat.completions.create(
        model=MODEL, messages=said("An event."), response_format={"type": "json_object"}, temperature=0
    )
    assert json.loads(answer.choices[0].message.content or "") == {"name": "Fair", "days": [5, 6]}


# Tools.

NAMED: Any = {"type": "function", "function": {"name": "get_weather"}}


@pytest.mark.parametrize(
    ("tool_choice", "finish_reason"),
    [("auto", "tool_calls"), ("required", "tool_calls"), (NAMED, "stop"), (openai.NOT_GIVEN, "tool_calls")],
)
def test_calls_come_whole_and_streamed(sdk: openai.OpenAI, tool_choice: Any, finish_reason: str) -> None:
    asked: dict[str, Any] = {
        "model": MODEL,
        "messages": said("One call."),
        "tools": TOOLS,
        "tool_choice": tool_choice,
        "temperature": 0,
    }
    (choice,) = sdk.chat.completions.create(**asked).choices
    assert choice.finish_reason == finish_reason
    assert choice.message.content is None
    assert choice.message.tool_calls is not None
    (call,) = choice.message.tool_calls
    assert call.type == "function"
    assert call.function.name == "get_weather"
    assert json.loads(call.function.arguments) == {"city": "Oslo"}
    with sdk.chat.completions.stream(**asked) as stream:
        done = [event for event in stream if event.type == "tool_calls.function.arguments.done"]
        (final,) = stream.get_final_completion().choices
    assert final.finish_reason == finish_reason
    assert not final.message.content
    assert final.message.tool_calls is not None
    (streamed,) = final.message.tool_calls
    assert (streamed.type, streamed.function.name) == ("function", "get_weather")
    assert streamed.id
    assert [event.arguments for event in done] == [streamed.function.arguments] == [call.function.arguments]


def test_several_calls_keep_apart_in_a_stream(sdk: openai.OpenAI) -> None:
    calls: dict[int, list[str]] = {}
    ids, content = [], ""
    for chunk in sdk.chat.completions.create(
        model=MODEL, messages=said("Two calls."), tools=TOOLS, temperature=0, stream=True
    ):
        delta = chunk.choices[0].delta
        content += delta.content or ""
        for part in delta.tool_calls or ():
            assert part.function is not None
            if part.function.name is not None:
                assert part.index == len(calls)
                calls[part.index] = [part.function.name, ""]
                ids.append(part.id)
            calls[part.index][1] += part.function.arguments or ""
    assert content == "Sure."
    assert list(calls.values()) == [["get_weather", '{"city": "Oslo"}'], ["get_time", '{"zone": "CET"}']]
    assert len(set(ids)) == 2


def test_the_result_of_a_call_goes_back_to_the_model(sdk: openai.OpenAI) -> None:
    messages = said("One call.")
    first = sdk.chat.completions.create(model=MODEL, messages=messages, tools=TOOLS, temperature=0)
    message = first.choices[0].message
    assert message.tool_calls is not None
    # The message goes back as it came, as the SDK's own examples do it.
    messages += [message, {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": RESULT}]  # type: ignore[list-item]
    second = sdk.chat.completions.create(model=MODEL, messages=messages, tools=TOOLS, temperature=0)
    assert second.choices[0].message.content == "It is 18 degrees in Oslo."
    assert second.choices[0].message.tool_calls is None
    assert second.choices[0].finish_reason == "stop"


def test_arguments_are_parsed_into_a_model(sdk: openai.OpenAI) -> None:
    answer = sdk.chat.completions.parse(
        model=MODEL,
        messages=said("A call for an event."),
        tools=[openai.pydantic_function_tool(Event)],
        tool_choice="required",
        temperature=0,
    )
    calls = answer.choices[0].message.tool_calls
    assert calls is not None
    assert calls[0].function.parsed_arguments == Event(name="Fair", days=[5, 6])


# Legacy completions.


def test_a_completion_comes_whole_and_streamed(sdk: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": MODEL, "prompt": "Hi", "max_tokens": 60, "temperature": 0}
    whole = sdk.completions.create(**asked)
    assert whole.choices[0].text == GREETING
    parts = [part for chunk in sdk.completions.create(**asked, stream=True) for part in chunk.choices]
    assert "".join(part.text for part in parts) == GREETING
    assert parts[-1].finish_reason == whole.choices[0].finish_reason == "stop"


def test_an_echoed_prompt_has_its_logprobs(sdk: openai.OpenAI) -> None:
    asked: dict[str, Any] = {
        "model": MODEL,
        "prompt": ["Hi", "Ho ho"],
        "echo": True,
        "logprobs": 2,
        "max_tokens": 3,
        "temperature": 0,
    }
    whole = sdk.completions.create(**asked)
    assert [each.text for each in whole.choices] == ["Hi" + GREETING[:3], "Ho ho" + GREETING[:3]]
    texts, tokens = ["", ""], [[], []]  # type: ignore[var-annotated]
    for chunk in sdk.completions.create(**asked, stream=True):
        for part in chunk.choices:
            texts[part.index] += part.text
            tokens[part.index] += (part.logprobs and part.logprobs.tokens) or []
    for choice in whole.choices:
        logprobs = choice.logprobs
        assert logprobs is not None
        assert logprobs.token_logprobs is not None
        assert logprobs.top_logprobs is not None
        assert logprobs.text_offset == list(range(len(choice.text)))
        assert logprobs.tokens == list(choice.text) == tokens[choice.index]
        assert texts[choice.index] == choice.text
        assert logprobs.token_logprobs[0] is None
        # What the model says is the argmax: the very number of its best alternative.
        for value, top in zip(logprobs.token_logprobs[-3:], logprobs.top_logprobs[-3:], strict=True):
            assert value == max(top.values())


# Models and errors.


def test_models_are_listed_and_found(sdk: openai.OpenAI) -> None:
    (model,) = sdk.models.list()
    assert model == sdk.models.retrieve(MODEL)
    assert model.id == MODEL
    assert model.model_extra is not None
    assert model.model_extra["vocab_size"] == 300


@pytest.mark.parametrize(
    ("fields", "kind", "code", "param"),
    [
        ({"temperature": -1}, openai.UnprocessableEntityError, "invalid_value", "temperature"),
        ({"top_logprobs": 2}, openai.UnprocessableEntityError, "invalid_value", "top_logprobs"),
        ({"extra_body": {"frob": 1}}, openai.UnprocessableEntityError, "unknown_parameter", "frob"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "other"}}},
            openai.UnprocessableEntityError,
            "invalid_value",
            "tool_choice.function.name",
        ),
        ({"model": "other"}, openai.NotFoundError, "model_not_found", "model"),
        ({"max_tokens": 10**6}, openai.APIStatusError, "context_length_exceeded", None),
        (
            {"extra_headers": {"accept": "text/html"}},
            openai.APIStatusError,
            "not_acceptable",
            None,
        ),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_can_never_succeed_is_not_tried_again(
    sdk: openai.OpenAI,
    *,
    fields: Any,
    kind: type[openai.APIStatusError],
    code: str,
    param: str | None,
    stream: bool,
) -> None:
    asked: dict[str, Any] = {"model": MODEL, "messages": said("Hi."), "stream": stream, **fields}
    with pytest.raises(kind) as caught:
        sdk.chat.completions.create(**asked)
    assert 400 <= caught.value.status_code < 500
    assert (caught.value.code, caught.value.param) == (code, param)
    assert caught.value.type == "invalid_request_error"
    assert caught.value.request_id
    assert was_sent_once(caught.value)


def test_a_fault_of_the_model_is_not_tried_again(serve: Serve) -> None:
    def hook(place: int, row: Any) -> None:
        row[0] = float("nan")

    server = serve(hooked_load(hook))
    with (
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client,
        pytest.raises(openai.InternalServerError) as caught,
    ):
        client.chat.completions.create(model="hooked", messages=said("Hi."))
    assert caught.value.code == "non_finite_logits"
    assert was_sent_once(caught.value)


def test_a_stream_that_breaks_raises(serve: Serve) -> None:
    def hook(place: int, row: Any) -> None:
        if place == 3:
            row[0] = float("nan")

    server = serve(hooked_load(hook))
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        stream = client.chat.completions.create(
            model="hooked", messages=said("Hi."), temperature=0, stream=True
        )
        text = ""
        with pytest.raises(openai.APIError) as caught:  # noqa: PT012 - what came before counts too
            for chunk in stream:
                text += chunk.choices[0].delta.content or ""
    assert text == "abc"
    assert caught.value.code == "non_finite_logits"


# Asynchronous.


async def test_the_asynchronous_client_chats_streams_parses_and_calls(replying: ServerThread) -> None:
    async with openai.AsyncOpenAI(base_url=f"{replying.url}/v1", api_key="none") as client:
        answer = await client.chat.completions.create(model=MODEL, messages=said("Hi."), temperature=0)
        assert answer.choices[0].message.content == GREETING
        stream = await client.chat.completions.create(
            model=MODEL, messages=said("Hi."), temperature=0, stream=True
        )
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
        assert text == GREETING
        parsed = await client.chat.completions.parse(
            model=MODEL, messages=said("An event."), response_format=Event, temperature=0
        )
        assert parsed.choices[0].message.parsed == Event(name="Fair", days=[5, 6])
        async with client.chat.completions.stream(
            model=MODEL, messages=said("One call."), tools=TOOLS, temperature=0
        ) as helper:
            final = await helper.get_final_completion()
        assert final.choices[0].message.tool_calls is not None
        completion = await client.completions.create(model=MODEL, prompt="Hi", max_tokens=60, temperature=0)
        assert completion.choices[0].text == GREETING
        with pytest.raises(openai.UnprocessableEntityError):
            await client.chat.completions.create(model=MODEL, messages=said("Hi."), top_p=2)
