"""All methods of both Python clients, against a real server."""

import asyncio
import io
import json
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import polars
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from logitwire import AsyncClient, Client, Generation, Row, Score
from tests.clients import MESSAGES, TALKERS, Talker
from tests.conftest import Serve
from tests.contract.conftest import Talk
from tests.fakes import hooked_load
from tests.serving import ServerThread, eventually

SCRIPT = "Hello from the scripted model."
NUM = len(SCRIPT) + 1

CALLS: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "chat": ((MESSAGES,), {"temperature": 0, "return_prompt_logits": True}),
    "complete": (("abc",), {"temperature": 0, "max_tokens": 40}),
    "generate": (([*b"abc"],), {"temperature": 0, "output_mode": "text"}),
    "score": (([[*b"abcdef"], "xyz", MESSAGES],), {"token_stats": True}),
}


def parts_of(result: Any) -> list[Generation] | list[Score]:
    return result if isinstance(result, list) else list(result.choices)


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("keep", [False, True])
def test_rows_one_by_one_are_the_rows_of_the_whole_answer(
    scripted: ServerThread, talk: Talk, name: str, keep: bool
) -> None:
    talker = talk(scripted.url)
    args, options = CALLS[name]
    whole = parts_of(talker.call(name, *args, **options))
    rows, stream = talker.rows(name, *args, keep=keep, **options)
    streamed = parts_of(stream.result)
    assert [each.token_ids for each in streamed] == [each.token_ids for each in whole]
    for place, (own, theirs) in enumerate(zip(streamed, whole, strict=True)):
        mine = [row for row in rows if row.choice == place]
        table = theirs.to_arrow()
        assert [row.logits.tolist() for row in mine if row.logits is not None] == table["logits"].to_pylist()
        for column in ("position", "segment", "token_id", "token", "token_bytes", "logprob", "finish_reason"):
            assert [getattr(row, column) for row in mine] == table[column].to_pylist()
        for column in set(table.column_names) & {"entropy", "rank"}:
            assert [row.columns[column] for row in mine] == table[column].to_pylist()
        assert (own.logits is not None) is keep
        assert own.metadata == theirs.metadata
        if keep:
            assert own.to_arrow().drop_columns(["choice"]).equals(table.drop_columns(["choice"]))


def test_a_row_stays_valid_and_is_read_only(scripted: ServerThread, talk: Talk) -> None:
    rows, _ = talk(scripted.url).rows("chat", MESSAGES, temperature=0)
    assert [row.logits.argmax() for row in rows if row.logits is not None] == [row.token_id for row in rows]
    assert not any(row.logits.flags.writeable for row in rows if row.logits is not None)
    assert rows[-1].finish_reason == "stop"


def test_several_completions_come_as_choices(scripted: ServerThread, talk: Talk) -> None:
    result = talk(scripted.url).call("chat", MESSAGES, n=3, temperature=0, max_tokens=4)
    assert [each.text for each in result.choices] == ["Hell"] * 3
    assert [each.logits.shape for each in result.choices] == [(4, 512)] * 3
    assert result.choices[0] is result
    assert result.usage["completion_tokens"] == 12
    result = talk(scripted.url).call("complete", ["ab", "cd"], n=2, temperature=0, max_tokens=2)
    assert len(result.choices) == 4
    assert [each.prompt_token_ids for each in result.choices] == [[*b"ab"]] * 2 + [[*b"cd"]] * 2


def test_a_prompts_rows_are_apart_from_the_completions(scripted: ServerThread, talk: Talk) -> None:
    result = talk(scripted.url).call(
        "complete", "abcd", temperature=0, max_tokens=2, echo=True, return_prompt_logits=True
    )
    assert (result.text, result.tokens) == ("abcdHe", ["H", "e"])
    assert result.logits.shape == (2, 512)
    assert result.prompt_logits.shape == (3, 512)
    assert result.prompt_columns["token_id"] == [*b"bcd"]
    assert result.to_arrow()["segment"].to_pylist() == ["prompt"] * 3 + ["content"] * 2
    scored = talk(scripted.url).call("score", [[*b"abcd"]])[0]
    np.testing.assert_array_equal(result.prompt_logits, scored.logits)


