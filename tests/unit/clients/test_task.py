"""The YAML file of a loop."""

from pathlib import Path

import pytest

from logitwire.cli.task import filled, read_task

EXAMPLE = Path(__file__).resolve().parents[3] / "clients/python/examples/task.yaml"

LEAST = """
task: Write.
generator: {prompt: "{task} {draft} {critique}"}
critic: {prompt: "{draft}"}
"""


def test_the_example_is_a_task() -> None:
    task = read_task(EXAMPLE)
    assert task.iterations > task.stop.patience
    assert task.critic.base_url is None


def test_what_is_left_out_has_defaults(tmp_path: Path) -> None:
    (tmp_path / "task.yaml").write_text(LEAST)
    task = read_task(tmp_path / "task.yaml")
    assert task.generator.first == "{task}"
    assert (task.stop.threshold, task.stop.patience, task.compare.pairs) == (0.01, 2, "same prefix")


@pytest.mark.parametrize(
    ("added", "message"),
    [
        ("iteration: 3", "unknown key iteration; did you mean iterations?"),
        ("stop: {treshold: 1}", "unknown key stop.treshold; did you mean threshold?"),
        ("iterations: many", "iterations: Expected `int`, got `str`"),
        ("stop: {patience: 0}", "stop.patience: Expected `int` >= 1"),
        ("compare: {base: 10}", "compare.base: Invalid enum value 10"),
        ("sampling: {temprature: 1}", "sampling: unknown field temprature; did you mean temperature?"),
        ("critic: {prompt: '{drat}'}", "critic.prompt: unknown placeholder {drat}; did you mean draft?"),
        (
            "generator: {prompt: x, first: '{draft}'}",
            "generator.first: unknown placeholder {draft}; there are task",
        ),
        ("critic: {}", "critic: Object missing required field `prompt`"),
        ("a: [", "is no YAML"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, added: str, message: str) -> None:
    path = tmp_path / "task.yaml"
    path.write_text(LEAST + added)
    with pytest.raises(ValueError, match=r"task\.yaml") as caught:
        read_task(path)
    assert message in str(caught.value)


def test_a_text_is_filled_in_as_it_is() -> None:
    template = 'JSON such as {"a": {}} stays: {draft}'
    assert filled(template, {"draft": "{task}", "task": "no"}) == 'JSON such as {"a": {}} stays: {task}'
