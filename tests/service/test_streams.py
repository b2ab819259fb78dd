"""A stream's chunks add up to the whole answer, and each token goes out with what is its own."""

import json
from typing import Any

import pytest

from tests.conftest import Serve
from tests.fakes import hooked_load
from tests.serving import Reply, ServerThread
from tests.streams import chat_of, completion_of, events_of

SCRIPT = "Hi 🚀! One, two.\nEND"


@pytest.fixture(scope="module")
def server() -> Any:
    from service.settings import Settings

    thread = ServerThread(Settings(model_name="scripted", port=0, script=SCRIPT, drain_timeout=5.0))
    thread.start()
    yield thread
    thread.stop()


FIELDS: list[dict[str, Any]] = [
    {},
    {"max_tokens": 5},
    {"max_tokens": 0},
    {"stop": ["two"]},
    {"stop": ["🚀"], "include_stop_str_in_output": True},
    {"stop": ["END and more"]},
    {"stop": "wo.\nENDx"},
    {"logprobs": True, "top_logprobs": 3},
    {"logprobs": True, "top_logprobs": 3, "stop": ["!", "two"], "return_tokens_as_token_ids": True},
    {"n": 3, "logprobs": True, "temperature": 1.0, "seed": 5, "max_tokens": 6},
    {"return_logits": True, "max_tokens": 7, "stop": ["e, twoo"]},
    {"return_logits": True, "logits_encoding": "json", "max_tokens": 3},
    {"return_logits": True, "logits_encoding": "b64_fp32", "n": 2, "max_tokens": 3},
    {"logit_token_ids": [1, 5], "token_stats": True, "max_tokens": 6},
    {"return_token_ids": True, "ignore_eos": True, "max_tokens": 30},
    {"skip_special_tokens": False, "logprobs": True, "return_token_ids": True},
    {"min_tokens": 25, "max_tokens": 30, "logprobs": True},
    {"stop_token_ids": [ord("!")], "logprobs": True, "return_token_ids": True},
]


def without_ids(choice: dict[str, Any]) -> dict[str, Any]:
    """Drop what is random by design, and what stands for an empty list."""
    message = choice.get("message", {})
    for call in message.get("tool_calls", ()):
        call["id"] = ""
    return choice


def streamed(server: ServerThread, **fields: Any) -> Reply:
    reply = server.chat(stream=True, **fields)
    assert reply.status == 200, reply.body
    assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert reply.headers["cache-control"] == "no-cache"
    assert reply.headers["x-accel-buffering"] == "no"
    return reply


def assert_same_chat(server: ServerThread, **fields: Any) -> tuple[dict[str, Any], list[Any]]:
    whole = server.chat(**fields)
    assert whole.status == 200, whole.body
    chunks = events_of(streamed(server, **fields).body)
    choices = chat_of(chunks)
    assert sorted(choices) == [choice["index"] for choice in whole.json["choices"]]
    for choice in map(without_ids, whole.json["choices"]):
        got = without_ids(choices[choice["index"]])
        message = dict(choice.pop("message"))
        assert message.pop("refusal") is None
        if message["content"] is None:
            message["content"] = ""
        if message.get("reasoning_content", ...) is None:
            del message["reasoning_content"]
        assert got.pop("message") == message
        logprobs = choice.pop("logprobs")
        if logprobs is not None:
            logprobs = {name: entries for name, entries in logprobs.items() if entries}
        assert {name: each for name, each in got.pop("logprobs", {}).items() if each} == (logprobs or {})
        # A stream of nothing has no chunk for an empty block.
        for name in ("token_ids", "segments", "logits", "selected_logits", "token_stats"):
            if name not in got and name in choice:
                assert not choice.pop(name)
        assert got == choice
    return whole.json, chunks


