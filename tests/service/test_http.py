"""The server as any HTTP client sees it: statuses, envelopes, headers."""

import gzip
import json
import time
from typing import Any

import pytest

from tests.conftest import Serve
from tests.fakes import hooked_load
from tests.serving import ServerThread

ARROW = "application/vnd.apache.arrow.stream"
SCRIPT = "Hello from the scripted model."


def test_a_chat_is_answered_with_200_and_openais_shape(scripted: ServerThread) -> None:
    reply = scripted.chat()
    assert reply.status == 200
    answer = reply.json
    assert list(answer)[:5] == ["id", "object", "created", "model", "choices"]
    assert answer["id"].startswith("chatcmpl-")
    assert answer["object"] == "chat.completion"
    assert isinstance(answer["created"], int)
    (choice,) = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": SCRIPT, "refusal": None}
    assert (choice["finish_reason"], choice["stop_reason"], choice["logprobs"]) == ("stop", None, None)
    usage = answer["usage"]
    assert usage["completion_tokens"] == len(SCRIPT) + 1
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert "logits" not in choice
    assert "token_ids" not in choice


@pytest.mark.parametrize("max_tokens", [0, 1, 5])
def test_max_tokens_counts_exactly(scripted: ServerThread, max_tokens: int) -> None:
    answer = scripted.chat(max_tokens=max_tokens).json
    assert answer["usage"]["completion_tokens"] == max_tokens
    assert answer["choices"][0]["message"]["content"] == SCRIPT[:max_tokens]
    assert answer["choices"][0]["finish_reason"] == "length"


def test_max_completion_tokens_wins(scripted: ServerThread) -> None:
    assert scripted.chat(max_tokens=9, max_completion_tokens=2).json["usage"]["completion_tokens"] == 2


def test_a_stop_string_is_cut_from_the_text_and_named(scripted: ServerThread) -> None:
    answer = scripted.chat(stop=["the ", "zzz"], return_token_ids=True, return_logprobs=True).json
    (choice,) = answer["choices"]
    assert choice["message"]["content"] == "Hello from "
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "the ")
    assert answer["metadata"]["stop_sequence_hit"] == "the "
    assert len(choice["token_ids"]) == len(choice["logprobs"]["content"]) == len("Hello from the ")


def test_every_post_field_without_effect_is_taken(scripted: ServerThread) -> None:
    fields = {
        "user": "u",
        "store": False,
        "metadata": {"a": "b"},
        "service_tier": "auto",
        "safety_identifier": "s",
        "prompt_cache_key": "k",
        "n": 1,
        "frequency_penalty": 0,
        "presence_penalty": 0.0,
        "logit_bias": {},
        "tools": [],
        "tool_choice": "none",
        "parallel_tool_calls": True,
        "response_format": {"type": "text"},
    }
    assert scripted.chat(**fields).status == 200


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("chat_template", "x"),
        ("functions", [{"name": "f"}]),
        ("audio", {"voice": "alloy"}),
        ("web_search_options", {}),
        ("use_beam_search", True),
        ("bad_words", ["x"]),
        ("prompt_logprobs", 1),
    ],
)
def test_what_is_known_but_not_supported_is_never_swallowed(
    scripted: ServerThread, field: str, value: Any
) -> None:
    reply = scripted.chat(**{field: value})
    assert reply.status == 422
    assert (reply.error["code"], reply.error["param"]) == ("unsupported_parameter", field)


