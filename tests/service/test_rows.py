"""Rows over JSON and Arrow: the numbers, their order, and what a failure looks like."""

import base64
import http.client
import json
import math
import threading
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute
import pytest
import torch

from schemas.arrow import END_KEY, ERROR_KEY, RESPONSE_KEY
from tests.conftest import Serve
from tests.fakes import VOCAB_SIZE, hooked_load
from tests.serving import Reply, ServerThread

ARROW = "application/vnd.apache.arrow.stream"


class Recorder:
    """Keeps the raw rows that the model gave out, by place."""

    def __init__(self) -> None:
        self.rows: dict[int, np.ndarray] = {}

    def __call__(self, place: int, row: torch.Tensor) -> None:
        row[17] = -math.inf
        self.rows[place] = row.numpy().copy()

    def all(self) -> np.ndarray:
        return np.stack([self.rows[place] for place in sorted(self.rows)])


def rows_of(reply: Reply) -> np.ndarray:
    block = reply.json["choices"][0]["logits"]
    if block["encoding"] == "json":
        values = [[-math.inf if each is None else each for each in row] for row in block["data"]]
        rows = np.array(values, np.float32)
    else:
        assert block["dtype"] == {"b64_fp16": "float16", "b64_fp32": "float32"}[block["encoding"]]
        dtype = {"float16": "<f2", "float32": "<f4"}[block["dtype"]]
        rows = np.stack([np.frombuffer(base64.b64decode(each), dtype) for each in block["data"]])
    assert list(rows.shape) == block["shape"]
    return rows


@pytest.mark.parametrize(
    ("encoding", "dtype", "wire"),
    [
        ("b64_fp16", np.float16, "float16"),
        ("b64_fp32", np.float32, "float32"),
        ("json", np.float32, "float32"),
    ],
)
def test_json_rows_are_the_models_own(serve: Serve, encoding: str, dtype: Any, wire: str) -> None:
    recorder = Recorder()
    server = serve(hooked_load(recorder))
    reply = server.chat(
        return_logits=True, logits_encoding=encoding, temperature=0.9, top_k=3, seed=1, repetition_penalty=1.3
    )
    rows = rows_of(reply)
    np.testing.assert_array_equal(rows, recorder.all()[: len(rows)].astype(dtype))
    metadata = reply.json["metadata"]
    assert (metadata["source_dtype"], metadata["wire_dtype"], metadata["semantics"]) == (
        "float32",
        wire,
        "raw",
    )
    assert (metadata["vocab_size"], metadata["tokenizer_vocab_size"]) == (VOCAB_SIZE, 261)
    choice = reply.json["choices"][0]
    assert len(choice["token_ids"]) == len(rows) == reply.json["usage"]["completion_tokens"]


def test_entries_agree_with_the_rows(serve: Serve) -> None:
    server = serve(hooked_load())
    answer = server.chat(
        return_logits=True, logits_encoding="b64_fp32", logprobs=True, top_logprobs=3, temperature=5, seed=4
    )
    rows = rows_of(answer).astype(np.float64)
    logprobs = rows - np.log(np.exp(rows).sum(-1, keepdims=True))
    choice = answer.json["choices"][0]
    entries = choice["logprobs"]["content"]
    assert len(entries) == len(rows)
    for token_id, entry, row in zip(choice["token_ids"], entries, logprobs, strict=True):
        assert entry["logprob"] == pytest.approx(row[token_id], abs=1e-5)
        best = np.argsort(-row)[:3]
        assert [each["logprob"] for each in entry["top_logprobs"]] == pytest.approx(list(row[best]), abs=1e-5)
        if token_id == best[0]:
            assert entry["logprob"] == entry["top_logprobs"][0]["logprob"]


def test_a_probability_of_zero_is_a_finite_number_in_json(serve: Serve) -> None:
    def hook(place: int, row: torch.Tensor) -> None:
        row[:] = -math.inf
        row[97] = 1.0

    choice = serve(hooked_load(hook)).chat(max_tokens=1, logprobs=True, top_logprobs=2).json["choices"][0]
    (entry,) = choice["logprobs"]["content"]
    assert entry["logprob"] == 0
    assert [each["logprob"] for each in entry["top_logprobs"]] == [0, -9999.0]


