"""The text that a person sees while an answer comes."""

import io

import pytest

from logitwire.cli.visible import VisibleText, harmless
from logitwire.results import Row


def row(token: bytes) -> Row:
    return Row(0, 0, "content", 1, "", token, 0.0, None, {}, None)


def shown(tokens: list[bytes], stops: list[str], text: str) -> list[str]:
    visible = VisibleText(stops)
    return [*(visible.add(row(token)) for token in tokens), visible.rest(text)]


def test_half_a_character_waits_for_its_other_half() -> None:
    rocket = "🚀".encode()
    assert shown([b"a", rocket[:2], rocket[2:], b"b"], [], "a🚀b") == ["a", "", "🚀", "b", ""]


def test_half_a_character_at_the_end_is_what_the_server_makes_of_it() -> None:
    assert shown([b"a", "🚀".encode()[:2]], [], "a\ufffd") == ["a", "", "\ufffd"]


def test_what_may_become_a_stop_string_waits_until_it_cannot() -> None:
    tokens = [b"one", b" E", b"ND", b"E", b"D"]
    assert shown(tokens, ["END."], "one ENDED") == ["one", " ", "", "END", "ED", ""]


@pytest.mark.parametrize("tokens", [[b"one END"], [b"one ", b"E", b"N", b"D"], [b"one E", b"ND more"]])
def test_a_stop_string_is_never_shown(tokens: list[bytes]) -> None:
    assert "".join(shown(tokens, ["x", "END"], "one ")) == "one "


@pytest.mark.parametrize(("is_terminal", "expected"), [(True, "a\ufffd[2J\tb\n"), (False, "a\x1b[2J\tb\n")])
def test_a_model_cannot_steer_a_terminal(
    monkeypatch: pytest.MonkeyPatch, is_terminal: bool, expected: str
) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(stream, "isatty", lambda: is_terminal)
    assert harmless("a\x1b[2J\tb\n", stream) == expected
