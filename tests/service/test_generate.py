"""Tokens in, tokens out; rendering and the way back; ending requests early."""

import base64
import io
import json
import threading
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from tests.conftest import Serve
from tests.fakes import hooked_load
from tests.serving import Reply, ServerThread, eventually
from tests.streams import events_of

PROMPT = list(b"Say:")
EOS = 258


def generate(server: ServerThread, headers: dict[str, str] | None = None, **fields: Any) -> Reply:
    body = {"token_ids": PROMPT, "sampling_params": {"temperature": 0}, **fields}
    return server.request("POST", "/inference/v1/generate", body, headers)


def choice_of(reply: Reply) -> Any:
    assert reply.status == 200, reply.body
    (choice,) = reply.json["choices"]
    return choice


def test_ids_come_back_and_fill_the_context_if_no_number_is_given(scripted: ServerThread) -> None:
    reply = generate(scripted)
    choice = choice_of(reply)
    assert choice["token_ids"] == [*b"Hello from the scripted model.", EOS]
    assert (choice["finish_reason"], choice["stop_reason"], choice["logprobs"]) == ("stop", None, None)
    assert "text" not in choice
    assert "message" not in choice
    assert reply.json["output_mode"] == "tokens"
    assert reply.json["usage"]["completion_tokens"] == len(choice["token_ids"])
    assert len(choice_of(generate(scripted, sampling_params={"ignore_eos": True}))["token_ids"]) == 4092


def test_fields_may_stand_inside_the_sampling_params_or_beside(scripted: ServerThread) -> None:
    inside = generate(scripted, sampling_params={"temperature": 0, "max_tokens": 3, "return_logits": True})
    beside = generate(scripted, max_tokens=3, return_logits=True)
    assert choice_of(inside) == choice_of(beside)
    assert choice_of(inside)["logits"]["shape"] == [3, 512]


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"token_ids": []}, "invalid_value", "token_ids"),
        ({"token_ids": None}, "invalid_value", "token_ids"),
        ({"token_ids": [1, -1]}, "invalid_value", "token_ids[1]"),
        ({"token_ids": [1, 512]}, "invalid_value", "token_ids[1]"),
        ({"sampling_params": 5}, "invalid_value", "sampling_params"),
        ({"sampling_params": {"temperature": -1}}, "invalid_value", "sampling_params.temperature"),
        ({"sampling_params": {"temprature": 1}}, "unknown_parameter", "sampling_params.temprature"),
        ({"sampling_params": {"logprobs": 21}}, "invalid_value", "sampling_params.logprobs"),
        ({"sampling_params": {"logit_bias": {"-1": 1}}}, "invalid_value", "sampling_params.logit_bias.-1"),
        (
            {"sampling_params": {"stop_token_ids": [1, 600]}},
            "invalid_value",
            "sampling_params.stop_token_ids[1]",
        ),
        (
            {"sampling_params": {"response_format": {"type": "x"}}},
            "invalid_value",
            "sampling_params.response_format.type",
        ),
        ({"sampling_params": {"bad_words": ["x"]}}, "unsupported_parameter", "sampling_params.bad_words"),
        ({"sampling_params": {"token_ids": [1]}}, "invalid_value", "sampling_params.token_ids"),
        ({"sampling_params": {"seed": 1}, "seed": 1}, "invalid_value", "sampling_params.seed"),
        ({"sampling_params.temperature": 1}, "unknown_parameter", "sampling_params.temperature"),
        ({"features": {}}, "unsupported_parameter", "features"),
        ({"kv_transfer_params": {}}, "unsupported_parameter", "kv_transfer_params"),
        ({"output_mode": "words"}, "invalid_value", "output_mode"),
        ({"logprobs": 21}, "invalid_value", "logprobs"),
        ({"logprobs": 1, "logprob_token_ids": [1]}, "invalid_value", "logprob_token_ids"),
        ({"logprob_token_ids": [512]}, "invalid_value", "logprob_token_ids[0]"),
        ({"output_mode": "text", "detokenize": False}, "invalid_value", "detokenize"),
        ({"parse_context": {}}, "invalid_value", "parse_context"),
        ({"output_mode": "derender", "parse_context": {"x": 1}}, "unknown_parameter", "parse_context.x"),
        (
            {"output_mode": "derender", "parse_context": {"reasoning": ["a", "ab"]}},
            "invalid_value",
            "parse_context.reasoning",
        ),
        ({"request_id": "no spaces"}, "invalid_value", "request_id"),
    ],
)
def test_a_wrong_field_is_named(scripted: ServerThread, fields: Any, code: str, param: str) -> None:
    reply = generate(scripted, **fields)
    assert reply.status == 422, reply.body
    assert (reply.error["code"], reply.error["param"]) == (code, param)