def read_arrow(reply: Reply) -> tuple[pa.Table, dict[str, Any]]:
    reader = pa.ipc.open_stream(reply.body)
    batches, end = [], None
    while end is None:
        batch, custom = reader.read_next_batch_with_custom_metadata()
        batches.append(batch)
        if custom is not None and END_KEY in custom:
            end = json.loads(custom[END_KEY])
    with pytest.raises(StopIteration):
        reader.read_next_batch()
    return pa.Table.from_batches(batches), end


def test_an_arrow_answer_is_the_json_answer_and_its_rows(serve: Serve) -> None:
    recorder = Recorder()
    server = serve(hooked_load(recorder))
    fields = {"temperature": 2.0, "seed": 5, "stop": "zzz", "logprobs": True, "top_logprobs": 1}
    as_json = server.chat(return_logits=True, **fields)
    reply = server.chat(headers={"accept": ARROW}, **fields)
    assert reply.status == 200
    assert reply.headers["content-type"] == ARROW
    assert reply.headers["vary"].lower() == "accept"
    assert reply.headers["x-accel-buffering"] == "no"
    assert reply.headers["cache-control"] == "no-cache"
    assert "content-length" not in reply.headers
    table, end = read_arrow(reply)
    logits = table["logits"].combine_chunks().flatten().to_numpy(zero_copy_only=True).reshape(-1, VOCAB_SIZE)
    np.testing.assert_array_equal(logits, recorder.all()[: len(logits)].astype(np.float16))
    answer = as_json.json
    choice = answer["choices"][0]
    assert table["token_id"].to_pylist() == choice["token_ids"]
    entries = choice["logprobs"]["content"]
    assert table["logprob"].to_pylist() == [each["logprob"] for each in entries]
    assert [list(each) for each in table["token_bytes"].to_pylist()] == [each["bytes"] for each in entries]
    assert table["token"].to_pylist() == [each["token"] for each in entries]
    assert table["position"].to_pylist() == list(range(len(entries)))
    assert set(table["choice"].to_pylist()) == {0}
    num = len(entries)
    assert table["finish_reason"].to_pylist() == [None] * (num - 1) + [choice["finish_reason"]]
    special = {token_id for token_id in range(256, 261)}
    expected = ["special" if each in special else "content" for each in choice["token_ids"]]
    assert table["segment"].to_pylist() == expected
    assert end["rows"] == [num]
    without_rows = {**choice}
    del without_rows["logits"]
    assert end["choices"] == [without_rows]
    assert end["usage"] == answer["usage"]
    assert end["metadata"] == answer["metadata"]
    response = json.loads(table.schema.metadata[RESPONSE_KEY])
    assert response["id"] == end["id"]
    assert response["metadata"] == {**end["metadata"], "stop_sequence_hit": None}


@pytest.mark.parametrize(("encoding", "value_type"), [("b64_fp16", pa.float16()), ("b64_fp32", pa.float32())])
@pytest.mark.parametrize("compression", [None, "lz4", "zstd"])
def test_arrow_rows_come_in_either_width_and_compressed_on_demand(
    scripted: ServerThread, encoding: str, value_type: pa.DataType, compression: str | None
) -> None:
    reply = scripted.chat(headers={"accept": ARROW}, logits_encoding=encoding, arrow_compression=compression)
    table, _ = read_arrow(reply)
    assert table.schema.names[-1] == "logits"
    assert table.schema.field("logits").type == pa.list_(value_type, 512)
    assert table["logits"].null_count == 0


def test_arrow_without_rows_has_no_logits_column(scripted: ServerThread) -> None:
    table, end = read_arrow(scripted.chat(headers={"accept": ARROW}, return_logits=False, stream=True))
    assert "logits" not in table.schema.names
    assert end["rows"] == [len(table)]


def test_arrow_refuses_rows_as_json_numbers(scripted: ServerThread) -> None:
    reply = scripted.chat(headers={"accept": ARROW}, logits_encoding="json")
    assert (reply.status, reply.error["param"]) == (422, "logits_encoding")


