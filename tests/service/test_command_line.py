"""The commands chat, rows and loop, as a shell runs them, against a scripted server."""

import io
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import logitwire
from logitwire import Client, IterationTracker, read_rows
from logitwire.cli import main
from tests.conftest import Serve
from tests.fakes import hooked_load
from tests.serving import DEADLINE_S, ServerThread, eventually

PACKAGE = str(Path(logitwire.__file__).parents[1])
SCRIPT = "Hello from the scripted model."

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Run the command; return its exit code, what it printed, and what it printed as errors."""

    def call(*arguments: str | Path, url: str) -> tuple[int, str, str]:
        capsys.readouterr()
        command, *rest = map(str, arguments)
        code = main([command, "--base-url", url, *rest])
        return code, *capsys.readouterr()

    return call


def pipe(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))


def test_a_prompt_gets_one_answer(scripted: ServerThread, run: Run) -> None:
    assert run("chat", "hi", url=scripted.url) == (0, f"{SCRIPT}\n", "")


def test_piped_text_gets_one_answer(
    scripted: ServerThread, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe(monkeypatch, "hi\n")
    assert run("chat", url=scripted.url) == (0, f"{SCRIPT}\n", "")


def test_an_empty_pipe_is_bad_input(
    scripted: ServerThread, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe(monkeypatch, "\n")
    code, answer, said = run("chat", url=scripted.url)
    assert (code, answer, said) == (2, "", "logitwire chat: there is nothing to say: the input is empty\n")


def test_a_stop_string_is_not_printed(scripted: ServerThread, run: Run) -> None:
    assert run("chat", "hi", "--stop", "model", url=scripted.url)[1] == "Hello from the scripted \n"


def test_sampling_options_and_set_reach_the_server(scripted: ServerThread, run: Run) -> None:
    options = ["--max-tokens", "9", "--temperature", "0", "--set", "min_tokens=2"]
    assert run("chat", "hi", *options, url=scripted.url)[1] == "Hello fro\n"
    code, _, said = run("chat", "hi", "--set", "min_token=2", url=scripted.url)
    assert (code, said) == (2, "logitwire chat: min_token: unknown field; did you mean min_tokens?\n")


def test_certainty_is_said_apart_from_the_answer(scripted: ServerThread, run: Run) -> None:
    _, answer, said = run("chat", "hi", "--logprobs", url=scripted.url)
    assert answer == f"{SCRIPT}\n"
    result = Client(scripted.url).chat([{"role": "user", "content": "hi"}], token_stats=True)
    entropy = sum(result.columns["entropy"]) / len(result.token_ids)
    assert said.startswith(f"{len(SCRIPT) + 1} tokens, mean logprob {result.logprobs.mean():.3f} ")
    assert f"mean entropy {entropy:.3f} nats" in said


def test_reasoning_is_left_out_of_a_pipe(serve: Serve, run: Run) -> None:
    server = serve(hooked_load(script="<think>Hm.</think>Yes 🚀."), reasoning_parser="<think>,</think>")
    assert run("chat", "hi", url=server.url)[1] == "Yes 🚀.\n"


def test_no_server_is_one_line_and_exit_code_1(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    code, _, said = run("chat", "hi", url="http://127.0.0.1:1")
    assert code == 1
    assert re.fullmatch(r"logitwire chat: no connection to 127\.0\.0\.1:1: .*\n", said)


@pytest.mark.parametrize(
    "arguments",
    [["chat", "--set", "top_p=x"], ["rows", "hi"], ["loop"], ["capture", "--format", "csv"], ["shout"], []],
)
def test_bad_arguments_are_exit_code_2(arguments: list[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(arguments)


class Terminal:
    """The command in a process of its own, on a terminal."""

    def __init__(self, *arguments: str) -> None:
        self._fd, theirs = pty.openpty()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "logitwire", *arguments], stdin=theirs, stdout=theirs, stderr=theirs
        )
        os.close(theirs)

    def read(self, until: str) -> str:
        found = b""
        while until.encode() not in found:
            ready, _, _ = select.select([self._fd], [], [], DEADLINE_S)
            assert ready, f"only {found!r} came"
            found += os.read(self._fd, 4096)
        return found.decode()

    def write(self, text: str) -> None:
        os.write(self._fd, text.encode())

    def interrupt(self) -> None:
        self._process.send_signal(signal.SIGINT)

    def wait(self) -> int:
        code = self._process.wait(DEADLINE_S)
        os.close(self._fd)
        return code


def test_a_conversation_survives_an_answer_that_is_stopped(serve: Serve) -> None:
    stuck, goes_on = threading.Event(), threading.Event()

    def hook(place: int, row: Any) -> None:
        if place == 3 and not goes_on.is_set():
            stuck.set()
            goes_on.wait(DEADLINE_S)

    server = serve(hooked_load(hook, script="abcdefgh"))
    terminal = Terminal("chat", "--base-url", server.url, "--temperature", "0")
    terminal.read("> ")
    terminal.write("first\n")
    assert "abc" in terminal.read("abc")
    assert stuck.wait(DEADLINE_S)
    terminal.interrupt()
    assert "stopped" in terminal.read("> ")
    goes_on.set()
    terminal.write("second\n")
    assert "abcdefgh" in terminal.read("> ")
    terminal.write("/reset\n")
    assert "forgotten" in terminal.read("> ")
    terminal.write("/quit\n")
    assert terminal.wait() == 0


@pytest.mark.parametrize("suffix", ["arrow", "arrows", "parquet"])
def test_rows_are_those_of_the_answer_in_each_format(
    scripted: ServerThread, run: Run, tmp_path: Path, suffix: str
) -> None:
    path = tmp_path / f"rows.{suffix}"
    code, answer, said = run(
        "rows", "hi", "-o", path, "--token-stats", "--temperature", "0", url=scripted.url
    )
    assert (code, answer) == (0, f"{SCRIPT}\n")
    assert said == f"{len(SCRIPT) + 1} rows of 512 logits in {path}\n"
    assert [each.name for each in tmp_path.iterdir()] == [path.name]
    read = read_rows(path)
    result = Client(scripted.url).chat([{"role": "user", "content": "hi"}], temperature=0, token_stats=True)
    assert read.token_ids == result.token_ids
    np.testing.assert_array_equal(np.asarray(read.logits), result.logits)
    assert read.columns["rank"] == result.columns["rank"]
    assert read.response["model"] == "scripted"


def test_rows_of_the_prompt_are_saved_too(scripted: ServerThread, run: Run, tmp_path: Path) -> None:
    path = tmp_path / "rows.arrow"
    options = ["--raw", "--prompt-rows", "--max-tokens", "5", "--logits", "float32"]
    _, _, said = run("rows", "hey", "-o", path, *options, url=scripted.url)
    # A token is a byte, and the first one has no row. A chat template would add some.
    assert said.startswith("7 rows")
    table = pa.ipc.open_file(path).read_all()
    assert table["segment"].to_pylist() == ["prompt"] * 2 + ["content"] * 5
    assert table.schema.field("logits").type.value_type == pa.float32()


def test_an_answer_that_breaks_off_leaves_no_file(serve: Serve, run: Run, tmp_path: Path) -> None:
    def hook(place: int, row: Any) -> None:
        if place == 3:
            raise ValueError("made to fail")

    server = serve(hooked_load(hook))
    code, _, said = run("rows", "hi", "-o", tmp_path / "rows.arrow", url=server.url)
    assert code == 1
    assert said.startswith("logitwire rows: ")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_rows_that_are_stopped_leave_no_file(serve: Serve, tmp_path: Path, number: int, code: int) -> None:
    reached, opened = threading.Event(), threading.Event()

    def hook(place: int, row: Any) -> None:
        if place == 3:
            reached.set()
            assert opened.wait(DEADLINE_S)

    server = serve(hooked_load(hook))
    command = ["-m", "logitwire", "rows", "--base-url", server.url, "hi", "-o", str(tmp_path / "rows.arrow")]
    process = subprocess.Popen([sys.executable, *command], env={**os.environ, "PYTHONPATH": PACKAGE})
    assert reached.wait(DEADLINE_S)
    eventually(lambda: list(tmp_path.iterdir()) != [])
    process.send_signal(number)
    assert process.wait(DEADLINE_S) == code
    opened.set()
    assert list(tmp_path.iterdir()) == []


def test_where_rows_cannot_go_shows_before_they_are_asked_for(run: Run, tmp_path: Path) -> None:
    for path in ("rows.txt", "no/rows.arrow"):
        code, _, said = run("rows", "hi", "-o", tmp_path / path, url="http://127.0.0.1:1")
        assert (code, path in said) == (2, True)


def test_two_saved_answers_are_compared(
    scripted: ServerThread, run: Run, tmp_path: Path, capsys: Any
) -> None:
    one, other = tmp_path / "a.arrows", tmp_path / "b.parquet"
    for path in (one, other):
        run("rows", "hi", "-o", path, "--temperature", "0", url=scripted.url)
    capsys.readouterr()
    assert main(["jsd", str(one), str(other)]) == 0
    assert (
        f"mean over {len(SCRIPT) + 1} positions of the same prefix: 0.000000 bits" in capsys.readouterr().out
    )


TASK = """
task: Write.
iterations: {iterations}
stop: {{patience: 2}}
sampling: {{temperature: 0}}
generator: {{prompt: "{{task}} {{draft}} {{critique}}"}}
critic: {{prompt: "{{draft}}", base_url: {critic_url}}}
"""


def write_task(path: Path, critic_url: str, iterations: int = 6) -> Path:
    path.write_text(TASK.format(critic_url=critic_url, iterations=iterations))
    return path


def texts(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "texts.jsonl").read_text().splitlines()]


def test_a_loop_ends_when_it_has_converged_and_is_saved(
    scripted: ServerThread, serve: Serve, run: Run, tmp_path: Path
) -> None:
    critic = serve(hooked_load(script="Shorter."))
    folder = tmp_path / "run"
    task = write_task(tmp_path / "task.yaml", critic.url)
    code, printed, said = run("loop", task, "-o", folder, url=scripted.url)
    num = len(SCRIPT) + 1
    assert (code, said) == (0, f"saved to {folder}\n")
    assert [line.split()[:4] for line in printed.splitlines()[1:4]] == [
        ["1", str(num), "-", "-"],
        ["2", str(num), str(num), "0.000000"],
        ["3", str(num), str(num), "0.000000"],
    ]
    assert printed.endswith("converged: 2 comparisons in a row are below 0.01\n")
    assert [each["critique"] for each in texts(folder)] == [None, "Shorter.", "Shorter."]
    assert [each["text"] for each in texts(folder)] == [SCRIPT] * 3
    tracker = IterationTracker.load(folder / "iterations.parquet")
    assert tracker.mean_jsd.tolist() == [0, 0]
    assert {"means.png", "iterations.png", "positions-2.png", "positions-3.png", "task.yaml"} <= {
        each.name for each in folder.iterdir()
    }
    code, _, said = run("loop", task, "-o", folder, url=scripted.url)
    assert (code, said) == (2, f"logitwire loop: {folder} is not empty; name another folder\n")


def test_a_loop_that_fails_saves_what_there_is(
    scripted: ServerThread, serve: Serve, run: Run, tmp_path: Path
) -> None:
    num_answers = 0

    def hook(place: int, row: Any) -> None:
        nonlocal num_answers
        num_answers += place == 0
        if num_answers >= 2:
            raise ValueError("made to fail")

    critic = serve(hooked_load(hook))
    task = write_task(tmp_path / "task.yaml", critic.url)
    code, _, said = run(
        "loop", task, "-o", tmp_path / "run", "--no-plots", "--max-tokens", "5", url=scripted.url
    )
    assert (code, said.count("\n")) == (1, 2)
    assert [each["num_tokens"] for each in texts(tmp_path / "run")] == [5, 5]


def test_a_loop_without_an_end_stops_at_its_iterations(
    scripted: ServerThread, run: Run, tmp_path: Path
) -> None:
    task = write_task(tmp_path / "task.yaml", scripted.url, iterations=2)
    code, printed, _ = run("loop", task, url=scripted.url)
    assert code == 0
    assert printed.endswith("not converged in 2 iterations\n")