@pytest.mark.parametrize("fields", FIELDS)
def test_the_chunks_of_a_chat_add_up_to_the_whole_answer(server: ServerThread, fields: Any) -> None:
    whole, chunks = assert_same_chat(server, **fields)
    for choice in whole["choices"]:
        if choice.get("token_ids") and whole["choices"][0].get("logits"):
            assert choice["logits"]["shape"][0] == len(choice["token_ids"])
    assert (
        chunks[0]["metadata"] | {"stop_sequence_hit": whole["metadata"]["stop_sequence_hit"]}
        == (whole["metadata"])
    )
    assert all("usage" not in chunk for chunk in chunks)
    assert {(chunk["id"], chunk["object"], chunk["model"]) for chunk in chunks} == {
        (chunks[0]["id"], "chat.completion.chunk", "scripted")
    }


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"echo": True},
        {"echo": True, "logprobs": 2},
        {"echo": True, "logprobs": 0, "max_tokens": 0},
        {"echo": True, "logprobs": 1, "n": 2, "prompt": ["One", "日本🚀"]},
        {"prompt": [[72, 105], [1, 2, 3]], "logprobs": 3, "return_token_ids": True},
        {"prompt": "<|im_start|>user", "echo": True, "logprobs": 1},
        {"stop": ["two"], "logprobs": 5, "max_tokens": 30},
        {"return_logits": True, "max_tokens": 2, "return_prompt_logits": True},
        {"return_logits": True, "max_tokens": 2, "return_prompt_logits": True, "prompt": ["ab", "cde"]},
        {"echo": True, "logprobs": 1, "return_prompt_logits": True, "max_tokens": 0},
    ],
)
def test_the_chunks_of_a_completion_add_up_to_the_whole_answer(server: ServerThread, fields: Any) -> None:
    body = {"prompt": "Say:", "temperature": 0, **fields}
    whole = server.request("POST", "/v1/completions", body)
    assert whole.status == 200, whole.body
    stream = server.request("POST", "/v1/completions", body | {"stream": True})
    chunks = events_of(stream.body)
    choices = completion_of(chunks)
    prompt_rows: dict[int, list[Any]] = {}
    for chunk in chunks:
        prompt_rows.setdefault(0, []).extend(chunk.get("prompt_logits", {}).get("data", []))
        for part in chunk["choices"]:
            prompt_rows.setdefault(part["index"], []).extend(part.get("prompt_logits", {}).get("data", []))
    for choice in whole.json["choices"]:
        expected = choice.pop("prompt_logits", whole.json.get("prompt_logits", {})).get("data", [])
        assert prompt_rows.get(choice["index"], []) == expected
        choice.pop("prompt_token_ids", None)
        if choice["logprobs"] is not None and not choice["logprobs"]["tokens"]:
            choice["logprobs"] = None
        if not choice.get("token_ids", True):
            del choice["token_ids"]
            choice.pop("logits", None)
        assert choices[choice["index"]] == choice
        if choice["logprobs"] is not None:
            assert_offsets_fit(choice["text"], choice["logprobs"])


def assert_offsets_fit(text: str, logprobs: dict[str, Any]) -> None:
    offsets = logprobs["text_offset"]
    assert offsets == sorted(offsets)
    assert offsets[0] == 0
    for token, start, end in zip(logprobs["tokens"], offsets, [*offsets[1:], len(text)], strict=True):
        if "\ufffd" not in token and not token.startswith("<|"):
            assert text[start:end] in (token, "")


def test_each_entry_comes_with_its_own_text(server: ServerThread) -> None:
    chunks = events_of(streamed(server, logprobs=True, stop=["two.\nEND and"]).body)
    for chunk in chunks:
        for part in chunk["choices"]:
            if part["logprobs"] is not None:
                own = b"".join(bytes(entry["bytes"]) for entry in part["logprobs"]["content"])
                special = {b"<|im_end|>"}
                assert own in special or own.decode() == part["delta"].get("content", "")
    # The end token's entry goes out alone, not with the text that was held back until then.
    last = chunks[-2]["choices"][0]
    assert [entry["token"] for entry in last["logprobs"]["content"]] == ["<|im_end|>"]
    assert last["delta"] == {}


def test_nothing_of_a_stop_string_is_streamed(server: ServerThread) -> None:
    chunks = events_of(streamed(server, stop=["two"]).body)
    contents = [part["delta"].get("content", "") for chunk in chunks for part in chunk["choices"]]
    assert "".join(contents) == "Hi 🚀! One, "
    assert not any("\ufffd" in content for content in contents)
    assert chunks[-1]["choices"][0]["stop_reason"] == "two"
    assert chunks[-1]["metadata"]["stop_sequence_hit"] == "two"


