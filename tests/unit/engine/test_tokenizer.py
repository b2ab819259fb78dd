import pytest
from hypothesis import given
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from engine.errors import InvalidRequestError
from engine.fake import byte_alphabet, byte_tokenizer
from engine.tokenizer import Tokenizer
from tests.fakes import plain_text

TOKENIZER = byte_tokenizer()


def sentencepiece_like() -> Tokenizer:
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁hi", "é"]
    backend = Backend(BPE({piece: place for place, piece in enumerate(pieces)}, [], byte_fallback=True))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>"))


def test_the_alphabet_covers_every_byte_once() -> None:
    assert sorted(byte_alphabet().values()) == list(range(256))


@given(plain_text(30))
def test_bytes_of_tokens_join_to_the_bytes_of_the_text(text: str) -> None:
    assert b"".join(map(TOKENIZER.token_bytes, TOKENIZER.encode(text))) == text.encode()


def test_a_fragment_of_a_character_has_its_own_bytes() -> None:
    ids = TOKENIZER.encode("🚀")
    assert [TOKENIZER.token_bytes(each) for each in ids] == [b"\xf0", b"\x9f", b"\x9a", b"\x80"]
    assert TOKENIZER.token_text(ids[0]) == "\ufffd"


def test_a_special_token_has_the_bytes_of_its_name() -> None:
    assert TOKENIZER.token_bytes(TOKENIZER.eos_token_id) == b"<|im_end|>"
    assert TOKENIZER.is_special(TOKENIZER.eos_token_id)
    assert not TOKENIZER.is_special(ord("a"))


def test_ids_without_a_token_have_no_bytes() -> None:
    assert TOKENIZER.token_bytes(9999) == b""


def test_byte_fallback_pieces_have_one_byte_and_a_lower_line_is_a_space() -> None:
    tokenizer = sentencepiece_like()
    assert tokenizer.token_bytes(1 + 0xE2) == b"\xe2"
    assert tokenizer.token_bytes(258) == b" hi"
    assert tokenizer.token_bytes(259) == "é".encode()


def test_developer_becomes_system_where_the_template_does_not_know_it() -> None:
    as_developer = TOKENIZER.render_chat([{"role": "developer", "content": "x"}])
    assert as_developer == TOKENIZER.render_chat([{"role": "system", "content": "x"}])
    knows_it = byte_tokenizer("{% if messages[0]['role'] == 'developer' %}yes{% endif %}")
    assert knows_it.render_chat([{"role": "developer", "content": "x"}]) == "yes"


@pytest.mark.parametrize(
    ("template", "complaint"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].content / 0 }}", "unsupported operand"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
    ],
)
def test_what_a_template_refuses_is_the_callers_fault(template: str, complaint: str) -> None:
    with pytest.raises(InvalidRequestError, match=complaint):
        byte_tokenizer(template).render_chat([{"role": "user", "content": "x"}])


@pytest.mark.parametrize("name", ["chat_template", "tokenize", "conversation", "add_generation_prompt"])
def test_a_template_variable_cannot_replace_what_is_called(name: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        TOKENIZER.render_chat([{"role": "user", "content": "x"}], template_kwargs={name: "x"})
    assert caught.value.param == f"chat_template_kwargs.{name}"


def test_a_template_variable_reaches_the_template() -> None:
    tokenizer = byte_tokenizer("{{ mood }}")
    assert (
        tokenizer.render_chat([{"role": "user", "content": "x"}], template_kwargs={"mood": "glad"}) == "glad"
    )


def test_no_spaces_are_cleaned_up() -> None:
    text = "x != y and a . b , c ?"
    assert TOKENIZER.decode(TOKENIZER.encode(text)) == text


def test_a_continuation_is_what_the_model_would_write_behind_the_prompt() -> None:
    tokenizer = byte_tokenizer()
    prompt = tokenizer.encode("Grüße<|im_end|>\n")
    assert tokenizer.encode_continuation(prompt, " or more") == tokenizer.encode(" or more")
    assert tokenizer.encode_continuation(prompt, "") == []


def test_no_space_is_put_before_a_continuation() -> None:
    backend = Backend(
        BPE(vocab={"\u2581": 0, "H": 1, "i": 2, "\u2581H": 3, "\n": 4, "a": 5}, merges=[("\u2581", "H")])
    )
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.decoder = decoders.Metaspace(prepend_scheme="never")
    tokenizer = Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend))
    assert tokenizer.encode("Hi") == [3, 2]
    assert tokenizer.encode_continuation([5], "Hi") == [1, 2]
    assert tokenizer.encode_continuation([5], " Hi") == [3, 2]