def test_the_sampled_token_comes_first_then_the_best_with_their_ranks(scripted: ServerThread) -> None:
    entries = choice_of(generate(scripted, logprobs=2, max_tokens=3))["logprobs"]["content"]
    assert [entry["token_id"] for entry in entries] == list(b"Hel")
    for entry in entries:
        first, *others = entry["top_logprobs"]
        assert {name: entry[name] for name in first} == first
        assert (first["rank"], [each["rank"] for each in others]) == (1, [2])
    # A token that is not among the best comes beside all of them.
    biased = generate(scripted, logprobs=2, max_tokens=1, logit_bias={"0": 100})
    (entry,) = choice_of(biased)["logprobs"]["content"]
    assert [each["token_id"] for each in entry["top_logprobs"]][:2] == [0, ord("H")]
    assert len(entry["top_logprobs"]) == 3
    assert entry["rank"] > 2
    assert (
        choice_of(generate(scripted, logprobs=0, max_tokens=1))["logprobs"]["content"][0]["top_logprobs"]
        == []
    )


def test_named_ids_have_their_logprobs(scripted: ServerThread) -> None:
    reply = generate(
        scripted, logprob_token_ids=[5, 7], max_tokens=1, return_logits=True, logits_encoding="json"
    )
    choice = choice_of(reply)
    row = np.array(choice["logits"]["data"][0])
    wanted = row - np.log(np.exp(row).sum())
    (entry,) = choice["logprobs"]["content"]
    assert [each["token_id"] for each in entry["top_logprobs"]] == [ord("H"), 5, 7]
    assert [each["logprob"] for each in entry["top_logprobs"]] == pytest.approx(
        wanted[[ord("H"), 5, 7]], abs=1e-4
    )


@pytest.mark.parametrize("k", [0, 3, -1])
def test_the_prompt_has_logprobs_too(serve: Serve, k: int) -> None:
    server = serve(max_top_logprobs=-1)
    for is_stream in (False, True):
        reply = generate(server, prompt_logprobs=k, max_tokens=1, stream=is_stream)
        assert reply.status == 200, reply.body
        if is_stream:
            found = [each for chunk in events_of(reply.body) for each in chunk.get("prompt_logprobs", ())]
        else:
            found = reply.json["prompt_logprobs"]
        assert len(found) == len(PROMPT)
        assert found[0] is None
        for token_id, entry in zip(PROMPT[1:], found[1:], strict=True):
            own = entry[str(token_id)]
            assert own["decoded_token"] == chr(token_id)
            assert len(entry) == 512 if k < 0 else k <= len(entry) <= k + 1
            better = sum(each["logprob"] > own["logprob"] for each in entry.values())
            assert own["rank"] > better if k >= 0 else own["rank"] == better + 1


def test_candidates_of_the_prompts_tokens_are_scored(scripted: ServerThread) -> None:
    candidates = [[1, 2, 3], [4, -1], [5]]
    wanted = generate(scripted, return_prompt_logits=True, logits_encoding="json", max_tokens=1).json
    rows = np.array(wanted["prompt_logits"]["data"])
    logprobs = rows - np.log(np.exp(rows).sum(-1, keepdims=True))
    for start in (0, 1, 2):
        params = {
            "prompt_logprob_token_ids": candidates[start:],
            "prompt_logprob_start": start,
            "max_tokens": 1,
        }
        reply = generate(scripted, sampling_params=params)
        assert reply.status == 200, reply.body
        scores = np.load(io.BytesIO(base64.b64decode(reply.json["prompt_token_id_logprobs"])))
        assert (scores.dtype, scores.shape) == (np.float32, (3 - start, max(map(len, candidates[start:]))))
        for row, ids, expected in zip(scores, candidates[start:], logprobs[start:], strict=True):
            for place, token_id in enumerate([*ids, -1, -1, -1][: len(row)]):
                if token_id < 0:
                    assert row[place] == -np.inf
                else:
                    assert row[place] == pytest.approx(expected[token_id], abs=1e-4)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt_logprob_token_ids": [[1]]}, "prompt_logprob_token_ids"),
        ({"prompt_logprob_token_ids": [[1], [2], [512]]}, "prompt_logprob_token_ids[2][0]"),
        ({"prompt_logprob_token_ids": [[1], [2], [-2]]}, "prompt_logprob_token_ids[2][0]"),
        ({"prompt_logprob_token_ids": [[1], [2], [3]], "prompt_logprobs": 1}, "prompt_logprobs"),
        ({"prompt_logprob_token_ids": [[1], [2], [3]], "stream": True}, "stream"),
        ({"prompt_logprob_start": 1}, "prompt_logprob_start"),
        ({"prompt_logprob_token_ids": [], "prompt_logprob_start": 3}, "prompt_logprob_token_ids"),
    ],
)
def test_wrong_candidates_are_named(scripted: ServerThread, fields: Any, param: str) -> None:
    reply = generate(scripted, **fields)
    assert (reply.status, reply.error["param"]) == (422, param)


