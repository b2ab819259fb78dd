"""What stands in for a tokenizer on a server that takes and gives ids only."""

from collections.abc import Mapping, Sequence
from typing import Any

from engine.detokenizer import Detokenizer
from engine.errors import InvalidRequestError
from engine.tokenizer import Tokenizer, TokenizerFacts

WHY = "this server works on token ids only (SKIP_TOKENIZER)"


class NoTokenizer(Tokenizer):
    """Knows how many ids there are, and refuses whatever takes a text."""

    has_text = False

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.bos_token_id = None
        self.eos_token_id = None
        self.max_token_length = 1
        self.markers = {}

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Refuse; there is nothing to encode with."""
        raise InvalidRequestError(WHY)

    def render_chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
        """Refuse; there is no template."""
        raise InvalidRequestError(WHY, "messages")

    @property
    def chat_template(self) -> str:
        """None at all."""
        return ""

    def facts(self) -> TokenizerFacts:
        """Refuse; there is nothing to describe."""
        raise InvalidRequestError(WHY)

    def special_token_id(self, text: str) -> int | None:
        """No id has a name."""
        return None

    def is_special(self, token_id: int) -> bool:
        """No id is known to mark structure."""
        return False

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Refuse; there is nothing to decode with."""
        raise InvalidRequestError(WHY)

    def detokenizer(self, *, skip_special_tokens: bool) -> Detokenizer:
        """Return a decoder to no text at all, which nobody looks at where ids alone are given out."""
        return Detokenizer(lambda _: "")

    def token_bytes(self, token_id: int) -> bytes:
        """No id has bytes."""
        return b""

    def token_text(self, token_id: int) -> str:
        """Return the id in words, since an empty text would be a lie."""
        return f"token_id:{token_id}"