def test_the_role_comes_first_and_the_finish_once_for_each_choice(server: ServerThread) -> None:
    chunks = events_of(streamed(server, n=3, temperature=1.0, max_tokens=4).body)
    firsts: dict[int, Any] = {}
    finishes: list[int] = []
    for chunk in chunks:
        (part,) = chunk["choices"]
        firsts.setdefault(part["index"], part["delta"])
        if part["finish_reason"] is not None:
            finishes.append(part["index"])
    assert set(firsts) == {0, 1, 2}
    assert all(first == {"role": "assistant", "content": ""} for first in firsts.values())
    assert sorted(finishes) == [0, 1, 2]


@pytest.mark.parametrize("options", [{}, {"include_usage": False}, {"continuous_usage_stats": True}, None])
def test_there_is_no_usage_unless_it_is_asked_for(server: ServerThread, options: Any) -> None:
    chunks = events_of(streamed(server, stream_options=options).body)
    assert all("usage" not in chunk and chunk["choices"] for chunk in chunks)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_the_totals_come_last_if_they_are_asked_for(server: ServerThread, path: str) -> None:
    body = {"messages": [{"role": "user", "content": "x"}]} if "chat" in path else {"prompt": "x"}
    whole = server.request("POST", path, body | {"max_tokens": 4}).json
    options = {"include_usage": True}
    stream = server.request("POST", path, body | {"max_tokens": 4, "stream": True, "stream_options": options})
    *others, last = events_of(stream.body)
    assert last["choices"] == []
    assert last["usage"] == whole["usage"]
    assert all(chunk["usage"] is None for chunk in others)
    options["continuous_usage_stats"] = True
    stream = server.request("POST", path, body | {"max_tokens": 4, "stream": True, "stream_options": options})
    counts = [chunk["usage"]["completion_tokens"] for chunk in events_of(stream.body) if chunk["usage"]]
    assert counts == sorted(counts)
    assert counts[-1] == 4


def test_a_stream_that_fails_says_so_and_has_no_end_mark(serve: Serve) -> None:
    def hook(place: int, row: Any) -> None:
        if place == 3:
            row[0] = float("nan")

    server = serve(hooked_load(hook))
    reply = server.chat(stream=True)
    assert reply.status == 200
    blocks = reply.body.decode().strip().split("\n\n")
    error = json.loads(blocks[-1].removeprefix("data: "))["error"]
    assert error["code"] == "non_finite_logits"
    assert b"[DONE]" not in reply.body
    assert server.request("GET", "/health").status == 200


def test_what_fails_before_the_first_token_has_its_own_status(serve: Serve) -> None:
    def hook(place: int, row: Any) -> None:
        row[0] = float("nan")

    reply = serve(hooked_load(hook)).chat(stream=True)
    assert reply.status == 500
    assert reply.error["code"] == "non_finite_logits"


@pytest.mark.parametrize(
    ("fields", "status"),
    [({"n": 0}, 422), ({"messages": []}, 422), ({"max_tokens": 10**6}, 413), ({"model": "none"}, 404)],
)
def test_bad_requests_for_streams_are_plain_errors(server: ServerThread, fields: Any, status: int) -> None:
    reply = server.chat(stream=True, **fields)
    assert reply.status == status
    assert reply.error["message"]


def test_a_silent_stream_gets_comments(serve: Serve) -> None:
    import threading

    go_on = threading.Event()

    def hook(place: int, row: Any) -> None:
        if place == 0:
            go_on.wait(10)

    server = serve(hooked_load(hook), keep_alive=0.02)
    connection = server.connect()
    body = {"messages": [{"role": "user", "content": "x"}], "stream": True, "temperature": 0}
    connection.request("POST", "/v1/chat/completions", json.dumps(body), {"content-type": "application/json"})
    response = connection.getresponse()
    lines = [response.readline(), response.readline(), response.readline()]
    assert any(json.loads(line[6:])["choices"] for line in lines if line.startswith(b"data: "))
    assert b": keep-alive\n" in [*lines, response.readline()]
    go_on.set()
    rest = response.read()
    assert rest.endswith(b"data: [DONE]\n\n")
    connection.close()


# Reasoning and tools.