def test_the_mask_has_what_the_filters_left(scripted: ServerThread) -> None:
    params = {"temperature": 1, "top_k": 4, "seed": 1}
    choice = choice_of(generate(scripted, sampling_params=params, return_sampling_mask=True, max_tokens=5))
    assert [len(mask) for mask in choice["sampling_mask"]] == [4] * 5
    assert all(
        token_id in mask for token_id, mask in zip(choice["token_ids"], choice["sampling_mask"], strict=True)
    )
    greedy = choice_of(generate(scripted, return_sampling_mask=True, max_tokens=2))
    assert greedy["sampling_mask"] == [[ord("H")], [ord("e")]]


def test_text_is_cut_at_a_stop_and_the_ids_are_not(scripted: ServerThread) -> None:
    fields: dict[str, Any] = {"stop": ["from"], "logprobs": 1}
    text = choice_of(generate(scripted, output_mode="text", **fields))
    assert (text["text"], text["stop_reason"]) == ("Hello ", "from")
    assert bytes(text["token_ids"]) == b"Hello from"
    assert [entry["token"] for entry in text["logprobs"]["content"]][:2] == ["H", "e"]
    tokens = choice_of(generate(scripted, **fields))
    assert tokens["token_ids"] == text["token_ids"]


SCRIPT = '<think>\nSo.</think>ok\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
TOOLS = [{"type": "function", "function": {"name": "add"}}, {"type": "function", "function": {"name": "b"}}]
CHATS: list[dict[str, Any]] = [
    {},
    {"tools": TOOLS, "logprobs": True, "top_logprobs": 2, "return_logits": True, "return_token_ids": True},
    {"tools": TOOLS, "include_reasoning": False, "logprobs": True, "return_token_ids": True},
    {"tools": TOOLS, "tool_choice": "required", "max_tokens": 200, "seed": 1, "temperature": 1},
    {
        "tools": TOOLS,
        "tool_choice": {"type": "function", "function": {"name": "b"}},
        "max_completion_tokens": 99,
    },
    {"stop": ["o.<"], "stop_token_ids": [5], "include_stop_str_in_output": True, "token_stats": True},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"const": [1, 2]}}}},
    {"n": 3, "seed": 7, "temperature": 1, "max_tokens": 9, "logprobs": True, "logit_bias": {"65": 3}},
]


def comparable(choice: dict[str, Any]) -> dict[str, Any]:
    for call in choice["message"].get("tool_calls", ()):
        call["id"] = ""
    return choice


@pytest.mark.parametrize("fields", CHATS)
def test_render_and_generate_give_what_the_chat_gives(serve: Serve, fields: dict[str, Any]) -> None:
    server = serve(hooked_load(script=SCRIPT), reasoning_parser="<think>,</think>")
    body = {"messages": [{"role": "user", "content": "x"}], "temperature": 0, **fields}
    direct = server.request("POST", "/v1/chat/completions", body)
    rendered = server.request("POST", "/v1/chat/completions/render", body)
    assert direct.status == rendered.status == 200, rendered.body
    assert rendered.json["output_mode"] == "derender"
    generated = server.request("POST", "/inference/v1/generate", rendered.json)
    assert generated.status == 200, generated.body
    assert generated.json["usage"] == direct.json["usage"]
    for own, wanted in zip(generated.json["choices"], direct.json["choices"], strict=True):
        ids = own["token_ids"]
        if "token_ids" not in wanted:
            del own["token_ids"]
        assert comparable(own) == comparable(wanted)
        if fields.get("include_reasoning", True):
            derendered = server.request(
                "POST",
                "/v1/chat/completions/derender",
                {"token_ids": ids, "parse_context": rendered.json["parse_context"]},
            )
            assert derendered.status == 200, derendered.body
            assert comparable(derendered.json)["message"] == wanted["message"]
            if wanted["finish_reason"] != "length":
                assert derendered.json["finish_reason"] == wanted["finish_reason"]


