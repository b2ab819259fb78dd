import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.fake import byte_tokenizer
from engine.stopping import StopChecker, Stopped, StopStrings
from engine.types import FinishReason

TOKENIZER = byte_tokenizer()
EOS = TOKENIZER.eos_token_id
assert EOS is not None


def run(
    ids: list[int], *, stop: tuple[str, ...] = (), stop_token_ids: tuple[int, ...] = (), max_tokens: int = 99
) -> tuple[list[str], Stopped | None]:
    checker = StopChecker(
        TOKENIZER.detokenizer(skip_special_tokens=True),
        eos_token_ids={EOS},
        stop_token_ids={each: each for each in stop_token_ids},
        stop=stop,
        max_tokens=max_tokens,
    )
    shown = []
    for token_id in ids:
        text, stopped = checker.push(token_id)
        shown.append(text)
        if stopped is not None:
            return shown, stopped
    return shown, None


short = st.text(alphabet="ab", min_size=1, max_size=4)


@given(st.lists(short, max_size=12), st.lists(short, max_size=3))
def test_text_is_cut_at_the_earliest_stop_however_it_arrives(parts: list[str], stop: list[str]) -> None:
    stop_strings, shown, found = StopStrings(stop), "", None
    for part in parts:
        text, found = stop_strings.push(part)
        shown += text
        if found is not None:
            break
    whole = "".join(parts)
    starts = [at for each in stop if (at := whole.find(each)) >= 0]
    if starts:
        # What is shown never contains a stop; where it was cut, one begins.
        assert whole.startswith(shown)
        assert not any(each in shown for each in stop)
        assert found is not None
        assert whole.startswith(found, len(shown))
    else:
        assert found is None
        assert shown + stop_strings.flush() == whole


@pytest.mark.parametrize(
    ("text", "stop", "expected"),
    [
        ("one two three", ("two",), "one "),
        ("END]]\n", ("END]]", "END]]\n"), ""),
        ("a...b", ("..",), "a"),
        ("Wed, Thursday, Fri", ("Thursday",), "Wed, "),
        ("喵🚀🚀", ("🚀🚀",), "喵"),
    ],
)
def test_nothing_of_a_stop_string_is_shown(text: str, stop: tuple[str, ...], expected: str) -> None:
    shown, stopped = run(TOKENIZER.encode(text), stop=stop)
    assert "".join(shown) == expected
    assert stopped is not None
    assert stopped.reason is FinishReason.STOP
    assert stopped.stop_reason in stop


def test_text_held_back_for_a_stop_is_flushed_at_the_end_token() -> None:
    shown, stopped = run([*TOKENIZER.encode("GELB"), EOS], stop=("GELB\nZZZZ",))
    assert "".join(shown) == "GELB"
    assert stopped == Stopped(FinishReason.STOP, None)


def test_text_held_back_for_a_stop_is_flushed_at_the_length() -> None:
    shown, stopped = run(TOKENIZER.encode("GELB"), stop=("B\nQ",), max_tokens=4)
    assert "".join(shown) == "GELB"
    assert stopped == Stopped(FinishReason.LENGTH, None)


def test_half_a_character_is_flushed_at_the_length() -> None:
    shown, stopped = run(TOKENIZER.encode("a🚀"), max_tokens=3)
    assert "".join(shown) == "a\ufffd"
    assert stopped == Stopped(FinishReason.LENGTH, None)


def test_a_stop_string_that_ends_with_the_last_token_wins_over_the_length() -> None:
    shown, stopped = run(TOKENIZER.encode("ab"), stop=("b",), max_tokens=2)
    assert "".join(shown) == "a"
    assert stopped == Stopped(FinishReason.STOP, "b")


def test_a_stop_token_id_is_named_and_its_text_is_not_shown() -> None:
    shown, stopped = run(TOKENIZER.encode("abc"), stop_token_ids=(ord("c"),))
    assert "".join(shown) == "ab"
    assert stopped == Stopped(FinishReason.STOP, ord("c"))