def test_no_tokens_are_an_empty_table_with_its_end(scripted: ServerThread) -> None:
    table, end = read_arrow(scripted.chat(headers={"accept": ARROW}, max_tokens=0))
    assert len(table) == 0
    assert end["rows"] == [0]
    assert scripted.chat(max_tokens=0, return_logits=True).json["choices"][0]["logits"]["shape"] == [0, 512]


class NeverBlocking:
    """pyarrow also reads 0 bytes, for which http.client would wait for the next chunk."""

    closed = False

    def __init__(self, response: http.client.HTTPResponse) -> None:
        self._response = response

    def read(self, num: int = -1) -> bytes:
        return self._response.read(num) if num else b""


def test_the_first_batch_leaves_long_before_the_last_token(serve: Serve) -> None:
    opened = threading.Event()

    def hook(place: int, row: torch.Tensor) -> None:
        if place == 2:
            assert opened.wait(20)

    server = serve(hooked_load(hook))
    connection = server.connect()
    body = json.dumps({"messages": [{"role": "user", "content": "x"}], "temperature": 0})
    connection.request("POST", "/v1/chat/completions", body, {"accept": ARROW})
    response = connection.getresponse()
    reader = pa.ipc.open_stream(NeverBlocking(response))
    # The model is still held at its third token while these two arrive.
    early = ""
    while early != "ab":
        early += "".join(reader.read_next_batch()["token"].to_pylist())
        assert "ab".startswith(early)
    assert not opened.is_set()
    # Neither do health checks wait for the model.
    assert server.request("GET", "/health").status == 200
    opened.set()
    assert sum(batch.num_rows for batch in reader) == 7
    connection.close()


# Choices.


def test_choices_have_streams_of_their_own_from_one_seed(serve: Serve) -> None:
    server = serve(hooked_load())
    fields = {"n": 3, "temperature": 50.0, "seed": 11, "max_tokens": 12, "ignore_eos": True}
    answers = [server.chat(return_logits=True, logprobs=True, **fields).json for _ in range(2)]
    ids = [[choice["token_ids"] for choice in answer["choices"]] for answer in answers]
    assert ids[0] == ids[1]
    assert len({tuple(each) for each in ids[0]}) == 3
    assert [choice["index"] for choice in answers[0]["choices"]] == [0, 1, 2]
    assert answers[0]["usage"]["completion_tokens"] == 36
    # The first choice is what the seed gives without n.
    assert (
        server.chat(return_token_ids=True, **(fields | {"n": 1})).json["choices"][0]["token_ids"] == ids[0][0]
    )
    for choice in answers[0]["choices"]:
        rows = np.stack([np.frombuffer(base64.b64decode(each), "<f2") for each in choice["logits"]["data"]])
        assert rows.shape == (12, VOCAB_SIZE)
        exact = rows.astype(float) - np.log(np.exp(rows.astype(float)).sum(-1, keepdims=True))
        said = [each["logprob"] for each in choice["logprobs"]["content"]]
        np.testing.assert_allclose(said, exact[range(12), choice["token_ids"]], atol=0.02)


def test_an_arrow_stream_holds_all_choices_and_says_which_row_is_whose(serve: Serve) -> None:
    server = serve(hooked_load())
    fields = {"n": 3, "temperature": 50.0, "seed": 11, "max_tokens": 12, "stop_token_ids": list(range(40))}
    table, end = read_arrow(server.chat(headers={"accept": ARROW}, **fields))
    answer = server.chat(return_logits=True, **fields).json
    lengths = [len(choice["token_ids"]) for choice in answer["choices"]]
    assert end["rows"] == lengths
    for index, choice in enumerate(answer["choices"]):
        own = table.filter(pa.compute.equal(table["choice"], index))
        assert own["token_id"].to_pylist() == choice["token_ids"]
        assert own["position"].to_pylist() == list(range(lengths[index]))
        assert own["finish_reason"].to_pylist() == [None] * (lengths[index] - 1) + [choice["finish_reason"]]


