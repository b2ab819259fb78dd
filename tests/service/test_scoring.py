"""Given tokens over HTTP: rows as JSON and Arrow, divergences, and what is refused."""

import base64
import json
import math
import weakref
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from engine import scoring as engine_scoring
from engine import worker as worker_module
from engine.fake import byte_tokenizer
from engine.types import TokenEvent
from schemas.arrow import END_KEY, RESPONSE_KEY
from tests.conftest import Serve
from tests.fakes import VOCAB_SIZE, hooked_load
from tests.serving import Reply, ServerThread

ARROW = {"accept": "application/vnd.apache.arrow.stream"}


def logits(server: ServerThread, headers: dict[str, str] | None = None, **fields: Any) -> Reply:
    return server.request("POST", "/v1/logits", fields, headers)


def diverge(server: ServerThread, **fields: Any) -> Reply:
    return server.request("POST", "/v1/divergence", fields)


def table_of(reply: Reply) -> tuple[pa.Table, dict[str, Any]]:
    assert reply.status == 200, reply.body
    reader = pa.ipc.open_stream(reply.body)
    batches, end = [], None
    while True:
        try:
            batch, metadata = reader.read_next_batch_with_custom_metadata()
        except StopIteration:
            break
        if metadata is not None and END_KEY in metadata:
            end = json.loads(metadata[END_KEY])
        batches.append(batch)
    assert end is not None
    return pa.Table.from_batches(batches, reader.schema), end


def rows_of(data: dict[str, Any]) -> np.ndarray:
    block = data["logits"]
    dtype = {"float16": "<f2", "float32": "<f4"}[block["dtype"]]
    rows = [np.frombuffer(base64.b64decode(each), dtype) for each in block["data"]]
    assert block["shape"] == [len(rows), VOCAB_SIZE]
    return np.array(rows).reshape(-1, VOCAB_SIZE)


@pytest.fixture
def server(serve: Serve) -> ServerThread:
    return serve(hooked_load())


def test_the_same_rows_come_as_json_and_as_arrow(server: ServerThread) -> None:
    asked: dict[str, Any] = {
        "sequences": [
            {"text": "hello there"},
            {"token_ids": [9, 8, 7, 6], "prompt_length": 2},
            {"messages": [{"role": "user", "content": "Hi."}], "completion": "Grüße!"},
        ],
        "logits_encoding": "b64_fp32",
        "token_stats": True,
    }
    answer = logits(server, **asked).json
    table, end = table_of(logits(server, ARROW, **asked))
    assert answer["object"] == end["object"] == "logits"
    assert [len(each["token_ids"]) for each in answer["data"]][:2] == [11, 4]
    assert answer["data"][1]["positions"] == [2, 3]
    chat = answer["data"][2]
    assert chat["token_ids"][chat["positions"][0] :] == byte_tokenizer().encode("Grüße!")
    assert end["rows"] == [len(each["positions"]) for each in answer["data"]]
    assert end["usage"]["prompt_tokens"] == sum(len(each["token_ids"]) for each in answer["data"])
    assert [each["token_ids"] for each in end["data"]] == [each["token_ids"] for each in answer["data"]]
    assert answer["metadata"]["wire_dtype"] == "float32"
    response = json.loads(table.schema.metadata[RESPONSE_KEY])
    assert (response["object"], response["metadata"]) == ("logits", answer["metadata"])
    for data in answer["data"]:
        part = table.filter(pa.compute.equal(table["choice"], data["index"]))
        assert part["position"].to_pylist() == data["positions"]
        assert part["token_id"].to_pylist() == [data["token_ids"][each] for each in data["positions"]]
        assert part["logprob"].to_pylist() == data["logprobs"]
        assert set(part["segment"].to_pylist()) == {"content"}
        assert part["finish_reason"].to_pylist()[-1] == "length"
        for name in ("entropy", "logsumexp", "rank", "margin"):
            assert part[name].to_pylist() == pytest.approx(data["token_stats"][name])
        rows = rows_of(data)
        got = np.stack(part["logits"].to_pylist()).astype(np.float32)
        np.testing.assert_array_equal(got, rows)
        wide = rows.astype(np.float64)
        expected = wide - np.log(np.exp(wide).sum(-1, keepdims=True))
        ids = [data["token_ids"][each] for each in data["positions"]]
        assert data["logprobs"] == pytest.approx(expected[range(len(ids)), ids].tolist(), abs=1e-4)