def test_a_derendered_stream_adds_up(serve: Serve) -> None:
    server = serve(hooked_load(script=SCRIPT), reasoning_parser="<think>,</think>")
    body = {
        "messages": [{"role": "user", "content": "x"}],
        "temperature": 0,
        "tools": TOOLS,
        "logprobs": True,
    }
    rendered = server.request("POST", "/v1/chat/completions/render", body | {"stream": True}).json
    whole = choice_of(server.request("POST", "/inference/v1/generate", rendered | {"stream": False}))
    chunks = events_of(server.request("POST", "/inference/v1/generate", rendered).body)
    parts = [part for chunk in chunks for part in chunk["choices"]]
    assert [token_id for part in parts for token_id in part["token_ids"]] == whole["token_ids"]
    assert "".join(part["delta"].get("content", "") for part in parts) == whole["message"]["content"]
    assert [part["finish_reason"] for part in parts if part["finish_reason"]] == ["tool_calls"]


def test_completions_render_to_one_body_a_prompt(scripted: ServerThread) -> None:
    body = {"prompt": ["ab", "c"], "seed": 3, "temperature": 1, "n": 2, "logprobs": 1, "stop": ["q"]}
    direct = scripted.request("POST", "/v1/completions", body).json
    rendered = scripted.request("POST", "/v1/completions/render", body).json
    assert [each["token_ids"] for each in rendered] == [list(b"ab"), list(b"c")]
    texts = []
    for each in rendered:
        answer = scripted.request("POST", "/inference/v1/generate", each)
        assert answer.status == 200, answer.body
        texts += [choice["text"] for choice in answer.json["choices"]]
    assert texts == [choice["text"] for choice in direct["choices"]]
    reply = scripted.request("POST", "/v1/completions/render", body | {"echo": True})
    assert (reply.status, reply.error["param"]) == (422, "echo")


def test_rows_come_as_arrow_here_too(scripted: ServerThread) -> None:
    accept = {"accept": "application/vnd.apache.arrow.stream"}
    reply = generate(scripted, accept, max_tokens=3)
    with pa.ipc.open_stream(io.BytesIO(reply.body)) as reader:
        *batches, last = reader.iter_batches_with_custom_metadata()
    end = json.loads(last.custom_metadata[b"logitwire.end"])
    assert end["rows"] == [3]
    assert end["choices"][0]["token_ids"] == list(b"Hel")
    assert sum(batch.batch.num_rows for batch in batches) == 3


def test_a_request_that_is_aborted_keeps_what_it_has(serve: Serve) -> None:
    is_running, go_on = threading.Event(), threading.Event()

    def hook(place: int, row: Any) -> None:
        if place == 3:
            is_running.set()
            go_on.wait(10)

    server = serve(hooked_load(hook, script="a🚀bcdefgh"))
    replies: list[Reply] = []
    thread = threading.Thread(
        target=lambda: replies.append(generate(server, request_id="mine-1", output_mode="text"))
    )
    thread.start()
    assert is_running.wait(10)
    twice = generate(server, request_id="mine-1")
    assert (twice.status, twice.error["param"]) == (422, "request_id")
    reply = server.request("POST", "/abort_requests", {"request_ids": ["mine-1", "none"]})
    assert reply.json == {"aborted": ["mine-1"]}
    go_on.set()
    thread.join(10)
    choice = choice_of(replies[0])
    assert choice["finish_reason"] == "abort"
    assert choice["token_ids"] == [*"a🚀".encode()][: len(choice["token_ids"])]
    assert choice["text"].startswith("a")
    assert replies[0].json["request_id"] == "mine-1"
    assert choice_of(generate(server, request_id="mine-1"))["finish_reason"] == "stop"


# Without a tokenizer.


@pytest.fixture(scope="module")
def bare() -> Any:
    from service.settings import Settings

    server = ServerThread(Settings(model_name="scripted", port=0, skip_tokenizer=True, drain_timeout=5.0))
    server.start()
    yield server
    server.stop()