def test_more_choices_than_the_row_budget_holds_do_not_wait_for_each_other_for_ever(serve: Serve) -> None:
    server = serve(hooked_load(), row_budget_bytes=5 * VOCAB_SIZE, max_batch_size=2)
    answer = server.chat(n=8, return_logits=True, max_tokens=4).json
    assert [choice["logits"]["shape"] for choice in answer["choices"]] == [[4, VOCAB_SIZE]] * 8
    _, end = read_arrow(server.chat(headers={"accept": ARROW}, n=8, max_tokens=4))
    assert end["rows"] == [4] * 8


# Statistics and columns.


def test_statistics_and_columns_agree_with_the_rows(serve: Serve) -> None:
    server = serve(hooked_load())
    sampling = {"temperature": 30.0, "seed": 3, "max_tokens": 8, "ignore_eos": True}
    rows = rows_of(server.chat(return_logits=True, logits_encoding="b64_fp32", **sampling))
    wanted = [299, 0, 97, 97]
    extras = {"token_stats": True, "logit_token_ids": wanted, "return_token_ids": True}
    choice = server.chat(**extras, **sampling).json["choices"][0]
    assert "logits" not in choice
    assert choice["selected_logits"]["token_ids"] == wanted
    assert choice["selected_logits"]["values"] == rows[:, wanted].tolist()
    exact = rows.astype(np.float64)
    logsumexp = np.log(np.exp(exact).sum(-1))
    probs = np.exp(exact - logsumexp[:, None])
    chosen = exact[range(len(exact)), choice["token_ids"]]
    ordered = np.sort(exact, -1)
    stats = choice["token_stats"]
    np.testing.assert_allclose(stats["logsumexp"], logsumexp, rtol=1e-5)
    np.testing.assert_allclose(stats["entropy"], -(probs * np.log(probs)).sum(-1), rtol=1e-3, atol=1e-6)
    assert stats["rank"] == ((exact > chosen[:, None]).sum(-1) + 1).tolist()
    np.testing.assert_allclose(stats["margin"], ordered[:, -1] - ordered[:, -2], rtol=1e-5)
    table, end = read_arrow(server.chat(headers={"accept": ARROW}, **extras, **sampling))
    assert table.schema.names[-1] == "selected_logits"
    assert "logits" not in table.schema.names
    assert table["selected_logits"].to_pylist() == rows[:, wanted].tolist()
    for name in ("entropy", "logsumexp", "margin"):
        np.testing.assert_allclose(table[name].to_pylist(), stats[name], rtol=1e-6)
    assert table["rank"].to_pylist() == stats["rank"]
    assert end["rows"] == [8]


def test_columns_that_the_model_does_not_have_are_refused(scripted: ServerThread) -> None:
    reply = scripted.chat(logit_token_ids=[512])
    assert (reply.status, reply.error["param"]) == (422, "logit_token_ids")


def test_more_columns_than_the_model_has_are_refused(scripted: ServerThread) -> None:
    assert scripted.chat(logit_token_ids=[1] * 512, max_tokens=1).status == 200
    reply = scripted.chat(logit_token_ids=[1] * 513, max_tokens=1)
    assert (reply.status, reply.error["param"]) == (422, "logit_token_ids")


# Rows of the prompt.


def test_prompt_rows_come_beside_the_generated_ones_in_both_forms(serve: Serve) -> None:
    server = serve(hooked_load())
    answer = server.chat(return_prompt_logits=True, return_logits=True, max_tokens=3).json
    num_prompt = answer["usage"]["prompt_tokens"]
    assert answer["prompt_logits"]["shape"] == [num_prompt - 1, VOCAB_SIZE]
    assert len(answer["prompt_logits"]["data"]) == num_prompt - 1
    assert answer["choices"][0]["logits"]["shape"] == [3, VOCAB_SIZE]
    table, end = read_arrow(server.chat(headers={"accept": ARROW}, return_prompt_logits=True, max_tokens=3))
    assert table["segment"].to_pylist() == ["prompt"] * (num_prompt - 1) + ["content"] * 3
    assert table["position"].to_pylist() == [*range(num_prompt - 1), *range(3)]
    assert table["token_id"].to_pylist()[: num_prompt - 1] == answer["prompt_token_ids"][1:]
    assert end["rows"] == [num_prompt - 1 + 3]
    assert end["usage"]["completion_tokens"] == 3
    only = server.chat(return_prompt_logits=True, max_tokens=3).json
    assert only["prompt_logits"]["shape"] == [num_prompt - 1, VOCAB_SIZE]
    assert "logits" not in only["choices"][0]