def test_ids_go_on_with_and_without_text(scripted: ServerThread, talk: Talk) -> None:
    talker = talk(scripted.url)
    ids = np.array([*b"abc"])
    result = talker.call("generate", ids, sampling_params={"max_tokens": 3, "temperature": 0})
    assert (result.text, result.tokens, result.logits.shape) == ("", ["H", "e", "l"], (3, 512))
    assert talker.call("generate", ids, output_mode="text", max_tokens=3, temperature=0).text == "Hel"


def test_a_divergence_has_a_step_per_token_and_infinity_for_null(scripted: ServerThread, talk: Talk) -> None:
    talker = talk(scripted.url)
    result = talker.call("divergence", MESSAGES, "Some text", "xyz", log_base="e")
    assert (result.tokens, result.token_ids, len(result)) == (["x", "y", "z"], [*b"xyz"], 3)
    assert [step.jsd for step in result] == result.jsd.tolist()
    assert [step.token for step in result] == result.tokens
    assert result.jsd.dtype == np.float64
    assert result.mean["jsd"] == pytest.approx(result.jsd.mean())
    same = talker.call("divergence", {"text": "a"}, [*b"a"], [*b"xyz"], temperature=0.5)
    assert (same.jsd == 0).all()
    generated = talker.call("divergence", "a", "b", max_tokens=4)
    assert len(generated) == 4


def test_an_infinite_divergence_is_infinite(serve: Serve, talk: Talk) -> None:
    def hook(place: int, row: torch.Tensor) -> None:
        row[:100] = -torch.inf if place else 0

    result = talk(serve(hooked_load(hook)).url).call("divergence", "a", "b", "cd")
    assert set(map(type, result.mean.values())) == {float}
    assert not np.isnan(result.kl_pq).any()


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_a_table_shares_the_memory_of_the_rows_and_goes_everywhere(
    scripted: ServerThread, talk: Talk, dtype: str
) -> None:
    result = talk(scripted.url).call("chat", MESSAGES, temperature=0, logits=dtype, token_stats=True)
    table = result.to_arrow()
    flat = table["logits"].chunk(0).flatten().to_numpy(zero_copy_only=True)
    assert np.shares_memory(flat, result.logits)
    np.testing.assert_array_equal(flat.reshape(result.logits.shape), result.logits)
    assert json.loads(table.schema.metadata[b"logitwire.response"])["object"] == "chat.completion"
    assert table.column_names[-1] == "logits"
    assert table.schema.field("logits").type == pa.list_(
        pa.field("item", pa.float16() if dtype == "float16" else pa.float32()), 512
    )
    file = io.BytesIO()
    pq.write_table(table, file)
    assert pq.read_table(file).equals(table)
    frame = polars.from_arrow(table)
    assert isinstance(frame, polars.DataFrame)
    np.testing.assert_array_equal(frame["logits"].to_numpy(), result.logits)


def test_a_table_is_the_table_that_was_sent(scripted: ServerThread, talk: Talk) -> None:
    body = {"messages": MESSAGES, "temperature": 0, "token_stats": True}
    accept = {"accept": "application/vnd.apache.arrow.stream"}
    sent = pa.ipc.open_stream(scripted.request("POST", "/v1/chat/completions", body, accept).body)
    ours = talk(scripted.url).call("chat", MESSAGES, temperature=0, token_stats=True).to_arrow()
    assert ours.schema == sent.schema
    assert ours.equals(sent.read_all())


def test_without_rows_there_is_no_column_of_rows(scripted: ServerThread, talk: Talk) -> None:
    talker = talk(scripted.url)
    result = talker.call("chat", MESSAGES, temperature=0, logits=None)
    assert (result.text, result.logits, len(result.logprobs)) == (SCRIPT, None, NUM)
    assert "logits" not in result.to_arrow().column_names
    rows, stream = talker.rows("chat", MESSAGES, temperature=0, logits=None)
    assert [row.logits for row in rows] == [None] * NUM
    assert stream.result.text == SCRIPT


def test_rows_arrive_while_the_server_generates(serve: Serve, talk: Talk) -> None:
    opened = threading.Event()

    def hook(place: int, row: torch.Tensor) -> None:
        # The server cannot go on before the first row was seen.
        assert place < 3 or opened.wait(20)

    talker = talk(serve(hooked_load(hook)).url)
    seen: list[Row] = []

    class Opening(list[Row]):
        def append(self, row: Row) -> None:
            seen.append(row)
            opened.set()

    rows, stream = read_with(talker, Opening)
    assert len(seen) == 9
    assert stream.result.text == "abcdefgh"