TOOL = {"type": "function", "function": {"name": "f"}}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": 0, "do_sample": True}, "do_sample"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"top_logprobs": 2, "logprobs": False, "return_logprobs": True}, "top_logprobs"),
        ({"add_generation_prompt": True, "continue_final_message": True}, "continue_final_message"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages[0].content[0].type",
        ),
        ({"stop_token_ids": [70000]}, "stop_token_ids"),
        ({"logit_bias": {"70000": 1}}, "logit_bias.70000"),
        ({"logit_bias": {"65": 101}}, "logit_bias.65"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
        ({"logit_bias": {"-1": 1}}, "logit_bias.-1"),
        ({"logit_bias": {"abc": 1}}, "logit_bias.abc"),
        ({"logit_bias": {"\u0661": 1}}, "logit_bias.\u0661"),
        ({"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
        ({"top_logprobs": -1, "logprobs": True}, "top_logprobs"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice.function.name"),
        ({"tools": [TOOL, TOOL]}, "tools[1].function.name"),
        ({"tools": [{"type": "function"}]}, "tools[0]"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
    ],
)
def test_combinations_that_contradict_each_other_name_the_field(
    scripted: ServerThread, fields: dict[str, Any], param: str
) -> None:
    reply = scripted.chat(**fields)
    assert reply.status == 422
    assert (reply.error["code"], reply.error["param"]) == ("invalid_value", param)


def test_text_parts_are_joined_by_line_ends(scripted: ServerThread) -> None:
    def prompt(content: Any) -> list[int]:
        reply = scripted.chat(messages=[{"role": "user", "content": content}], return_token_ids=True)
        return reply.json["prompt_token_ids"]

    parts = [{"type": "text", "text": "A"}, {"type": "text", "text": "B"}]
    assert prompt(parts) == prompt("A\nB")
    assert prompt(parts[:1]) == prompt("A")


def test_an_assistants_content_may_be_null_beside_tool_calls(scripted: ServerThread) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "get", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "tool result"},
    ]
    reply = scripted.chat(messages=messages, return_token_ids=True)
    assert reply.status == 200
    assert b"tool result" in bytes(each for each in reply.json["prompt_token_ids"] if each < 256)


def test_a_final_message_is_continued_without_its_end_marker(scripted: ServerThread) -> None:
    messages = [{"role": "user", "content": "Count."}, {"role": "assistant", "content": "1, 2, "}]
    reply = scripted.chat(messages=messages, continue_final_message=True, return_token_ids=True)
    assert bytes(reply.json["prompt_token_ids"][-6:]) == b"1, 2, "


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        (b"", 400, "malformed_json"),
        (b'{"model":', 400, "malformed_json"),
        (b"[" * 5000, 400, "malformed_json"),
        (b"[]", 422, "invalid_value"),
        (b"{}", 422, "invalid_value"),
    ],
)
def test_bodies_that_cannot_be_read_get_the_envelope(
    scripted: ServerThread, body: bytes, status: int, code: str
) -> None:
    reply = scripted.request("POST", "/v1/chat/completions", body)
    assert (reply.status, reply.error["code"]) == (status, code)
    assert scripted.chat().status == 200


def test_a_text_far_beyond_the_context_is_refused_without_tokenising_it(scripted: ServerThread) -> None:
    began = time.perf_counter()
    reply = scripted.chat(messages=[{"role": "user", "content": "a b " * 2_000_000}])
    assert (reply.status, reply.error["code"]) == (413, "context_length_exceeded")
    # Tokenising it takes minutes, so this is no matter of a slow machine.
    assert time.perf_counter() - began < 20


def test_a_body_over_the_limit_is_refused(serve: Serve) -> None:
    server = serve(max_body_bytes=1000)
    reply = server.chat(messages=[{"role": "user", "content": "x" * 2000}])
    assert (reply.status, reply.error["code"]) == (413, "request_too_large")


def test_other_content_types_are_refused(scripted: ServerThread) -> None:
    reply = scripted.chat(headers={"content-type": "text/plain"})
    assert (reply.status, reply.error["code"]) == (415, "unsupported_media_type")


def test_a_compressed_body_is_refused_and_a_plain_one_may_say_so(scripted: ServerThread) -> None:
    body = gzip.compress(json.dumps({"messages": [{"role": "user", "content": "x"}]}).encode())
    reply = scripted.request("POST", "/v1/chat/completions", body, {"content-encoding": "gzip"})
    assert (reply.status, reply.error["code"]) == (415, "unsupported_media_type")
    assert scripted.chat(headers={"content-encoding": "identity"}).status == 200


def test_a_key_that_comes_twice_is_refused_by_name(scripted: ServerThread) -> None:
    body = b'{"messages":[{"role":"user","content":"x"}],"temperature":0,"temperature":1}'
    reply = scripted.request("POST", "/v1/chat/completions", body)
    assert (reply.status, reply.error["code"]) == (400, "malformed_json")
    assert "temperature" in reply.error["message"]


def test_an_unknown_model_is_not_found(scripted: ServerThread) -> None:
    reply = scripted.chat(model="no-such")
    assert (reply.status, reply.error["code"], reply.error["param"]) == (404, "model_not_found", "model")
    assert scripted.chat(model="scripted").status == 200


def test_unknown_paths_and_methods_get_the_envelope(scripted: ServerThread) -> None:
    assert scripted.request("POST", "/v1/nope", {}).error["code"] == "not_found"
    reply = scripted.request("GET", "/v1/chat/completions")
    assert (reply.status, reply.error["code"]) == (405, "method_not_allowed")
    assert "POST" in reply.headers["allow"]


@pytest.mark.parametrize("path", ["/health", "/ready", "/v1/models", "/version"])
def test_head_is_answered_like_get_without_a_body(scripted: ServerThread, path: str) -> None:
    assert scripted.request("GET", path).status == 200
    reply = scripted.request("HEAD", path)
    assert (reply.status, reply.body) == (200, b"")


def test_one_form_that_is_not_served_is_406(scripted: ServerThread) -> None:
    reply = scripted.chat(headers={"accept": "image/png"})
    assert (reply.status, reply.error["code"]) == (406, "not_acceptable")