THINKING = "<think>\nLet me see.</think>\n\nIt is 4."
CALLING = (
    '<think>call</think>ok\n<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "}"}}\n</tool_call>\n'
    '<tool_call>{"name": "neg", "arguments": {}}</tool_call>'
)
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}
    for name in ("add", "neg")
]
PARSERS = {"reasoning_parser": "<think>,</think>"}


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"logprobs": True, "top_logprobs": 1, "return_token_ids": True},
        {"logprobs": True, "return_logits": True, "token_stats": True},
        {"include_reasoning": False, "logprobs": True, "return_logits": True},
        {"max_tokens": 9, "logprobs": True, "return_token_ids": True},
        {"stop": ["me see.</thin"], "logprobs": True},
        {"n": 2, "logprobs": True},
    ],
)
@pytest.mark.parametrize("script", [THINKING, CALLING])
def test_a_split_stream_adds_up_to_the_whole_answer(serve: Serve, script: str, fields: Any) -> None:
    server = serve(hooked_load(script=script), **PARSERS)
    whole, chunks = assert_same_chat(server, tools=TOOLS, **fields)
    for chunk in chunks:
        for part in chunk["choices"]:
            # What goes out together is of one segment.
            assert len(set(part.get("segments", []))) <= 1
            filled = [name for name, each in (part["logprobs"] or {}).items() if each]
            assert len(filled) <= 1
            if filled and "segments" in part:
                assert filled == list(set(part["segments"]))
    choice = whole["choices"][0]
    if choice["logprobs"] is not None and "token_ids" in choice:
        entries = sum(len(each or ()) for each in choice["logprobs"].values())
        assert entries == len(choice["token_ids"]) == len(choice["segments"])


def test_reasoning_has_its_own_text_and_entries(serve: Serve) -> None:
    choice = serve(hooked_load(script=THINKING), **PARSERS).chat(logprobs=True).json["choices"][0]
    assert choice["message"]["reasoning_content"] == "\nLet me see."
    assert choice["message"]["content"] == "\n\nIt is 4."
    said = {
        name: b"".join(bytes(entry["bytes"]) for entry in entries).decode()
        for name, entries in choice["logprobs"].items()
        if entries
    }
    assert said == {
        "content": "\n\nIt is 4.",
        "reasoning": "\nLet me see.",
        "special": "<think></think><|im_end|>",
    }


def test_hidden_reasoning_hides_text_entries_ids_and_rows_but_counts(serve: Serve) -> None:
    server = serve(hooked_load(script=THINKING), **PARSERS)
    reply = server.chat(logprobs=True, return_logits=True, include_reasoning=False).json
    choice = reply["choices"][0]
    visible = [*b"\n\nIt is 4.", 258]
    assert choice["message"]["reasoning_content"] is None
    assert choice["token_ids"] == visible
    assert choice["logits"]["shape"][0] == len(visible)
    assert choice["logprobs"]["reasoning"] == []
    assert [entry["token"] for entry in choice["logprobs"]["special"]] == ["<|im_end|>"]
    assert reply["usage"]["completion_tokens"] == len(visible) + len("\nLet me see.") + 2
    assert reply["usage"]["completion_tokens_details"] == {"reasoning_tokens": len("\nLet me see.")}


