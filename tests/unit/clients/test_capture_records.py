"""A capture's file of prompts, and its folder as a kill may leave it."""

from pathlib import Path
from typing import Any

import pytest

from logitwire.capture.folder import MANIFEST, Folder, read_manifest
from logitwire.capture.prompts import Prompt, read_prompts
from logitwire.capture.records import Answer, CaptureError, Failure, Settings, Shard, Source


def settings(**fields: Any) -> Settings:
    return Settings(format="arrow", logits="float16", raw=False, system=None, fields=fields)


def shard(number: int, *ids: str) -> Shard:
    source = Source(model="m", vocab_size=4, source_dtype="float32", wire_dtype="float16", columns=[])
    answers = [
        Answer(id=each, digest=f"of {each}", num_rows=1, texts=["x"], finish_reasons=["stop"], usage={})
        for each in ids
    ]
    return Shard(
        file=f"shard-{number:05}.arrow",
        num_rows=len(ids),
        num_bytes=1,
        sha256="",
        source=source,
        answers=answers,
    )


def prompt(prompt_id: str, digest: str | None = None) -> Prompt:
    return Prompt(prompt_id, "prompt", "x", {}, digest or f"of {prompt_id}")


def add_shard(folder: Folder, *ids: str) -> None:
    (folder.path / folder.next_file()).write_bytes(b"x")
    folder.add_shard(shard(len(folder.shards), *ids))


def test_ids_are_those_of_the_lines_or_their_numbers(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(
        '{"prompt": "one", "seed": 3}\n\n'
        '{"id": "two", "messages": [{"role": "user", "content": "x"}]}\n{"id": 7, "token_ids": [1, 2]}\n'
    )
    prompts = read_prompts(path)
    assert [(each.id, each.kind, dict(each.fields)) for each in prompts] == [
        ("1", "prompt", {"seed": 3}),
        ("two", "messages", {}),
        ("7", "token_ids", {}),
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2: no JSON object"),
        ("[1]", "line 2: no JSON object"),
        ('{"id": "x"}', "it needs exactly one of prompt, messages, token_ids, and has none"),
        ('{"prompt": "x", "token_ids": [1]}', "and has prompt, token_ids"),
        ('{"prompt": ["x"]}', "prompt must be a text"),
        ('{"prompt": "x", "tempreature": 1}', "unknown field tempreature; did you mean temperature?"),
        ('{"prompt": "x", "token_stats": true}', "token_stats shapes the table"),
        ('{"prompt": "x", "id": [1]}', "id must be a text"),
        ('{"prompt": "x", "id": "1"}', "line 2: the id '1' is that of line 1"),
    ],
)
def test_a_line_that_is_no_prompt_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(f'{{"prompt": "fine"}}\n{line}\n')
    with pytest.raises(CaptureError) as caught:
        read_prompts(path)
    assert message in str(caught.value)


def test_what_is_recorded_is_there_again(tmp_path: Path) -> None:
    with Folder.open(tmp_path, settings()) as folder:
        add_shard(folder, "a", "b")
        folder.add_failure(
            Failure(id="c", digest="of c", status=422, code=None, param=None, message="no", request_id=None)
        )
    with Folder.open(tmp_path, settings()) as folder:
        assert set(folder.answers()) == {"a", "b"}
        assert [each.id for each in folder.pending([prompt(each) for each in "abcd"])] == ["d"]
        folder.forget_failures()
        assert [each.id for each in folder.pending([prompt(each) for each in "abcd"])] == ["c", "d"]


@pytest.mark.parametrize("num_lost", [1, 20, 200])
def test_a_line_that_was_cut_does_not_count_and_neither_does_its_shard(tmp_path: Path, num_lost: int) -> None:
    with Folder.open(tmp_path, settings()) as folder:
        add_shard(folder, "a")
        add_shard(folder, "b")
    manifest = tmp_path / MANIFEST
    manifest.write_bytes(manifest.read_bytes()[:-num_lost])
    (tmp_path / ".shard-00002.arrow.1.unfinished").write_bytes(b"x")
    with Folder.open(tmp_path, settings()) as folder:
        assert set(folder.answers()) == {"a"}
        assert not (tmp_path / "shard-00001.arrow").exists()
        add_shard(folder, "b")
    with Folder.open(tmp_path, settings()) as folder:
        assert set(folder.answers()) == {"a", "b"}
    assert {path.name for path in tmp_path.iterdir() if "shard" in path.name} == {
        "shard-00000.arrow",
        "shard-00001.arrow",
    }


def test_a_manifest_that_was_cut_in_its_first_line_begins_anew(tmp_path: Path) -> None:
    (tmp_path / MANIFEST).write_bytes(b'{"kind":"sett')
    with Folder.open(tmp_path, settings()):
        pass
    with Folder.open(tmp_path, settings()) as folder:
        assert folder.shards == []


def test_damage_is_not_taken_for_a_cut(tmp_path: Path) -> None:
    with Folder.open(tmp_path, settings()) as folder:
        add_shard(folder, "a")
        add_shard(folder, "b")
    lines = (tmp_path / MANIFEST).read_bytes().splitlines(keepends=True)
    (tmp_path / MANIFEST).write_bytes(lines[0] + b"{\n" + lines[2])
    with pytest.raises(CaptureError, match="line 2, is damaged"), Folder.open(tmp_path, settings()):
        pass
    (tmp_path / MANIFEST).write_bytes(b"".join(lines))
    (tmp_path / "shard-00000.arrow").unlink()
    with pytest.raises(CaptureError, match=r"shard-00000\.arrow is missing"):
        Folder.open(tmp_path, settings()).__enter__()
    assert (tmp_path / "shard-00001.arrow").exists()


def test_a_folder_with_something_else_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(CaptureError, match=r"it holds thesis\.tex"):
        Folder.open(tmp_path, settings()).__enter__()


def test_two_cannot_work_in_one_folder(tmp_path: Path) -> None:
    with Folder.open(tmp_path, settings()), pytest.raises(CaptureError, match="another capture is at work"):
        Folder.open(tmp_path, settings()).__enter__()
    with Folder.open(tmp_path, settings()):
        pass


def test_other_settings_are_refused_with_what_is_other(tmp_path: Path) -> None:
    with Folder.open(tmp_path, settings(seed=1)) as folder:
        add_shard(folder, "a")
    with pytest.raises(CaptureError, match="seed was 1, and is None now"):
        Folder.open(tmp_path, settings()).__enter__()


def test_settings_may_change_as_long_as_nothing_depends_on_them(tmp_path: Path) -> None:
    for given in (settings(seed=1), settings(seed=2)):
        with Folder.open(tmp_path, given):
            pass
    assert read_manifest(tmp_path) == (settings(seed=2), [])


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([prompt("b")], "'a' is done, and no longer there"),
        ([prompt("a", "other"), prompt("b")], "'a' is done, and is another one now"),
    ],
)
def test_prompts_that_are_done_must_be_the_same(tmp_path: Path, prompts: list[Prompt], message: str) -> None:
    with Folder.open(tmp_path, settings()) as folder:
        add_shard(folder, "a")
        with pytest.raises(CaptureError, match=message):
            folder.pending(prompts)
