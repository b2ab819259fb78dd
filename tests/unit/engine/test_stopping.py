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
    ids: list[int],
    *,
    stop: tuple[str, ...] = (),
    stop_token_ids: tuple[int, ...] = (),
    max_tokens: int = 99,
    min_tokens: int = 0,
    include_stop: bool = False,
) -> tuple[list[str], Stopped | None]:
    checker = StopChecker(
        TOKENIZER.detokenizer(skip_special_tokens=True),
        eos_token_ids={EOS},
        stop_token_ids={each: each for each in stop_token_ids},
        stop=stop,
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        include_stop=include_stop,
    )
    shown: list[str] = []
    for num, token_id in enumerate(ids, 1):
        texts, stopped = checker.push(token_id)
        shown += texts
        assert len(shown) <= num
        if stopped is not None:
            assert len(shown) == num
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


def test_each_token_has_its_own_text_however_long_it_was_held_back() -> None:
    assert run([*TOKENIZER.encode("GELB"), EOS], stop=("GELB\nZ",))[0] == ["G", "E", "L", "B", ""]
    assert run([*TOKENIZER.encode("ab🚀"), EOS])[0] == ["a", "b", "", "", "", "🚀", ""]
    assert run([*TOKENIZER.encode("a🚀")[:3], EOS])[0] == ["a", "", "\ufffd", ""]


def test_text_waits_as_whole_tokens_and_no_longer_than_it_must() -> None:
    checker = StopChecker(
        TOKENIZER.detokenizer(skip_special_tokens=True),
        eos_token_ids={EOS},
        stop_token_ids={},
        stop=("bcd",),
        max_tokens=99,
    )
    texts = [checker.push(token_id)[0] for token_id in TOKENIZER.encode("abcx")]
    assert texts == [("a",), (), (), ("b", "c", "x")]


def test_a_skipped_special_token_is_given_out_at_once_and_alone() -> None:
    think = TOKENIZER.special_token_id("<think>")
    assert think is not None
    checker = StopChecker(
        TOKENIZER.detokenizer(skip_special_tokens=True),
        eos_token_ids={EOS},
        stop_token_ids={},
        stop=(),
        max_tokens=99,
    )
    assert [checker.push(each)[0] for each in (ord("a"), think, ord("b"))] == [("a",), ("",), ("b",)]


def test_the_stop_string_is_kept_where_it_is_wanted() -> None:
    shown, stopped = run(TOKENIZER.encode("one two"), stop=(" tw",), include_stop=True)
    assert "".join(shown) == "one tw"
    assert stopped == Stopped(FinishReason.STOP, " tw")
    shown, _ = run(TOKENIZER.encode("abc"), stop_token_ids=(ord("c"),), include_stop=True)
    assert shown == ["a", "b", "c"]


def test_stop_strings_do_not_count_before_the_least_number_of_tokens() -> None:
    shown, stopped = run(TOKENIZER.encode("ababab"), stop=("b",), min_tokens=3)
    assert "".join(shown) == "aba"
    assert stopped == Stopped(FinishReason.STOP, "b")


@given(
    st.lists(st.integers(0, 260), max_size=30),
    st.lists(st.sampled_from(["a", "ab", "\x00", "🚀", "b\ufffd"]), max_size=3),
    st.integers(1, 30),
    st.integers(0, 5),
    st.booleans(),
)
def test_every_token_is_given_out_once_and_the_texts_join(
    ids: list[int], stop: list[str], max_tokens: int, min_tokens: int, include_stop: bool
) -> None:
    shown, stopped = run(
        ids, stop=tuple(stop), max_tokens=max_tokens, min_tokens=min_tokens, include_stop=include_stop
    )
    text = "".join(shown)
    assert TOKENIZER.decode(ids).startswith(text) or (stopped is not None and text.endswith("\ufffd"))
    if stopped is not None and stopped.stop_reason in stop and include_stop:
        assert text.endswith(str(stopped.stop_reason))