def test_the_whole_range_has_context_rows_in_the_segment_prompt(server: ServerThread) -> None:
    asked: dict[str, Any] = {
        "sequences": [{"token_ids": [1, 2, 3, 4, 5], "prompt_length": 3}],
        "range": "all",
    }
    table, _ = table_of(logits(server, ARROW, **asked))
    assert table["position"].to_pylist() == [1, 2, 3, 4]
    assert table["segment"].to_pylist() == ["prompt", "prompt", "content", "content"]
    assert table["finish_reason"].to_pylist() == [None, None, None, "length"]
    asked["sequences"][0]["prompt_length"] = 5
    table, _ = table_of(logits(server, ARROW, **asked))
    assert table["segment"].to_pylist() == ["prompt"] * 4
    assert table["finish_reason"].to_pylist() == [None, None, None, "length"]


def test_the_next_token_has_a_row_and_no_id(server: ServerThread) -> None:
    asked = {"sequences": [{"text": "ab"}], "next_token": True, "token_stats": True}
    (data,) = logits(server, **asked).json["data"]
    assert data["positions"] == [1, 2]
    assert data["logprobs"][1] == 0
    assert data["token_stats"]["rank"][1] == 0
    # The scripted model says "a" next, to whatever prompt.
    assert rows_of(data)[1].argmax() == ord("a")
    table, end = table_of(logits(server, ARROW, **asked))
    assert table["token_id"].to_pylist() == [ord("b"), -1]
    assert table["token"].to_pylist() == ["b", ""]
    assert end["rows"] == [2]


def test_alternatives_come_best_first_up_to_all(server: ServerThread) -> None:
    (data,) = logits(server, sequences=[{"text": "abc"}], top_logprobs=VOCAB_SIZE, return_logits=False).json[
        "data"
    ]
    assert "logits" not in data
    for best, logprob, token_id in zip(data["top_logprobs"], data["logprobs"], b"bc", strict=True):
        assert len(best) == VOCAB_SIZE
        values = [each["logprob"] for each in best]
        assert values == sorted(values, reverse=True)
        assert next(each["logprob"] for each in best if each["token_id"] == token_id) == logprob
    table, _ = table_of(
        logits(server, ARROW, sequences=[{"text": "abc"}], top_logprobs=3, return_logits=False)
    )
    assert "logits" not in table.column_names
    assert table["top_token_ids"].to_pylist() == [
        [each["token_id"] for each in best[:3]] for best in data["top_logprobs"]
    ]
    assert table["top_logprobs"].to_pylist() == [
        [each["logprob"] for each in best[:3]] for best in data["top_logprobs"]
    ]


def test_columns_come_in_place_of_rows_shared_or_ragged(server: ServerThread) -> None:
    sequences = [{"text": "abc"}, {"text": "xy"}]
    rows = [
        rows_of(each) for each in logits(server, sequences=sequences, logits_encoding="b64_fp32").json["data"]
    ]
    shared = logits(server, sequences=sequences, logit_token_ids=[7, 5.0, 7]).json["data"]
    for data, expected in zip(shared, rows, strict=True):
        assert "logits" not in data
        assert data["selected_logits"]["token_ids"] == [7, 5, 7]
        np.testing.assert_array_equal(data["selected_logits"]["values"], expected[:, [7, 5, 7]])
    ids = [[[1, 2], []], [[3]]]
    ragged = logits(server, sequences=sequences, logit_token_ids=ids).json["data"]
    table, _ = table_of(logits(server, ARROW, sequences=sequences, logit_token_ids=ids))
    for data, expected, lists in zip(ragged, rows, ids, strict=True):
        assert data["selected_logits"]["token_ids"] == lists
        part = table.filter(pa.compute.equal(table["choice"], data["index"]))
        assert part["selected_token_ids"].to_pylist() == lists
        assert part["selected_logits"].to_pylist() == data["selected_logits"]["values"]
        for row, columns, values in zip(expected, lists, data["selected_logits"]["values"], strict=True):
            assert values == row[columns].tolist()


@pytest.mark.parametrize("compression", ["lz4", "zstd"])
def test_compressed_rows_are_the_same(server: ServerThread, compression: str) -> None:
    asked = {"sequences": [{"text": "hello"}]}
    plain, _ = table_of(logits(server, ARROW, **asked))
    small, _ = table_of(logits(server, ARROW, **asked, arrow_compression=compression))
    assert plain.equals(small)