def test_a_prompt_can_be_scored_without_generating(serve: Serve) -> None:
    server = serve(hooked_load(), prefill_chunk=5)
    answer = server.chat(return_prompt_logits=True, max_tokens=0).json
    num_prompt = answer["usage"]["prompt_tokens"]
    assert answer["prompt_logits"]["shape"] == [num_prompt - 1, VOCAB_SIZE]
    assert (answer["usage"]["completion_tokens"], answer["choices"][0]["finish_reason"]) == (0, "length")
    table, end = read_arrow(server.chat(headers={"accept": ARROW}, return_prompt_logits=True, max_tokens=0))
    assert len(table) == num_prompt - 1
    assert end["rows"] == [num_prompt - 1]


def test_prompt_rows_count_against_the_budget(serve: Serve) -> None:
    server = serve(max_logit_tokens=30)
    reply = server.chat(
        messages=[{"role": "user", "content": "x" * 40}], return_prompt_logits=True, max_tokens=1
    )
    assert (reply.status, reply.error["code"]) == (422, "logit_budget_exceeded")


# Failures.


def failing_at(at: int, error: Exception | float) -> Any:
    def hook(place: int, row: torch.Tensor) -> None:
        if place == at:
            if isinstance(error, Exception):
                raise error
            row[3] = error

    return hooked_load(hook)


FAULTS = [
    (RuntimeError("boom"), 500, "internal_error"),
    (torch.OutOfMemoryError("no memory"), 507, "out_of_memory"),
    (math.nan, 500, "non_finite_logits"),
    (70000.0, 500, "logits_overflow"),
]


@pytest.mark.parametrize(("fault", "status", "code"), FAULTS)
@pytest.mark.parametrize("at", [0, 3])
def test_a_fault_fails_a_json_answer_with_its_status(
    serve: Serve, at: int, fault: Exception | float, status: int, code: str
) -> None:
    server = serve(failing_at(at, fault))
    reply = server.chat(return_logits=True)
    assert (reply.status, reply.error["code"]) == (status, code)
    assert "boom" not in reply.error["message"]
    assert (reply.headers["x-should-retry"] == "false") == (code != "internal_error")
    assert server.request("GET", "/health").status == 200
    assert server.chat(max_tokens=at).status == 200


@pytest.mark.parametrize(("fault", "status", "code"), FAULTS)
def test_a_fault_before_the_first_row_has_its_own_status_in_arrow_too(
    serve: Serve, fault: Exception | float, status: int, code: str
) -> None:
    reply = serve(failing_at(0, fault)).chat(headers={"accept": ARROW})
    assert (reply.status, reply.error["code"]) == (status, code)


@pytest.mark.parametrize(("fault", "status", "code"), FAULTS)
def test_a_fault_in_mid_stream_never_looks_like_a_short_table(
    serve: Serve, fault: Exception | float, status: int, code: str
) -> None:
    server = serve(failing_at(3, fault))
    connection = server.connect()
    body = json.dumps({"messages": [{"role": "user", "content": "x"}], "temperature": 0})
    connection.request("POST", "/v1/chat/completions", body, {"accept": ARROW})
    response = connection.getresponse()
    assert response.status == 200
    # The connection is cut before the closing chunk, so no HTTP client takes the body for whole.
    with pytest.raises(http.client.IncompleteRead) as caught:
        response.read()
    connection.close()
    reader = pa.ipc.open_stream(caught.value.partial)
    num_rows, custom = 0, None
    while custom is None:
        batch, custom = reader.read_next_batch_with_custom_metadata()
        num_rows += batch.num_rows
    assert num_rows == 3
    assert batch.num_rows == 0
    assert json.loads(custom[ERROR_KEY])["error"]["code"] == code
    assert not caught.value.partial.endswith(b"\xff\xff\xff\xff\0\0\0\0")
    assert server.chat(max_tokens=2).status == 200
