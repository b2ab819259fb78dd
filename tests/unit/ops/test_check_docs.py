import pytest

from ops.check_docs import faults_of, with_tables
from service.settings import settings_table


def test_the_table_is_written_between_its_marks_and_nothing_else_changes() -> None:
    text = "before\n<!-- settings -->\nan outdated row\n<!-- /settings -->\nafter\n"
    written = with_tables(text)
    assert written.startswith("before\n<!-- settings -->")
    assert written.endswith("<!-- /settings -->\nafter\n")
    assert settings_table() in written
    assert "outdated" not in written
    assert with_tables(written) == written
    assert faults_of("README.md", text, set()) == [
        "README.md: a table of settings is old; run python -m ops.check_docs --fix"
    ]


def test_the_launchers_variables_have_a_table_of_their_own() -> None:
    written = with_tables("<!-- launch -->\n<!-- /launch -->\n")
    assert "| `WALL_TIME` | `0` |" in written
    assert "MODEL_NAME" not in written


def test_a_missing_mark_is_said_and_loses_no_text() -> None:
    with pytest.raises(ValueError, match="substring"):
        with_tables("<!-- settings -->\nthe rest of the document")


def test_paths_and_recipes_that_are_not_there_are_found() -> None:
    text = "See `engine/worker.py` and `engine/nothing.py`; run `just serve` or `just fly`."
    assert faults_of("x.md", text, {"serve"}) == [
        "x.md: no such path: engine/nothing.py",
        "x.md: no such recipe: fly",
    ]