def test_calls_are_taken_out_of_the_text(serve: Serve) -> None:
    choice = serve(hooked_load(script=CALLING), **PARSERS).chat(tools=TOOLS).json["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "ok\n"
    calls = choice["message"]["tool_calls"]
    assert [call["function"] for call in calls] == [
        {"name": "add", "arguments": '{"a": 1, "b": "}"}'},
        {"name": "neg", "arguments": "{}"},
    ]
    assert len({call["id"] for call in calls}) == 2


def test_without_tools_nothing_is_taken_for_a_call(serve: Serve) -> None:
    server = serve(hooked_load(script=CALLING), **PARSERS)
    for fields in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        message = server.chat(**fields).json["choices"][0]["message"]
        assert "<tool_call>" in message["content"]
        assert "tool_calls" not in message


def test_one_call_at_a_time_if_that_is_wanted(serve: Serve) -> None:
    server = serve(hooked_load(script=CALLING), **PARSERS)
    whole, _ = assert_same_chat(server, tools=TOOLS, parallel_tool_calls=False)
    (call,) = whole["choices"][0]["message"]["tool_calls"]
    assert call["function"]["name"] == "add"


def test_an_arrow_stream_names_each_rows_segment(serve: Serve) -> None:
    import io

    import pyarrow as pa

    server = serve(hooked_load(script=CALLING), **PARSERS)
    accept = {"accept": "application/vnd.apache.arrow.stream"}
    whole = server.chat(tools=TOOLS, logprobs=True, return_token_ids=True).json["choices"][0]
    with pa.ipc.open_stream(io.BytesIO(server.chat(accept, tools=TOOLS).body)) as reader:
        table = reader.read_all()
    assert table["segment"].to_pylist() == whole["segments"]
    assert table["token_id"].to_pylist() == whole["token_ids"]
    assert table["finish_reason"].to_pylist() == [*[None] * (len(table) - 1), "tool_calls"]
    hidden = server.chat(accept, tools=TOOLS, include_reasoning=False).body
    with pa.ipc.open_stream(io.BytesIO(hidden)) as reader:
        assert "reasoning" not in reader.read_all()["segment"].to_pylist()


def arrow_table(body: bytes) -> Any:
    import io

    import pyarrow as pa

    with pa.ipc.open_stream(io.BytesIO(body)) as reader:
        return reader.read_all()


@pytest.mark.parametrize("max_tokens", range(5, 11))
def test_the_last_visible_row_has_the_reason_though_hidden_ones_follow(serve: Serve, max_tokens: int) -> None:
    server = serve(hooked_load(script="ok <think>rrrr</think>."), **PARSERS)
    accept = {"accept": "application/vnd.apache.arrow.stream"}
    table = arrow_table(server.chat(accept, include_reasoning=False, max_tokens=max_tokens).body)
    assert table["finish_reason"].to_pylist() == [*[None] * (len(table) - 1), "length"]


def test_the_last_row_of_a_prompt_alone_has_the_reason(server: ServerThread) -> None:
    accept = {"accept": "application/vnd.apache.arrow.stream"}
    table = arrow_table(server.chat(accept, return_prompt_logits=True, max_tokens=0).body)
    assert len(table) > 1
    assert table["finish_reason"].to_pylist() == [*[None] * (len(table) - 1), "length"]


def test_a_stream_of_hidden_tokens_is_kept_alive(serve: Serve) -> None:
    server = serve(hooked_load(script="<think>" + "r" * 2000 + "</think>."), keep_alive=0.01, **PARSERS)
    body = streamed(server, include_reasoning=False).body
    assert b": keep-alive\n\n" in body
    (choice,) = chat_of(events_of(body)).values()
    assert choice["message"]["content"] == "."


def test_many_entries_come_whole_in_pieces_too(serve: Serve) -> None:
    server = serve(hooked_load(script="x" * 400))
    fields: dict[str, Any] = {"logprobs": True, "top_logprobs": 20, "max_tokens": 300, "n": 2}
    whole, _ = assert_same_chat(server, **fields)
    assert [len(choice["logprobs"]["content"]) for choice in whole["choices"]] == [300, 300]
    body = {"prompt": "x" * 300, "echo": True, "logprobs": 5, "max_tokens": 5, "temperature": 0}
    whole = server.request("POST", "/v1/completions", body).json
    (choice,) = completion_of(
        events_of(server.request("POST", "/v1/completions", body | {"stream": True}).body)
    ).values()
    assert choice == whole["choices"][0]


def test_entries_count_against_what_an_answer_may_hold(serve: Serve) -> None:
    server = serve(max_answer_bytes=20_000)
    reply = server.chat(logprobs=True, top_logprobs=20, max_completion_tokens=100)
    assert (reply.status, reply.error["code"]) == (422, "logit_budget_exceeded")
    assert reply.error["param"] == "max_completion_tokens"
    assert server.chat(logprobs=True, top_logprobs=20, max_tokens=5).status == 200
    assert server.chat(logprobs=True, top_logprobs=20, max_tokens=100, stream=True).status == 200


def test_a_deadline_leaves_no_stack_trace(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    import threading

    go_on = threading.Event()
    server = serve(hooked_load(lambda place, row: go_on.wait(0.5) if place == 1 else None), deadline=0.1)
    reply = server.chat()
    go_on.set()
    assert (reply.status, reply.error["code"]) == (504, "deadline_exceeded")
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def test_counts_on_the_way_are_of_what_was_sent(serve: Serve) -> None:
    server = serve(hooked_load(script="x" * 100))
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = events_of(
        streamed(server, stream_options=options, return_token_ids=True, ignore_eos=True, max_tokens=90).body
    )
    num_sent = 0
    for chunk in chunks:
        num_sent += sum(len(part.get("token_ids", ())) for part in chunk["choices"])
        assert chunk["usage"]["completion_tokens"] >= num_sent
        assert chunk["usage"]["completion_tokens"] - num_sent < 32