@pytest.mark.parametrize(
    ("fields", "status", "code", "param"),
    [
        ({"sequences": []}, 422, "invalid_value", "sequences"),
        ({"sequences": [{"text": "a"}] * 65}, 422, "invalid_value", "sequences"),
        ({"sequences": [{"text": "a"}, {}]}, 422, "invalid_value", "sequences[1]"),
        ({"sequences": [{"text": "a", "token_ids": [1]}]}, 422, "invalid_value", "sequences[0]"),
        ({"sequences": [{"token_ids": []}]}, 422, "invalid_value", "sequences[0].token_ids"),
        ({"sequences": [{"token_ids": [1, 999]}]}, 422, "invalid_value", "sequences[0].token_ids[1]"),
        ({"sequences": [{"token_ids": [1, "2"]}]}, 422, "invalid_value", "sequences[0].token_ids[1]"),
        ({"sequences": [{"text": "a", "completion": "b"}]}, 422, "invalid_value", "sequences[0].completion"),
        ({"sequences": [{"text": "a", "texts": "b"}]}, 422, "unknown_parameter", "sequences[0].texts"),
        (
            {"sequences": [{"messages": [{"role": "user"}]}]},
            422,
            "invalid_value",
            "sequences[0].messages[0].content",
        ),
        (
            {"sequences": [{"text": "ab", "prompt_length": 3}]},
            422,
            "invalid_value",
            "sequences[0].prompt_length",
        ),
        (
            {"sequences": [{"messages": [{"role": "user", "content": "a"}], "prompt_length": 1}]},
            422,
            "invalid_value",
            "sequences[0].prompt_length",
        ),
        (
            {"sequences": [{"text": "ab"}], "range": "completion"},
            422,
            "invalid_value",
            "sequences[0].prompt_length",
        ),
        ({"sequences": [{"text": "ab"}], "range": "prompt"}, 422, "invalid_value", "range"),
        ({"sequences": [{"text": "ab"}], "top_logprobs": 301}, 422, "invalid_value", "top_logprobs"),
        ({"sequences": [{"text": "ab"}], "return_logit": True}, 422, "unknown_parameter", "return_logit"),
        (
            {"sequences": [{"text": "ab"}], "logit_token_ids": [1, 300]},
            422,
            "invalid_value",
            "logit_token_ids[1]",
        ),
        (
            {"sequences": [{"text": "ab"}], "logit_token_ids": [1] * 301},
            422,
            "invalid_value",
            "logit_token_ids",
        ),
        (
            {"sequences": [{"text": "ab"}], "logit_token_ids": [[[1] * 301]]},
            422,
            "invalid_value",
            "logit_token_ids[0][0]",
        ),
        (
            {"sequences": [{"text": "ab"}], "logit_token_ids": [[[1]], [[2]]]},
            422,
            "invalid_value",
            "logit_token_ids",
        ),
        (
            {"sequences": [{"text": "abc"}], "logit_token_ids": [[[1]]]},
            422,
            "invalid_value",
            "logit_token_ids[0]",
        ),
        (
            {"sequences": [{"text": "ab"}], "logit_token_ids": [[[1, True]]]},
            422,
            "invalid_value",
            "logit_token_ids[0][0][1]",
        ),
        ({"sequences": [{"text": "a" * 5000}]}, 413, "context_length_exceeded", None),
        ({"sequences": [{"text": "ab"}], "model": "other"}, 404, "model_not_found", "model"),
        ({}, 422, "invalid_value", "sequences"),
    ],
)
def test_a_request_that_makes_no_sense_is_refused_by_path(
    server: ServerThread, fields: dict[str, Any], status: int, code: str, param: str | None
) -> None:
    reply = logits(server, **fields)
    assert (reply.status, reply.error["code"], reply.error["param"]) == (status, code, param)


def test_an_arrow_answer_has_no_decimal_rows(server: ServerThread) -> None:
    reply = logits(server, ARROW, sequences=[{"text": "ab"}], logits_encoding="json")
    assert (reply.status, reply.error["param"]) == (422, "logits_encoding")


def test_only_rows_that_are_returned_count_against_the_budget(serve: Serve) -> None:
    server = serve(hooked_load(), max_logit_tokens=4, max_answer_bytes=10_000)
    text = {"text": "a long text"}
    reply = logits(server, sequences=[text])
    assert (reply.status, reply.error["code"], reply.error["param"]) == (
        422,
        "logit_budget_exceeded",
        "sequences",
    )
    assert logits(server, sequences=[text], return_logits=False, token_stats=True).status == 200
    assert logits(server, sequences=[{**text, "prompt_length": 8}]).status == 200
    # A JSON answer has another limit, which a stream has not.
    four = [{"text": "abcde"}]
    assert logits(server, sequences=four, logits_encoding="json").error["code"] == "logit_budget_exceeded"
    assert logits(server, ARROW, sequences=four).status == 200
    many = {"sequences": [{"text": "a long text"}], "return_logits": False, "top_logprobs": -1}
    assert logits(server, **many).error["code"] == "logit_budget_exceeded"
    assert logits(server, ARROW, **many).status == 200


