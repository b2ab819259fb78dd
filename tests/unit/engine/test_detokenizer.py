from hypothesis import given
from hypothesis import strategies as st

from engine.fake import byte_tokenizer
from tests.fakes import plain_text

TOKENIZER = byte_tokenizer()


def pieces(ids: list[int]) -> list[str]:
    detokenizer = TOKENIZER.detokenizer(skip_special_tokens=True)
    return [detokenizer.push(each) for each in ids] + [detokenizer.flush()]


@given(plain_text(40))
def test_pieces_join_to_the_text(text: str) -> None:
    assert "".join(pieces(TOKENIZER.encode(text))) == text


@given(st.lists(st.integers(0, 260), max_size=40))
def test_pieces_of_any_ids_join_to_their_full_decode(ids: list[int]) -> None:
    assert "".join(pieces(ids)) == TOKENIZER.decode(ids)


def test_half_a_character_waits_for_its_rest() -> None:
    assert pieces(TOKENIZER.encode("a🚀b")) == ["a", "", "", "", "🚀", "b", ""]


def test_half_a_character_at_the_end_is_flushed_as_u_fffd() -> None:
    assert pieces(TOKENIZER.encode("a🚀")[:3]) == ["a", "", "", "\ufffd"]


def test_a_real_u_fffd_at_the_end_is_not_lost() -> None:
    assert "".join(pieces(TOKENIZER.encode("a\ufffd"))) == "a\ufffd"
