"""Every example of API.md, run as a reader runs it, and what the page shows of the answer."""

import json
import re
import subprocess
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest

from ops.process import ROOT, ServerProcess

PAGE = (ROOT / "API.md").read_text(encoding="utf-8")
BLOCKS = [
    (match[1], match[2], PAGE[: match.start()].count("\n") + 1)
    for match in re.finditer(r"^```(\w+)\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
]
COMMANDS = [
    pytest.param(text, shown[:2], id=f"line-{line}")
    for (kind, text, line), shown in zip(BLOCKS, [*BLOCKS[1:], ("", "", 0)], strict=True)
    if kind == "sh"
]
PROGRAMS = [pytest.param(text, id=f"line-{line}") for kind, text, line in BLOCKS if kind == "python"]
HOST = "127.0.0.1:8000"

pytestmark = [pytest.mark.model, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def netloc(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    process = ServerProcess(tmp_path_factory.mktemp("page") / "log", THREADS="1")
    yield urlsplit(process.url).netloc
    assert process.stop() == 0


def check_part(shown: Any, found: Any, where: str = "") -> None:
    """Hold what a page shows against an answer: a part of it, numbers to 0.02, strings up to a ``…``."""
    if isinstance(shown, dict):
        for name, value in shown.items():
            assert name in found, f"{where}.{name} is not in the answer"
            check_part(value, found[name], f"{where}.{name}")
    elif isinstance(shown, list):
        assert len(shown) <= len(found), where
        for place, value in enumerate(shown):
            check_part(value, found[place], f"{where}[{place}]")
    elif isinstance(shown, float):
        assert found == pytest.approx(shown, abs=0.02), where
    elif isinstance(shown, str) and shown.endswith("…"):
        assert found.startswith(shown[:-1]), where
    else:
        assert (found, type(found)) == (shown, type(shown)), where


def events(text: str) -> list[Any]:
    """Return what stands behind each ``data:``."""
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


@pytest.mark.parametrize(("command", "shown"), COMMANDS)
def test_a_command_answers_as_the_page_shows(netloc: str, command: str, shown: tuple[str, str]) -> None:
    assert HOST in command
    output = subprocess.run(
        ["sh", "-ec", command.replace(HOST, netloc)], capture_output=True, check=True, text=True
    ).stdout
    kind, text = shown
    if kind == "text":
        check_part(events(text), events(output))
        assert len(events(text)) == len(events(output))
    elif kind == "json":
        check_part(json.loads(text), json.loads(output))
    else:
        assert json.loads(json.loads(output)["choices"][0]["message"]["content"]) == {"verdict": "yes"}


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_runs(netloc: str, program: str) -> None:
    host, port = netloc.split(":")
    names: dict[str, Any] = {}
    exec(program.replace(HOST, netloc).replace(f'"{host}", 8000', f'"{host}", {port}'), names)
    for name in {"sdk", "connection"} & set(names):
        names[name].close()
    if "logits" in names:
        assert names["logits"].shape == (len(names["table"]), 49152)
        assert names["logits"].dtype.name == "float16"
    else:
        assert len(names["answer"].choices[0].logits["data"]) == 4


def test_the_page_has_examples_of_each_kind() -> None:
    assert len(COMMANDS) >= 15
    assert len(PROGRAMS) == 2
