"""Captures: killed, stopped and resumed, refused, checked and read back."""

import json
import os
import random
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from logitwire import Capture, Client, check_capture, open_capture
from logitwire.capture import shards
from logitwire.capture.folder import Folder, read_manifest
from logitwire.cli import main
from tests.conftest import Serve
from tests.fakes import hooked_load
from tests.serving import DEADLINE_S, ServerThread, eventually

NUM_PROMPTS = 16
NUM_TOKENS = 8
NUM_KILLS = 3

# Each seed then draws other tokens, while every row is the script's.
HOT = ["--temperature", "9", "--max-tokens", str(NUM_TOKENS), "--set", "ignore_eos=true"]

Run = Callable[..., tuple[int, str]]


def command(prompts: Path, folder: Path, url: str, *options: str) -> list[str]:
    return ["capture", str(prompts), "-o", str(folder), "--base-url", url, *HOT, *options]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Run a capture here; return its exit code and what it said."""

    def call(prompts: Path, folder: Path, url: str, *options: str) -> tuple[int, str]:
        capsys.readouterr()
        code = main(command(prompts, folder, url, *options))
        return code, capsys.readouterr().err

    return call


def start(prompts: Path, folder: Path, url: str, *options: str) -> subprocess.Popen[str]:
    """Start a capture in a process of its own."""
    arguments = command(prompts, folder, url, *options)
    return subprocess.Popen(
        [sys.executable, "-m", "logitwire", *arguments], stderr=subprocess.PIPE, text=True
    )


def write_prompts(path: Path, lines: Sequence[dict[str, Any]] | None = None) -> Path:
    lines = (
        [{"prompt": f"Question {seed}", "seed": seed} for seed in range(NUM_PROMPTS)]
        if lines is None
        else lines
    )
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def num_recorded(folder: Path) -> int:
    # The manifest of a capture that has just begun may be empty.
    _, recorded = read_manifest(folder)
    return sum(len(shard.answers) for shard in recorded)


def contents(capture: Capture) -> dict[str, Any]:
    return {
        prompt_id: (rows.token_ids, np.asarray(rows.logits).tobytes(), rows.columns["logprob"], rows.tokens)
        for prompt_id, rows in capture
    }


def slow_load(delay_s: float = 0.003) -> Any:
    """Return a loader of a model that takes its time for each row."""
    return hooked_load(lambda place, row: time.sleep(delay_s), script="Hello there.")


def test_every_kind_of_prompt_gets_the_answer_of_a_direct_call(
    scripted: ServerThread, run: Run, tmp_path: Path
) -> None:
    messages = [{"role": "user", "content": "Say hi."}]
    prompts = write_prompts(
        tmp_path / "prompts.jsonl",
        [
            {"prompt": "Say hi.", "seed": 4},
            {"id": "chat", "messages": messages, "temperature": 0, "max_tokens": 5},
            {"id": "ids", "token_ids": [5, 6, 7], "seed": 6},
        ],
    )
    code, said = run(prompts, tmp_path / "out", scripted.url, "--token-stats")
    assert code == 0
    assert f"3 of 3 prompts are answered: {2 * NUM_TOKENS + 5} rows in 1 shard" in said
    client = Client(scripted.url)
    hot: Any = {"temperature": 9, "max_tokens": NUM_TOKENS, "ignore_eos": True, "token_stats": True}
    expected = {
        "1": client.chat(messages, seed=4, **hot),
        "chat": client.chat(messages, **{**hot, "temperature": 0, "max_tokens": 5}),
        "ids": client.complete([5, 6, 7], seed=6, **hot),
    }
    capture = open_capture(tmp_path / "out")
    assert set(capture.answers) == set(expected)
    for prompt_id, rows in capture:
        result = expected[prompt_id]
        assert rows.token_ids == result.token_ids
        assert capture.answers[prompt_id].texts == [result.text]
        np.testing.assert_array_equal(np.asarray(rows.logits), result.logits)
        assert rows.columns["rank"] == result.columns["rank"]
        assert rows.response["usage"] == result.usage


def test_a_capture_that_is_killed_at_any_moment_resumes_without_holes_or_duplicates(
    serve: Serve, run: Run, tmp_path: Path
) -> None:
    server = serve(slow_load())
    prompts = write_prompts(tmp_path / "prompts.jsonl")
    # An answer has 5 kB, so a shard has two.
    options = ["--shard-mb", "0.008", "--concurrency", "3"]
    assert run(prompts, tmp_path / "whole", server.url, *options)[0] == 0
    rng = random.Random(5)
    folder = tmp_path / "killed"
    for _ in range(NUM_KILLS):
        num_before = num_recorded(folder)
        process = start(prompts, folder, server.url, *options)
        eventually(lambda before=num_before: num_recorded(folder) > before)
        # Wherever that is: in an answer, in a shard, or between a shard and its record.
        time.sleep(rng.uniform(0, 0.02))
        process.kill()
        process.communicate()
    assert NUM_KILLS < num_recorded(folder) < NUM_PROMPTS
    code, said = run(prompts, folder, server.url, *options)
    assert (code, f"{NUM_PROMPTS} of {NUM_PROMPTS} prompts are answered" in said) == (0, True)
    assert check_capture(folder) == []
    killed, whole = open_capture(folder), open_capture(tmp_path / "whole")
    assert set(killed.answers) == {str(number + 1) for number in range(NUM_PROMPTS)}
    assert contents(killed) == contents(whole)
    assert killed.dataset().count_rows() == NUM_PROMPTS * NUM_TOKENS
    assert len({tuple(rows.token_ids) for _, rows in killed}) == NUM_PROMPTS


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_keeps_what_is_whole_and_says_how_to_go_on(
    serve: Serve, run: Run, tmp_path: Path, number: int, code: int
) -> None:
    goes_on, num_rows = threading.Event(), 0

    def hook(place: int, row: Any) -> None:
        nonlocal num_rows
        num_rows += 1
        if num_rows > 8 * NUM_TOKENS:
            goes_on.wait(DEADLINE_S)

    server = serve(hooked_load(hook))
    prompts = write_prompts(tmp_path / "prompts.jsonl")
    process = start(prompts, tmp_path / "out", server.url, "--concurrency", "2")
    eventually(lambda: num_rows > 8 * NUM_TOKENS)
    # The last whole answers may still be on their way.
    eventually(lambda: any((tmp_path / "out").glob(".shard-*")))
    process.send_signal(number)
    _, said = process.communicate(timeout=DEADLINE_S)
    goes_on.set()
    assert process.returncode == code
    assert "the same command goes on" in said
    assert 1 <= num_recorded(tmp_path / "out") <= 8
    assert check_capture(tmp_path / "out") == []
    assert run(prompts, tmp_path / "out", server.url)[0] == 0
    assert num_recorded(tmp_path / "out") == NUM_PROMPTS


def test_a_server_that_goes_away_ends_the_capture_cleanly(serve: Serve, run: Run, tmp_path: Path) -> None:
    server = serve(slow_load())
    folder = tmp_path / "out"
    prompts = write_prompts(tmp_path / "prompts.jsonl")
    options = ["--retries", "0", "--shard-mb", "0.008", "--concurrency", "2"]

    def go_away() -> None:
        eventually(lambda: num_recorded(folder) > 3)
        server.stop()

    thread = threading.Thread(target=go_away)
    thread.start()
    code, said = run(prompts, folder, server.url, *options)
    thread.join()
    assert code == 1
    assert "the same command goes on" in said
    assert 3 < num_recorded(folder) < NUM_PROMPTS
    assert open_capture(folder).failures == {}
    assert run(prompts, folder, serve(slow_load()).url, *options)[0] == 0
    assert check_capture(folder) == []


def test_a_prompt_that_fails_is_recorded_and_the_others_go_on(
    scripted: ServerThread, run: Run, tmp_path: Path
) -> None:
    lines = [{"id": "bad", "prompt": "x", "temperature": -1}, {"id": "good", "prompt": "x"}]
    prompts, folder = write_prompts(tmp_path / "prompts.jsonl", lines), tmp_path / "out"
    code, said = run(prompts, folder, scripted.url)
    assert code == 1
    assert f"1 failed, as {folder / 'failures.jsonl'} says" in said
    capture = open_capture(folder)
    assert list(capture.answers) == ["good"]
    failure = capture.failures["bad"]
    assert (failure.status, failure.code, failure.param) == (422, "invalid_value", "temperature")
    # It is not tried again, unless that is asked for.
    assert run(prompts, folder, "http://127.0.0.1:1")[0] == 1
    write_prompts(prompts, [{"id": "bad", "prompt": "x", "temperature": 1}, lines[1]])
    assert "'bad' is done, and is another one now" in run(prompts, folder, scripted.url)[1]
    assert run(prompts, folder, scripted.url, "--retry-failed")[0] == 0
    assert list(open_capture(folder).answers) == ["good", "bad"]


def test_a_capture_goes_on_with_the_same_settings_prompts_and_model_only(
    scripted: ServerThread, serve: Serve, run: Run, tmp_path: Path
) -> None:
    prompts, folder = write_prompts(tmp_path / "prompts.jsonl", [{"prompt": "x"}]), tmp_path / "out"
    assert run(prompts, folder, scripted.url)[0] == 0
    code, said = run(prompts, folder, scripted.url, "--logits", "float32")
    assert (code, "logits was 'float16', and is 'float32' now" in said) == (2, True)
    write_prompts(prompts, [{"prompt": "y"}])
    code, said = run(prompts, folder, scripted.url)
    assert (code, "'1' is done, and is another one now" in said) == (2, True)
    write_prompts(prompts, [{"prompt": "x"}, {"prompt": "y"}])
    code, said = run(prompts, folder, serve(hooked_load()).url)
    assert (code, "model was 'scripted', and is 'hooked' now" in said) == (1, True)
    assert run(prompts, folder, scripted.url)[0] == 0
    assert list(open_capture(folder).answers) == ["1", "2"]


def test_a_setting_that_the_server_refuses_ends_the_capture_at_once(
    scripted: ServerThread, run: Run, tmp_path: Path
) -> None:
    prompts, folder = write_prompts(tmp_path / "prompts.jsonl"), tmp_path / "out"
    code, said = run(prompts, folder, scripted.url, "--top-p", "3")
    assert (code, "logitwire capture: top_p: " in said) == (2, True)
    assert open_capture(folder).failures == {}
    assert run(prompts, folder, scripted.url, "--top-p", "0.9")[0] == 0


def test_a_folder_that_is_at_work_is_refused(scripted: ServerThread, run: Run, tmp_path: Path) -> None:
    prompts, folder = write_prompts(tmp_path / "prompts.jsonl", [{"prompt": "x"}]), tmp_path / "out"
    assert run(prompts, folder, scripted.url)[0] == 0
    with Folder.open(folder, open_capture(folder).settings):
        code, said = run(prompts, folder, scripted.url)
    assert (code, said) == (2, f"logitwire capture: another capture is at work in {folder}\n")


def test_a_full_disk_is_said_and_leaves_a_capture_that_goes_on(
    scripted: ServerThread, run: Run, tmp_path: Path
) -> None:
    prompts, folder = write_prompts(tmp_path / "prompts.jsonl"), tmp_path / "out"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, hard))
    try:
        code, said = run(prompts, folder, scripted.url)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert code == 1
    assert f"{folder} cannot be written: " in said
    # Nothing half-written is left.
    assert check_capture(folder) == []
    assert run(prompts, folder, scripted.url)[0] == 0
    assert check_capture(folder) == []


def test_long_answers_wait_on_the_disk_and_not_in_memory(
    scripted: ServerThread, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = write_prompts(tmp_path / "prompts.jsonl", [{"prompt": "x", "seed": 1}])
    assert run(prompts, tmp_path / "one", scripted.url)[0] == 0
    monkeypatch.setattr(shards, "MAX_SPOOL_BYTES", 2000)
    monkeypatch.setattr(shards, "BLOCK_BYTES", 2048)
    assert run(prompts, tmp_path / "other", scripted.url)[0] == 0
    one, other = open_capture(tmp_path / "one"), open_capture(tmp_path / "other")
    assert contents(one) == contents(other)
    assert len(next(iter(one.dataset().to_batches()))) > len(next(iter(other.dataset().to_batches()))) == 2


def test_parquet_holds_the_same_rows_and_is_read_by_others(
    scripted: ServerThread, run: Run, tmp_path: Path
) -> None:
    prompts = write_prompts(tmp_path / "prompts.jsonl")
    options = ["--shard-mb", "0.05", "--logits", "float32"]
    assert run(prompts, tmp_path / "arrow", scripted.url, *options)[0] == 0
    assert run(prompts, tmp_path / "parquet", scripted.url, *options, "--format", "parquet")[0] == 0
    arrow, parquet = open_capture(tmp_path / "arrow"), open_capture(tmp_path / "parquet")
    assert contents(arrow) == contents(parquet)
    assert check_capture(tmp_path / "parquet") == []
    frame = pl.scan_parquet(tmp_path / "parquet/shard-*.parquet").filter(pl.col("id") == "7").collect()
    assert frame["token_id"].to_list() == parquet.rows("7").token_ids
    np.testing.assert_array_equal(frame["logits"].to_numpy(), np.asarray(parquet.rows("7").logits))


def test_several_choices_of_a_prompt_are_told_apart(scripted: ServerThread, run: Run, tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path / "prompts.jsonl", [{"prompt": "x", "n": 2, "seed": 1}, {"prompt": "y"}])
    assert run(prompts, tmp_path / "out", scripted.url)[0] == 0
    capture = open_capture(tmp_path / "out")
    assert sorted(prompt_id for prompt_id, _ in capture) == ["1", "1", "2"]
    assert capture.answers["1"].num_rows == 2 * NUM_TOKENS
    texts = [b"".join(capture.rows("1", choice=each).columns["token_bytes"]) for each in (0, 1)]
    assert [text.decode(errors="replace") for text in texts] == capture.answers["1"].texts


def test_a_capture_without_a_token_is_one(scripted: ServerThread, run: Run, tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path / "prompts.jsonl", [{"prompt": "x", "max_tokens": 0}])
    assert run(prompts, tmp_path / "out", scripted.url)[0] == 0
    ((prompt_id, rows),) = open_capture(tmp_path / "out")
    assert (prompt_id, rows.token_ids, rows.text) == ("1", [], "")


def test_a_check_finds_what_has_changed(
    scripted: ServerThread, run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "out"
    assert run(write_prompts(tmp_path / "prompts.jsonl"), folder, scripted.url, "--shard-mb", "0.03")[0] == 0

    def check() -> tuple[int, list[str]]:
        capsys.readouterr()
        code = main(["capture", "--check", str(folder)])
        return code, capsys.readouterr().out.splitlines()

    assert check() == (0, [f"whole: {NUM_PROMPTS} answers, {NUM_PROMPTS * NUM_TOKENS} rows; 0 failures"])
    first, second = sorted(folder.glob("shard-*"))[:2]
    content = first.read_bytes()
    first.write_bytes(content[:1000] + bytes([content[1000] ^ 1]) + content[1001:])
    second.unlink()
    (folder / "shard-00099.arrow").write_bytes(b"x")
    assert check() == (
        1,
        [
            "shard-00000.arrow has changed: its checksum is not that of the manifest",
            "shard-00001.arrow is missing",
            "shard-00099.arrow is not in the manifest; the next run removes it",
        ],
    )
    manifest = folder / "manifest.jsonl"
    lines = manifest.read_bytes().splitlines(keepends=True)
    manifest.write_bytes(b"".join([*lines, lines[-1]]))
    assert any(fault.endswith("is there 2 times") for fault in check()[1])


def test_a_folder_without_a_capture_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no capture"):
        open_capture(tmp_path)
    assert main(["capture", "--check", str(tmp_path)]) == 2
    assert os.listdir(tmp_path) == []
