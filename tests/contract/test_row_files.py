"""Answers saved to files as the server sent them, read back, and compared on the command line."""

import csv
import http.client
import io
import json
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from logitwire import Client, IncompleteStreamError, IterationTracker, RowFileError, jsd, read_rows
from logitwire.arrow import END_KEY, ERROR_KEY
from logitwire.cli import main
from schemas.arrow import MEDIA_TYPE
from tests.serving import ServerThread

MESSAGES = [{"role": "user", "content": "Say hi."}]
SCRIPT = "Hello from the scripted model.<|im_end|>"


def save(server: ServerThread, path: Path, *, route: str = "/v1/chat/completions", **body: Any) -> Path:
    """Save the very bytes of a stream, as curl does."""
    if route == "/v1/chat/completions":
        body = {"messages": MESSAGES, "temperature": 0, **body}
    connection = http.client.HTTPConnection(urlsplit(server.url).netloc)
    headers = {"accept": MEDIA_TYPE, "content-type": "application/json"}
    connection.request("POST", route, json.dumps(body), headers)
    path.write_bytes(connection.getresponse().read())
    connection.close()
    return path


def as_arrow_file(stream: Path, path: Path) -> Path:
    table = pa.ipc.open_stream(stream.read_bytes()).read_all()
    with pa.ipc.new_file(path, table.schema) as writer:
        writer.write_table(table, max_chunksize=7)
    return path


def as_parquet(stream: Path, path: Path) -> Path:
    pq.write_table(pa.ipc.open_stream(stream.read_bytes()).read_all(), path, row_group_size=7)
    return path


@pytest.mark.parametrize("encoding", ["b64_fp16", "b64_fp32"])
def test_all_kinds_of_files_hold_what_the_client_received(
    scripted: ServerThread, tmp_path: Path, encoding: Any
) -> None:
    dtype: Any = {"b64_fp16": "float16", "b64_fp32": "float32"}[encoding]
    expected = Client(scripted.url).chat(MESSAGES, temperature=0, logits=dtype)
    assert expected.logits is not None
    stream = save(scripted, tmp_path / "stream", logits_encoding=encoding)
    packed = save(scripted, tmp_path / "packed", logits_encoding=encoding, arrow_compression="zstd")
    paths = [stream, packed, as_arrow_file(stream, tmp_path / "file"), as_parquet(stream, tmp_path / "pq")]
    for path in paths:
        read = read_rows(path)
        assert (read.token_ids, read.tokens) == (expected.token_ids, expected.tokens)
        assert read.text == SCRIPT
        assert read.logits is not None
        assert read.logits.dtype == dtype
        np.testing.assert_array_equal(np.asarray(read.logits), expected.logits)
        np.testing.assert_array_equal(read.logprobs, expected.logprobs)
        assert read.columns["position"] == list(range(len(expected.token_ids)))
        assert read.response["metadata"]["wire_dtype"] == dtype
        assert (jsd(read.logits, expected.logits) == 0).all()
    assert read_rows(stream).response["choices"][0]["finish_reason"] == "stop"


def test_rows_of_a_stream_are_views_of_the_file(scripted: ServerThread, tmp_path: Path) -> None:
    read = read_rows(save(scripted, tmp_path / "stream"))
    assert read.logits is not None
    before = pa.total_allocated_bytes()
    row = read.logits[3:4]
    assert not row.flags.owndata
    assert pa.total_allocated_bytes() == before


def test_one_of_several_choices_is_named_and_prompt_rows_are_left_out(
    scripted: ServerThread, tmp_path: Path
) -> None:
    path = save(scripted, tmp_path / "two", n=2, return_prompt_logits=True, max_tokens=5)
    with pytest.raises(RowFileError, match=r"has the choices 0, 1; name one"):
        read_rows(path)
    with pytest.raises(RowFileError, match=r"has no choice 2; it has 0, 1"):
        read_rows(path, choice=2)
    single = read_rows(save(scripted, tmp_path / "one", max_tokens=5))
    assert single.logits is not None
    for choice in (0, 1):
        read = read_rows(path, choice=choice)
        assert read.token_ids == single.token_ids
        assert read.logits is not None
        np.testing.assert_array_equal(np.asarray(read.logits), np.asarray(single.logits))


def test_a_scoring_keeps_the_rows_of_its_context(scripted: ServerThread, tmp_path: Path) -> None:
    ids = [72, 101, 108, 108, 111]
    sequences = [{"token_ids": ids, "prompt_length": 3}]
    read = read_rows(
        save(scripted, tmp_path / "x", route="/v1/logits", sequences=sequences, range="all", next_token=True)
    )
    assert read.token_ids == [*ids[1:], -1]
    assert read.columns["segment"] == ["prompt", "prompt", "content", "content", "content"]