def read_with(talker: Talker, kind: Callable[[], list[Row]]) -> tuple[list[Row], Any]:
    found = kind()
    if isinstance(talker.client, Client):
        with talker.client.chat_rows(MESSAGES, temperature=0) as stream:
            for row in stream:
                found.append(row)
        return found, stream

    async def read() -> Any:
        async with talker.client.chat_rows(MESSAGES, temperature=0) as stream:
            async for row in stream:
                found.append(row)
        return stream

    return found, talker.runner.run(read())  # type: ignore[union-attr]


def test_a_stream_that_is_left_ends_the_work_at_the_server(serve: Serve, talk: Talk) -> None:
    server = serve(hooked_load(script="a" * 4000))
    rows, stream = talk(server.url).rows("chat", MESSAGES, temperature=0, max_tokens=4000, until=2)
    assert len(rows) == 2
    with pytest.raises(RuntimeError, match="all rows were read"):
        _ = stream.result
    eventually(lambda: server.engine.num_requests == 0)


def test_a_stream_that_is_forgotten_ends_the_work_at_the_server(serve: Serve) -> None:
    server = serve(hooked_load(script="a" * 4000))
    client = Client(server.url)
    stream = client.chat_rows(MESSAGES, temperature=0, max_tokens=4000)
    next(stream)
    del stream
    eventually(lambda: server.engine.num_requests == 0)


async def test_a_task_that_is_cancelled_ends_the_work_at_the_server(serve: Serve) -> None:
    reached = threading.Event()

    def hook(place: int, row: torch.Tensor) -> None:
        if place == 3:
            reached.set()

    server = serve(hooked_load(hook, script="a" * 4000))
    async with AsyncClient(server.url) as client:
        task = asyncio.ensure_future(client.chat(MESSAGES, temperature=0, max_tokens=4000))
        assert await asyncio.to_thread(reached.wait, 20)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.to_thread(eventually, lambda: server.engine.num_requests == 0)


async def test_many_tasks_share_an_async_client(scripted: ServerThread) -> None:
    async with AsyncClient(scripted.url) as client:
        calls = [client.chat(MESSAGES, temperature=0, max_tokens=1 + num % 9) for num in range(40)]
        for num, result in enumerate(await asyncio.gather(*calls)):
            assert result.text == SCRIPT[: 1 + num % 9]


async def test_a_slow_taker_holds_no_more_rows_than_it_must(serve: Serve) -> None:
    given_out = 0

    def hook(place: int, row: torch.Tensor) -> None:
        nonlocal given_out
        given_out = max(given_out, place)

    wide = 20_000
    server = serve(hooked_load(hook, script="a" * 4000, vocab_size=wide), outbox_bytes=10 * 2 * wide)
    async with AsyncClient(server.url) as client, client.chat_rows(MESSAGES, max_tokens=1000) as stream:
        await anext(stream)
        # Nobody takes rows now, so the connection stops reading, and the server pauses.
        last = -1
        while last != given_out:
            last = given_out
            await asyncio.sleep(0.3)
        assert given_out < 600
        assert [row.position async for row in stream][:5] == [1, 2, 3, 4, 5]


def test_threads_share_a_client(scripted: ServerThread) -> None:
    texts: list[str] = []
    with Client(scripted.url) as client:
        threads = [
            threading.Thread(target=lambda: texts.append(client.chat(MESSAGES, temperature=0).text))
            for _ in range(12)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert texts == [SCRIPT] * 12


def test_a_client_is_found_by_the_environment(
    scripted: ServerThread, talk: Talk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOGITWIRE_BASE_URL", scripted.url)
    assert talk(None).call("chat", MESSAGES, temperature=0, max_tokens=2).text == "He"


@pytest.mark.parametrize("options", [{"timeout_s": 0}, {"max_retries": -1}])
def test_settings_that_make_no_sense_are_refused(talk: Talk, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="must be above 0"):
        TALKERS["sync"]("http://127.0.0.1:1", **options)
    with pytest.raises(ValueError, match="not an http"):
        talk("ftp://127.0.0.1")


def test_a_single_sequence_is_not_taken_for_many(scripted: ServerThread, talk: Talk) -> None:
    with pytest.raises(TypeError, match="list of its own"):
        talk(scripted.url).call("score", "some text")
