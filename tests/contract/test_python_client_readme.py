"""The examples of the Python client's README run, one behind the other."""

import re
from pathlib import Path
from typing import Any

import pytest

import logitwire
from tests.serving import ServerThread

README = Path(__file__).resolve().parents[2] / "clients/python/README.md"


def test_the_examples_of_the_readme_run(
    scripted: ServerThread,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"^```python\n(.*?)^```$", README.read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) == 6
    names: dict[str, Any] = {}
    for block in blocks:
        exec(block.replace("http://127.0.0.1:8000", scripted.url), names)
    assert names["answer"].text == "Hello fr"
    assert names["rows"].result.token_ids == [*b"Hello fr"]
    assert (tmp_path / "answer.parquet").stat().st_size > 0
    assert "0 H" in capsys.readouterr().out


def test_every_method_is_in_the_readme() -> None:
    text = README.read_text()
    for kind in (logitwire.Client, logitwire.AsyncClient):
        for name in vars(kind):
            assert name.startswith("_") or f"{name}(" in text or f"`{name}`" in text, name