def test_a_stream_that_is_not_whole_is_refused_wherever_it_was_cut(
    scripted: ServerThread, tmp_path: Path
) -> None:
    whole = save(scripted, tmp_path / "whole", max_tokens=6).read_bytes()
    num_end = len(whole) - whole.rindex(b"logitwire.end")
    for cut in [7, 200, *range(1500, len(whole) - num_end, 611)]:
        path = tmp_path / "cut"
        path.write_bytes(whole[:cut])
        with pytest.raises(IncompleteStreamError, match="cut breaks off"):
            read_rows(path)


def test_a_stream_whose_server_failed_says_so(scripted: ServerThread, tmp_path: Path) -> None:
    reader = pa.ipc.open_stream(save(scripted, tmp_path / "x").read_bytes())
    path = tmp_path / "failed"
    with pa.ipc.new_stream(path, reader.schema) as writer:
        writer.write_batch(reader.read_next_batch())
        empty = pa.RecordBatch.from_pylist([], schema=reader.schema)
        writer.write_batch(empty, custom_metadata={ERROR_KEY: b'{"error": {"message": "no memory"}}'})
    with pytest.raises(IncompleteStreamError, match="failed in the middle: no memory"):
        read_rows(path)


def test_rows_that_a_filter_took_out_of_a_stream_are_missed(scripted: ServerThread, tmp_path: Path) -> None:
    reader = pa.ipc.open_stream(save(scripted, tmp_path / "x").read_bytes())
    path = tmp_path / "short"
    with pa.ipc.new_stream(path, reader.schema) as writer:
        for place, (batch, metadata) in enumerate(reader.iter_batches_with_custom_metadata()):
            if place:
                writer.write_batch(batch, custom_metadata=metadata)
    with pytest.raises(IncompleteStreamError, match="rows, but its end record says"):
        read_rows(path)


def test_what_is_no_row_file_is_named(tmp_path: Path) -> None:
    pq.write_table(pa.table({"x": [1]}), tmp_path / "other")
    IterationTracker().save(tmp_path / "loop")
    (tmp_path / "text").write_text("hello")
    (tmp_path / "empty").touch()
    (tmp_path / "refusal").write_text('{"error": {"message": "no such model"}}')
    (tmp_path / "lines").write_text('{\n"error":\n{}}')
    (tmp_path / "torn").write_bytes(b"PAR1 and no more")
    for name, message in (
        ("other", "has no column token_id; it has x"),
        ("loop", "iterations of a loop; IterationTracker.load reads it"),
        ("text", "is no Arrow stream, no Arrow file and no Parquet"),
        ("empty", "it is empty"),
        ("refusal", "JSON, perhaps a refusal: .*no such model"),
        ("lines", r"^[^\n]*JSON, perhaps a refusal: [^\n]*$"),
        ("torn", "cannot be read"),
    ):
        with pytest.raises(RowFileError, match=message):
            read_rows(tmp_path / name)
    with pytest.raises(FileNotFoundError):
        read_rows(tmp_path / "nothing")


def test_a_file_is_shown_without_its_columns_and_rows(scripted: ServerThread, tmp_path: Path) -> None:
    shown = repr(read_rows(save(scripted, tmp_path / "x")))
    assert shown == f"<RowFile of {len('Hello from the scripted model.') + 1} tokens, rows (31, 512) float16>"


def test_a_stream_with_offsets_that_lead_elsewhere_is_refused(tmp_path: Path) -> None:
    table = pa.table({"token_id": pa.array([1], pa.int32()), "segment": ["content"]})
    sink = io.BytesIO()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
        empty = pa.RecordBatch.from_pylist([], schema=table.schema)
        writer.write_batch(empty, custom_metadata={END_KEY: b'{"rows": [1]}'})
    offset, content = b"\x07\0\0\0", b"content"
    assert offset + content in sink.getvalue()
    (tmp_path / "whole").write_bytes(sink.getvalue())
    assert read_rows(tmp_path / "whole").token_ids == [1]
    torn = sink.getvalue().replace(offset + content, b"\0\0\0\x7f" + content)
    (tmp_path / "torn").write_bytes(torn)
    with pytest.raises(RowFileError, match="cannot be read"):
        read_rows(tmp_path / "torn")