def test_nothing_that_is_wanted_is_no_row(server: ServerThread) -> None:
    (data,) = logits(server, sequences=[{"text": "a"}]).json["data"]
    assert (data["positions"], data["logprobs"], data["logits"]["data"]) == ([], [], [])
    _, end = table_of(logits(server, ARROW, sequences=[{"text": "a"}, {"text": "bc"}]))
    assert end["rows"] == [0, 1]


def test_a_long_sequence_holds_a_few_rows_at_a_time(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    row_bytes = 2 * VOCAB_SIZE
    rows: list[weakref.ref[Any]] = []
    most = 0
    score_events = worker_module.score_events

    def counting(*arguments: Any) -> list[TokenEvent]:
        nonlocal most
        events = score_events(*arguments)
        rows.extend(weakref.ref(event.row) for event in events)
        most = max(most, sum(row() is not None for row in rows))
        return events

    monkeypatch.setattr(worker_module, "score_events", counting)
    server = serve(hooked_load(max_model_len=40_000), outbox_bytes=20 * row_bytes, max_logit_tokens=40_000)
    table, end = table_of(logits(server, ARROW, sequences=[{"token_ids": [5] * 3000}]))
    assert end["rows"] == [2999]
    assert len(table) == 2999
    # What the outbox may hold, a chunk more, and what the writer is sending.
    assert most <= 60


def test_divergence_has_all_numbers_in_both_units(server: ServerThread) -> None:
    asked = {"p": {"text": "One."}, "q": {"text": "Another one."}, "completion": "some words"}
    bits, nats = diverge(server, **asked).json, diverge(server, **asked, log_base="e").json
    assert bits["token_ids"] == list(b"some words")
    assert bits["tokens"] == list("some words")
    assert (bits["object"], bits["log_base"], nats["log_base"]) == ("divergence", 2, "e")
    sequences = [
        {"text": start + "some words", "prompt_length": len(start)} for start in ("One.", "Another one.")
    ]
    p_data, q_data = logits(server, sequences=sequences, logits_encoding="b64_fp32").json["data"]
    for place, (x, y) in enumerate(zip(rows_of(p_data), rows_of(q_data), strict=True)):
        p, q = (np.exp(row.astype(np.float64)) / np.exp(row.astype(np.float64)).sum() for row in (x, y))
        m = (p + q) / 2
        jsd = float((p * np.log(p / m) + q * np.log(q / m)).sum() / 2)
        assert nats["jsd"][place] == pytest.approx(jsd, abs=1e-9)
        assert nats["kl_pq"][place] == pytest.approx(float((p * np.log(p / q)).sum()), abs=1e-9)
        assert nats["kl_qp"][place] == pytest.approx(float((q * np.log(q / p)).sum()), abs=1e-9)
        assert nats["tvd"][place] == pytest.approx(float(np.abs(p - q).sum() / 2), abs=1e-9)
        assert nats["entropy_q"][place] == pytest.approx(float(-(q * np.log(q)).sum()), abs=1e-9)
    assert nats["logprob_p"] == pytest.approx(p_data["logprobs"], abs=1e-5)
    assert nats["logprob_q"] == bits["logprob_q"] == pytest.approx(q_data["logprobs"], abs=1e-5)
    for name in ("jsd", "kl_pq", "kl_qp", "entropy_p", "entropy_q"):
        assert nats[name] == pytest.approx([each * math.log(2) for each in bits[name]])
    for name in ("jsd", "kl_pq", "kl_qp", "tvd"):
        assert bits["mean"][name] == pytest.approx(float(np.mean(bits[name])))
    assert bits["usage"]["prompt_tokens"] == len("One.Another one.")
    assert bits["usage"]["completion_tokens"] == 10


def test_an_absent_completion_is_generated_from_p(server: ServerThread) -> None:
    contexts = {"p": {"messages": [{"role": "user", "content": "Hi."}]}, "q": {"token_ids": [1, 2]}}
    answer = diverge(server, **contexts).json
    assert "".join(answer["tokens"]) == "abcdefgh<|im_end|>"
    assert len(answer["jsd"]) == 9
    assert diverge(server, **contexts, max_tokens=3).json["tokens"] == ["a", "b", "c"]
    drawn = diverge(server, **contexts, seed=3, max_tokens=30, temperature=100, ignore_eos=True).json
    assert drawn["token_ids"] != list(b"abcdefgh")
    assert len(drawn["jsd"]) == 30
    given = diverge(server, **contexts, completion={"token_ids": [97, 98, 99]}).json
    assert given["token_ids"] == [97, 98, 99]


def test_a_long_comparison_holds_a_few_rows_at_a_time(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    largest = 0
    divergences = engine_scoring.divergences

    def watching(rows_p: Any, *rest: Any) -> Any:
        nonlocal largest
        largest = max(largest, len(rows_p))
        return divergences(rows_p, *rest)

    monkeypatch.setattr(engine_scoring, "divergences", watching)
    monkeypatch.setattr(engine_scoring, "MAX_ROW_BYTES", 100 * 4 * VOCAB_SIZE)
    server = serve(hooked_load(max_model_len=20_000))
    completion = {"token_ids": [5, 6, 7, 8] * 2500}
    answer = diverge(server, p={"text": "a"}, q={"text": "bc"}, completion=completion).json
    assert len(answer["jsd"]) == 10_000
    assert largest == 50


@pytest.mark.parametrize(
    ("fields", "status", "code", "param"),
    [
        ({"q": None}, 422, "invalid_value", "q"),
        ({"q": {}}, 422, "invalid_value", "q"),
        ({"p": {"token_ids": [1, 300]}}, 422, "invalid_value", "p.token_ids[1]"),
        ({"p": {"text": "a", "prompt_length": 1}}, 422, "unknown_parameter", "p.prompt_length"),
        ({"completion": ""}, 422, "invalid_value", "completion"),
        ({"completion": {"token_ids": []}}, 422, "invalid_value", "completion.token_ids"),
        ({"completion": {"token_ids": [300]}}, 422, "invalid_value", "completion.token_ids[0]"),
        ({"completion": "a", "max_tokens": 3}, 422, "invalid_value", "max_tokens"),
        ({"max_tokens": 0}, 422, "invalid_value", "max_tokens"),
        ({"max_tokens": 5000}, 413, "context_length_exceeded", None),
        ({"min_tokens": 300}, 422, "invalid_value", "min_tokens"),
        ({"temperature": 0}, 422, "invalid_value", "temperature"),
        ({"log_base": 10}, 422, "invalid_value", "log_base"),
        ({"return_logits": True}, 422, "unknown_parameter", "return_logits"),
    ],
)
def test_a_comparison_that_makes_no_sense_is_refused_by_path(
    server: ServerThread, fields: dict[str, Any], status: int, code: str, param: str | None
) -> None:
    reply = diverge(server, **{"p": {"text": "a"}, "q": {"text": "b"}, **fields})
    assert (reply.status, reply.error["code"], reply.error["param"]) == (status, code, param)


def test_a_divergence_has_no_arrow_form(server: ServerThread) -> None:
    body = {"p": {"text": "a"}, "q": {"text": "b"}}
    assert server.request("POST", "/v1/divergence", body, ARROW).error["code"] == "not_acceptable"
    either = {"accept": f"{ARROW['accept']}, application/json;q=0.1"}
    assert server.request("POST", "/v1/divergence", body, either).status == 200


def test_one_place_in_the_batch_is_too_few_for_a_comparison(serve: Serve) -> None:
    server = serve(hooked_load(), max_batch_size=1)
    reply = diverge(server, p={"text": "a"}, q={"text": "b"}, completion="c")
    assert reply.status == 422
    assert "MAX_BATCH_SIZE" in reply.error["message"]


def test_infinite_divergences_are_null(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    divergences = engine_scoring.divergences

    def halved(rows_p: Any, rows_q: Any, *rest: Any) -> Any:
        rows_q = rows_q.clone()
        rows_q[:, 5] = -math.inf
        return divergences(rows_p, rows_q, *rest)

    monkeypatch.setattr(engine_scoring, "divergences", halved)
    answer = diverge(serve(hooked_load()), p={"text": "a"}, q={"text": "b"}, completion="c").json
    assert answer["kl_pq"] == [None]
    assert answer["mean"]["kl_pq"] is None
    assert 0 < answer["kl_qp"][0] < 10
