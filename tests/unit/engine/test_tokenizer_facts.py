"""What a tokenizer says of itself, and how its vocabulary spells tokens."""

from engine.fake import CHAT_TEMPLATE, SPECIAL_TOKENS, byte_tokenizer
from engine.tokenizer import Tokenizer


def test_facts_name_the_special_tokens_and_how_they_are_found() -> None:
    facts = byte_tokenizer().facts()
    assert (facts.bos_token, facts.eos_token, facts.pad_token) == (None, "<|im_end|>", "<|im_end|>")
    assert facts.chat_template == CHAT_TEMPLATE
    assert [token.content for _, token in sorted(facts.added_tokens.items())] == list(SPECIAL_TOKENS)
    assert all(token.special and not token.lstrip for token in facts.added_tokens.values())


def test_of_several_templates_the_default_one_is_named() -> None:
    def template_of(templates: dict[str, str]) -> str | None:
        tokenizer = byte_tokenizer()._tokenizer
        tokenizer.chat_template = templates
        return Tokenizer(tokenizer).facts().chat_template

    assert template_of({"tool_use": "a", "default": "b"}) == "b"
    assert template_of({"tool_use": "a"}) is None


def test_pieces_are_the_vocabularys_and_ids_without_a_token_have_none() -> None:
    assert byte_tokenizer().pieces([97, 32, 258, 9999]) == ["a", "Ġ", "<|im_end|>", ""]