@pytest.mark.parametrize("rows", [[6.0], {"0": 6}, "6", None])
def test_an_end_record_of_another_form_is_no_end(rows: Any, scripted: ServerThread, tmp_path: Path) -> None:
    reader = pa.ipc.open_stream(save(scripted, tmp_path / "x").read_bytes())
    path = tmp_path / "other"
    with pa.ipc.new_stream(path, reader.schema) as writer:
        empty = pa.RecordBatch.from_pylist([], schema=reader.schema)
        writer.write_batch(reader.read_next_batch())
        writer.write_batch(empty, custom_metadata={END_KEY: json.dumps({"rows": rows})})
    with pytest.raises(IncompleteStreamError, match="its end record says"):
        read_rows(path)


@pytest.mark.parametrize(
    ("column", "values"),
    [
        ("logits", pa.array([[1.0, 2.0]])),
        ("logits", pa.array([1.0])),
        ("token_id", pa.array([1.5])),
        ("choice", pa.array([None], pa.int32())),
    ],
)
def test_columns_unlike_the_wires_are_named(column: str, values: Any, tmp_path: Path) -> None:
    columns = {"token_id": pa.array([1]), column: values}
    pq.write_table(pa.table(columns), tmp_path / "x")
    with pytest.raises(RowFileError, match=f"column {column}"):
        read_rows(tmp_path / "x")


@pytest.fixture
def pair(scripted: ServerThread, tmp_path: Path) -> tuple[str, str]:
    """Two answers; in the second a bias makes another third token, and the script goes on."""
    a = save(scripted, tmp_path / "a.arrow", max_tokens=8)
    b = save(scripted, tmp_path / "b.arrow", max_tokens=8, logit_bias={"33": 100}, seed=1)
    return str(a), str(b)


def test_the_command_prints_a_table_json_and_csv_of_the_same_numbers(
    pair: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = (read_rows(path) for path in pair)
    assert main(["jsd", *pair, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["log_base"] == 2
    first = found["positions"][0]
    assert (first["a_position"], first["b_position"]) == (0, 0)
    assert (first["token_a"], first["token_b"], first["kind"]) == (a.tokens[0], b.tokens[0], "same prefix")
    assert a.logits is not None
    assert b.logits is not None
    assert first["jsd"] == jsd(a.logits[:1], b.logits[:1])[0]
    same_prefix = [each["jsd"] for each in found["positions"] if each["kind"] == "same prefix"]
    assert found["mean_jsd"]["same_prefix"] == pytest.approx(np.mean(same_prefix))

    assert main(["jsd", *pair, "--csv"]) == 0
    lines = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [float(line["jsd"]) for line in lines] == [each["jsd"] for each in found["positions"]]

    assert main(["jsd", *pair, "--same-prefix", "--base", "e"]) == 0
    out = capsys.readouterr().out
    assert "JSD (nats)" in out
    assert f"mean over {len(same_prefix)} positions of the same prefix: " in out
    assert "same token" not in out


def test_the_command_draws_the_curve(
    pair: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["jsd", *pair, "--plot", str(tmp_path / "curve.png")]) == 0
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert "curve.png" in capsys.readouterr().err


def test_choices_of_one_file_can_be_compared(
    scripted: ServerThread, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(save(scripted, tmp_path / "two", n=2, max_tokens=5))
    assert main(["jsd", path, path, "--choices", "0", "1"]) == 0
    assert "mean over 5 positions of the same prefix: 0.000000 bits" in capsys.readouterr().out


def test_bad_input_is_one_line_and_exit_code_2(
    scripted: ServerThread, pair: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cut = tmp_path / "cut"
    cut.write_bytes(Path(pair[0]).read_bytes()[:2000])
    rowless = save(scripted, tmp_path / "rowless", return_logits=False)
    for arguments, message in (
        ([pair[0], str(cut)], "cut breaks off"),
        ([pair[0], str(tmp_path / "nothing")], "No such file"),
        ([pair[0], str(rowless)], "has no column logits"),
        ([*pair, "--plot", str(tmp_path / "curve.gif")], "curve.gif: a plot is saved as .png, .svg, .pdf"),
        ([*pair, "--temperature", "0"], "temperature"),
    ):
        assert main(["jsd", *arguments]) == 2
        err = capsys.readouterr().err
        assert message in err
        assert err.startswith("logitwire jsd: ")
        assert err.count("\n") == 1
    for arguments in ([], ["jsd"], ["jsd", *pair, "--base", "10"]):
        with pytest.raises(SystemExit) as exit_info:
            main(arguments)
        assert exit_info.value.code == 2
        capsys.readouterr()