def test_a_sane_request_id_is_kept_and_another_replaced(scripted: ServerThread) -> None:
    assert (
        scripted.request("GET", "/health", headers={"x-request-id": "mine-1"}).headers["x-request-id"]
        == "mine-1"
    )
    for insane in ("", "a b", "x" * 200, "é"):
        reply = scripted.request("GET", "/nope", headers={"x-request-id": insane})
        assert len(reply.headers["x-request-id"]) == 32


def test_models_are_listed_and_found_by_ids_with_slashes(serve: Serve) -> None:
    server = serve(served_model_name="org/name")
    (card,) = server.request("GET", "/v1/models").json["data"]
    assert card["id"] == "org/name"
    assert (card["vocab_size"], card["tokenizer_vocab_size"], card["max_model_len"]) == (512, 261, 4096)
    for spelling in ("org/name", "org%2Fname"):
        assert server.request("GET", f"/v1/models/{spelling}").json == card
    assert server.request("GET", "/v1/models/none").error["code"] == "model_not_found"


def test_versions_name_what_shapes_logits(scripted: ServerThread) -> None:
    assert {"logitwire", "torch", "transformers", "numpy"} <= set(scripted.request("GET", "/version").json)


def test_the_openapi_document_is_served(scripted: ServerThread) -> None:
    document = scripted.request("GET", "/schema").json
    assert document["openapi"].startswith("3.1")
    assert "/v1/chat/completions" in document["paths"]


# Budgets.


def test_more_rows_than_the_cap_are_refused_with_the_bytes(serve: Serve) -> None:
    server = serve(max_logit_tokens=10)
    reply = server.chat(return_logits=True, max_tokens=11)
    assert (reply.status, reply.error["code"]) == (422, "logit_budget_exceeded")
    assert f"{11 * (512 * 8 // 3):,} bytes" in reply.error["message"]
    assert "MAX_LOGIT_TOKENS" in reply.error["message"]
    # Without rows, or with a limit left to the server, the same request works.
    assert server.chat(max_tokens=11).status == 200
    answer = server.chat(return_logits=True).json
    assert answer["choices"][0]["logits"]["shape"] == [10, 512]
    assert answer["choices"][0]["finish_reason"] == "length"


def test_one_json_answer_holds_a_limited_number_of_bytes_and_arrow_does_not(serve: Serve) -> None:
    server = serve(max_answer_bytes=5 * 512 * 12)
    reply = server.chat(return_logits=True, logits_encoding="json", max_tokens=6)
    assert "MAX_ANSWER_BYTES" in reply.error["message"]
    assert server.chat(return_logits=True, logits_encoding="json", max_tokens=5).status == 200
    assert server.chat(headers={"accept": ARROW}, max_tokens=20).status == 200


def test_selected_columns_have_their_budget_too(serve: Serve) -> None:
    server = serve(max_answer_bytes=12 * 100 * 5, max_queue=4)
    columns = list(range(100))
    reply = server.chat(logit_token_ids=columns, max_tokens=6)
    assert (reply.status, reply.error["code"]) == (422, "logit_budget_exceeded")
    choice = server.chat(logit_token_ids=columns).json["choices"][0]
    assert len(choice["selected_logits"]["values"]) == 5
    assert server.chat(headers={"accept": ARROW}, logit_token_ids=columns, max_tokens=20).status == 200


def test_more_choices_than_the_queue_holds_are_refused(serve: Serve) -> None:
    server = serve(max_queue=4)
    reply = server.chat(n=5)
    assert (reply.status, reply.error["param"]) == (422, "n")
    assert server.chat(n=4).status == 200


def test_a_prompt_beyond_the_context_is_refused_with_three_numbers(serve: Serve) -> None:
    server = serve(hooked_load(max_model_len=50))
    reply = server.chat(max_tokens=40)
    assert (reply.status, reply.error["code"]) == (413, "context_length_exceeded")
    assert all(number in reply.error["message"] for number in ("50", "40"))
    for fields in ({}, {"return_logits": True}):
        reply = server.chat(messages=[{"role": "user", "content": "x" * 100}], **fields)
        assert (reply.status, reply.error["code"]) == (413, "context_length_exceeded")


def test_unknown_fields_are_refused_or_ignored_as_set(serve: Serve, scripted: ServerThread) -> None:
    reply = scripted.chat(return_logit=True)
    assert (reply.status, reply.error["code"]) == (422, "unknown_parameter")
    assert "return_logits" in reply.error["message"]
    assert serve(unknown_fields="ignore").chat(return_logit=True).status == 200


def test_reading_a_request_is_not_confused_by_floats_for_ints(scripted: ServerThread) -> None:
    body = (
        b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": 5.0, "temperature": 1, "seed": 1.0}'
    )
    reply = scripted.request("POST", "/v1/chat/completions", body)
    assert json.loads(reply.body)["usage"]["completion_tokens"] <= 5