def test_ids_go_in_and_out_without_a_tokenizer(bare: ServerThread, scripted: ServerThread) -> None:
    fields: dict[str, Any] = {"logprobs": 2, "prompt_logprobs": 1, "return_logits": True, "token_stats": True}
    with_text, without = generate(scripted, **fields).json, generate(bare, **fields).json
    assert without["choices"] == with_text["choices"]
    assert all(
        entry["decoded_token"] is None for each in without["prompt_logprobs"][1:] for entry in each.values()
    )
    assert events_of(generate(bare, stream=True).body)[-1]["choices"][0]["finish_reason"] == "stop"
    accept = {"accept": "application/vnd.apache.arrow.stream"}
    with pa.ipc.open_stream(io.BytesIO(generate(bare, accept, max_tokens=1).body)) as reader:
        assert reader.read_all()["token"].to_pylist() == ["token_id:72"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}, "messages"),
        ("/v1/chat/completions/render", {"messages": [{"role": "user", "content": "x"}]}, "messages"),
        ("/v1/chat/completions/derender", {"token_ids": [1]}, "token_ids"),
        ("/v1/completions", {"prompt": [1, 2]}, "prompt"),
        ("/v1/completions/render", {"prompt": [1, 2]}, "prompt"),
        ("/tokenize", {"prompt": "x"}, "prompt"),
        ("/v1/logits", {"sequences": [{"token_ids": [1, 2]}, {"text": "ab"}]}, "sequences[1].text"),
        (
            "/v1/logits",
            {"sequences": [{"messages": [{"role": "user", "content": "x"}]}]},
            "sequences[0].messages",
        ),
        ("/v1/divergence", {"p": {"token_ids": [1]}, "q": {"text": "x"}}, "q.text"),
        ("/v1/divergence", {"p": {"token_ids": [1]}, "q": {"token_ids": [2]}, "stop": "a"}, "stop"),
        (
            "/v1/divergence",
            {"p": {"token_ids": [1]}, "q": {"token_ids": [2]}, "completion": "x"},
            "completion",
        ),
        ("/detokenize", {"tokens": [1]}, "tokens"),
        ("/inference/v1/generate", {"token_ids": [1], "output_mode": "text"}, "output_mode"),
        ("/inference/v1/generate", {"token_ids": [1], "stop": ["x"]}, "stop"),
        (
            "/inference/v1/generate",
            {"token_ids": [1], "response_format": {"type": "json_object"}},
            "response_format",
        ),
    ],
)
def test_what_needs_a_text_is_refused_by_name(bare: ServerThread, path: str, body: Any, param: str) -> None:
    reply = bare.request("POST", path, body)
    assert (reply.status, reply.error["code"]) == (422, "unsupported_parameter")
    assert reply.error["param"] == param
    assert "SKIP_TOKENIZER" in reply.error["message"]


def test_there_is_no_tokenizer_to_describe(bare: ServerThread) -> None:
    assert bare.request("GET", "/tokenizer_info").status == 422
    assert bare.request("GET", "/ready").status == 200
    assert bare.request("GET", "/v1/models").status == 200


# What was found by trying to break it.


def test_the_end_record_of_rows_has_what_the_json_answer_has(scripted: ServerThread) -> None:
    fields: dict[str, Any] = {
        "max_tokens": 4,
        "logprobs": 2,
        "return_sampling_mask": True,
        "prompt_logprobs": 1,
    }
    others: dict[str, Any] = {
        "max_tokens": 3,
        "logprob_token_ids": [5],
        "prompt_logprob_token_ids": [[1], [2, 3], [4]],
    }
    for asked in (fields, others):
        whole = generate(scripted, **asked).json
        body = generate(scripted, {"accept": "application/vnd.apache.arrow.stream"}, **asked).body
        with pa.ipc.open_stream(io.BytesIO(body)) as reader:
            *_, last = reader.iter_batches_with_custom_metadata()
        end = json.loads(last.custom_metadata[b"logitwire.end"])
        for name in ("logprobs", "sampling_mask", "token_ids"):
            assert end["choices"][0].get(name) == whole["choices"][0].get(name)
        for name in ("prompt_logprobs", "prompt_token_id_logprobs"):
            assert end.get(name) == whole.get(name)


def test_masks_and_prompt_entries_count_against_what_an_answer_may_hold(serve: Serve) -> None:
    server = serve(max_answer_bytes=100_000, max_top_logprobs=-1)
    for fields in (
        {"return_sampling_mask": True, "max_tokens": 400},
        {"prompt_logprobs": -1, "max_tokens": 1},
        {"token_ids": [1] * 40, "prompt_logprob_token_ids": [[2] * 300] * 39, "max_tokens": 1},
    ):
        reply = generate(server, **fields)
        assert (reply.status, reply.error["code"]) == (422, "logit_budget_exceeded"), fields


def test_candidates_of_an_aborted_request_are_those_that_came(serve: Serve) -> None:
    has_begun, go_on = threading.Event(), threading.Event()

    def hook(place: int, row: Any) -> None:
        has_begun.set()
        go_on.wait(10)

    server = serve(hooked_load(hook), max_batch_size=1)
    first = threading.Thread(target=lambda: generate(server))
    first.start()
    assert has_begun.wait(10)
    replies: list[Reply] = []
    fields = {"prompt_logprob_token_ids": [[1, 2]] * 3, "request_id": "waits"}
    second = threading.Thread(target=lambda: replies.append(generate(server, **fields)))
    second.start()
    while server.request("POST", "/abort_requests", {"request_ids": ["waits"]}).json["aborted"] != ["waits"]:
        pass
    go_on.set()
    second.join(10)
    first.join(10)
    choice = choice_of(replies[0])
    assert (choice["finish_reason"], choice["token_ids"]) == ("abort", [])
    scores = np.load(io.BytesIO(base64.b64decode(replies[0].json["prompt_token_id_logprobs"])))
    assert scores.shape == (3, 2)


def test_more_ids_to_abort_than_there_can_be_are_refused(scripted: ServerThread) -> None:
    many = [str(each) for each in range(10_000)]
    assert scripted.request("POST", "/abort_requests", {"request_ids": many}).json == {"aborted": []}
    reply = scripted.request("POST", "/abort_requests", {"request_ids": [*many, "x"]})
    assert (reply.status, reply.error["param"]) == (422, "request_ids")


def test_ids_beyond_any_answer_are_not_derendered(scripted: ServerThread) -> None:
    path, limit = "/v1/chat/completions/derender", scripted.engine.info.max_model_len
    assert scripted.request("POST", path, {"token_ids": [72] * limit}).status == 200
    reply = scripted.request("POST", path, {"token_ids": [72] * (limit + 1)})
    assert (reply.status, reply.error["code"]) == (413, "context_length_exceeded")


def test_rows_of_given_tokens_are_whole_or_nothing(serve: Serve) -> None:
    server = serve(outbox_bytes=10_000)
    connection = server.connect()
    body = json.dumps({"sequences": [{"token_ids": [1] * 2000}]})
    accept = {"accept": "application/vnd.apache.arrow.stream", "content-type": "application/json"}
    connection.request("POST", "/v1/logits", body, accept)
    with pa.ipc.open_stream(connection.getresponse()) as reader:
        name = json.loads(reader.schema.metadata[b"logitwire.response"])["id"]
        assert server.request("POST", "/abort_requests", {"request_ids": [name]}).json == {"aborted": []}
        assert reader.read_all().num_rows == 1999
    connection.close()


def test_a_divergence_leaves_nothing_behind(serve: Serve) -> None:
    server = serve()
    for _ in range(3):
        body = {"p": {"token_ids": [1]}, "q": {"token_ids": [2]}, "max_tokens": 1}
        assert server.request("POST", "/v1/divergence", body).status == 200
    # The client has its answer before the handler has cleaned up behind it.
    eventually(lambda: server.engine.num_requests == 0)


@pytest.mark.parametrize("temperature", [1e-308, 1e-300, 0.1, 1.0])
def test_a_divergence_is_a_number_at_any_temperature(scripted: ServerThread, temperature: float) -> None:
    contexts = {"p": {"token_ids": [1, 2]}, "q": {"token_ids": [3]}}
    body = {**contexts, "completion": {"token_ids": [7, 8, 9]}, "temperature": temperature}
    found = scripted.request("POST", "/v1/divergence", body).json
    assert all(0 <= each <= 1 for name in ("jsd", "tvd") for each in found[name])


def test_what_cannot_be_generated_is_not_rendered(scripted: ServerThread) -> None:
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "x" * 5000}]}
    assert scripted.request("POST", "/v1/chat/completions/render", body).status == 413
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 5000}
    assert scripted.request("POST", "/v1/chat/completions/render", body).status == 413
    assert scripted.request("POST", "/v1/completions/render", {"prompt": [1] * 5000}).status == 413
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"not": {"type": "string"}}}}
    body = {"messages": [{"role": "user", "content": "x"}], "response_format": wanted}
    assert scripted.request("POST", "/v1/chat/completions/render", body).status == 422
