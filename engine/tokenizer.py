"""Text to ids and back, for one checkpoint: chat template, encode, decode, bytes of a token.

The only file that calls a Transformers tokenizer. It may be used from several threads at once.
"""

import inspect
import json
import re
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from engine.detokenizer import Detokenizer
from engine.errors import InvalidRequestError


@lru_cache(1)
def byte_alphabet() -> Mapping[str, int]:
    """Return the inverse of GPT-2's table from bytes to printable characters.

    Source: Radford et al. (2019), "Language Models are Unsupervised Multitask Learners", its byte-level BPE:
    printable Latin-1 bytes stand for themselves, the other ones for the characters from 256 upwards.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    table |= {chr(256 + place): byte for place, byte in enumerate(others)}
    return table


# Arguments of the call itself. A template variable of such a name would change what is called, or how.
_OWN_ARGUMENTS = {"messages", *inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters}

# What templates raise over messages that they were not made for.
_TEMPLATE_ERRORS = (
    TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)


CONTEXT_TOKENS = 8
"""Tokens that show how a text reads behind them."""

# Checkpoints add names such as <tool_call> and do not always call them special.
_MARKER = re.compile(r"<\S+>|\[\S+\]")


@dataclass(frozen=True, slots=True, kw_only=True)
class AddedToken:
    """A token beside the learnt vocabulary, and how it is found in a text.

    Attributes:
        content: Its text.
        single_word: Whether it is found as a whole word only.
        lstrip: Whether it swallows blanks before it.
        rstrip: Whether it swallows blanks behind it.
        normalized: Whether it is looked for in the normalised text.
        special: Whether it marks structure.
    """

    content: str
    single_word: bool
    lstrip: bool
    rstrip: bool
    normalized: bool
    special: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerFacts:
    """What kind of tokenizer a checkpoint has.

    Attributes:
        class_name: Of the Transformers class.
        bos_token: Text of the start token.
        eos_token: Text of the end token.
        unk_token: Text of the token for what the vocabulary does not know.
        pad_token: Text of the padding token.
        chat_template: Jinja text; the default one, if there are several.
        added_tokens: By id.
    """

    class_name: str
    bos_token: str | None
    eos_token: str | None
    unk_token: str | None
    pad_token: str | None
    chat_template: str | None
    added_tokens: Mapping[int, AddedToken]


class Tokenizer:
    """A Transformers tokenizer with the few calls that the server needs.

    Attributes:
        vocab_size: One more than the largest id.
        markers: Ids of the tokens that mark structure, by their texts; special ones, and more.
        has_text: Whether ids have texts at all.
    """

    has_text = True

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._lock = threading.Lock()
        vocab = tokenizer.get_vocab()
        self.vocab_size = max(vocab.values()) + 1
        self.bos_token_id: int | None = tokenizer.bos_token_id
        self.eos_token_id: int | None = tokenizer.eos_token_id
        self._backend: Any = getattr(tokenizer, "backend_tokenizer", None)
        added = tokenizer.added_tokens_decoder
        self._added = {token_id: token.content for token_id, token in added.items()}
        self._special_ids = {token.content: token_id for token_id, token in added.items() if token.special}
        self.max_token_length = max(map(len, (*vocab, *self._special_ids)))
        self._special_set = frozenset(self._special_ids.values())
        self.markers = {
            content: token_id
            for token_id, content in self._added.items()
            if token_id in self._special_set or _MARKER.fullmatch(content)
        }
        decoder = "" if self._backend is None else self._backend.to_str()
        kinds = _decoder_kinds(json.loads(decoder).get("decoder")) if decoder else set()
        self._is_byte_level = "ByteLevel" in kinds
        self._is_byte_fallback = "ByteFallback" in kinds or bool(kinds & {"Metaspace"})

    # Text to ids.

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Return the ids of a text.

        Args:
            text: What is spelt like a special token in it becomes that token.
            add_special_tokens: Add what the tokenizer puts around a text, such as a start token. A rendered
                chat carries its own.
        """
        if self._backend is not None:
            # Not through the outer class: it sets truncation on the shared backend at every call, and a
            # decode on the worker thread at that moment would fail.
            # As a batch, since only that lets go of the interpreter lock: a long text would stop everything.
            ids: list[int] = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[
                0
            ].ids
            return ids
        with self._lock:
            return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens))

    def encode_continuation(self, prompt_token_ids: Sequence[int], text: str) -> list[int]:
        """Return the ids of a text that continues a prompt, as the model would write them behind it.

        The prompt's own ids stay as they are, even where another token would span the border. What a
        tokenizer puts before a text of its own, such as a space, is left out.
        """
        ids = self.encode(text)
        last = list(prompt_token_ids[-CONTEXT_TOKENS:])
        before = self.decode(last, skip_special_tokens=False)
        if self.decode(last + ids, skip_special_tokens=False) == before + text:
            return ids
        # Behind a line end nothing is put, and few tokens span one.
        anchor = self.encode("\n")
        behind = self.encode("\n" + text)
        if behind[: len(anchor)] == anchor:
            other = behind[len(anchor) :]
            if self.decode(last + other, skip_special_tokens=False) == before + text:
                return other
        return ids

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """Render messages by the checkpoint's own chat template, special tokens and all.

        The role ``developer`` is rendered as ``system`` where the template does not know it.

        Args:
            messages: Role, content and what else templates look at.
            add_generation_prompt: End with the beginning of an answer.
            continue_final_message: Leave the last message open.
            tools: JSON schemas of functions, for templates that offer them.
            chat_template: Jinja text to use in place of the checkpoint's.
            template_kwargs: Further variables of the template.

        Raises:
            InvalidRequestError: There is no template, or it refuses these messages.
        """
        for name in template_kwargs or {}:
            if name in _OWN_ARGUMENTS:
                raise InvalidRequestError(
                    "this is no variable of the template", f"chat_template_kwargs.{name}"
                )
        template = chat_template or self._tokenizer.chat_template
        if template is None:
            raise InvalidRequestError("the model has no chat template; use a completion", "messages")
        if "developer" not in str(template):
            messages = [
                {**message, "role": "system"} if message["role"] == "developer" else message
                for message in messages
            ]
        try:
            with self._lock:
                text = self._tokenizer.apply_chat_template(
                    [dict(message) for message in messages],
                    tokenize=False,
                    add_generation_prompt=add_generation_prompt,
                    continue_final_message=continue_final_message,
                    tools=None if tools is None else list(tools),
                    chat_template=chat_template,
                    **(template_kwargs or {}),
                )
        except _TEMPLATE_ERRORS as error:
            owner, param = ("model's", "messages") if chat_template is None else ("given", "chat_template")
            raise InvalidRequestError(
                f"the {owner} chat template refuses these messages: {error}", param
            ) from error
        return str(text)

    @property
    def chat_template(self) -> str:
        """The Jinja text of the checkpoint's chat template; of all of them, if it has several."""
        template = self._tokenizer.chat_template
        if isinstance(template, dict):
            return "\n".join(template.values())
        return template or ""

    def facts(self) -> TokenizerFacts:
        """Return what kind of tokenizer this is."""
        tokenizer = self._tokenizer
        template = tokenizer.chat_template
        return TokenizerFacts(
            class_name=type(tokenizer).__name__,
            bos_token=tokenizer.bos_token,
            eos_token=tokenizer.eos_token,
            unk_token=tokenizer.unk_token,
            pad_token=tokenizer.pad_token,
            chat_template=template.get("default") if isinstance(template, dict) else template,
            added_tokens={
                token_id: AddedToken(
                    content=token.content,
                    single_word=token.single_word,
                    lstrip=token.lstrip,
                    rstrip=token.rstrip,
                    normalized=token.normalized,
                    special=token.special,
                )
                for token_id, token in tokenizer.added_tokens_decoder.items()
            },
        )

    def special_token_id(self, text: str) -> int | None:
        """Return the id of the special token that is spelt exactly so, if there is one."""
        return self._special_ids.get(text)

    def is_special(self, token_id: int) -> bool:
        """Tell whether a token marks structure, such as the end of a turn, and is no text."""
        return token_id in self._special_set

    # Ids to text.

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of ids, with no clean-up of spaces; broken UTF-8 becomes U+FFFD."""
        if self._backend is not None:
            text: str = self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
            return text
        with self._lock:
            return str(
                self._tokenizer.decode(
                    list(token_ids),
                    skip_special_tokens=skip_special_tokens,
                    clean_up_tokenization_spaces=False,
                )
            )

    def detokenizer(self, *, skip_special_tokens: bool) -> Detokenizer:
        """Return a fresh incremental decoder."""
        return Detokenizer(lambda ids: self.decode(ids, skip_special_tokens=skip_special_tokens))

    def texts(self, token_ids: Sequence[int]) -> list[str]:
        """Return the own text of each token, special ones included, such that they join to the full decode.

        The last token of a split character has the character, those before it have no text.
        """
        detokenizer = self.detokenizer(skip_special_tokens=False)
        texts = [detokenizer.push(token_id) for token_id in token_ids]
        if rest := detokenizer.flush():
            texts[-1] += rest
        return texts

    def pieces(self, token_ids: Sequence[int]) -> list[str]:
        """Return how the vocabulary spells each token; ids without a token have an empty piece."""
        return [piece or "" for piece in self._tokenizer.convert_ids_to_tokens(list(token_ids))]

    def token_bytes(self, token_id: int) -> bytes:
        """Return the token's own UTF-8 bytes, which may be a fragment of a character.

        Ids without a token, such as padding rows of the head or -1, have none.
        """
        if token_id in self._added:
            return str(self._added[token_id]).encode()
        is_known = 0 <= token_id < self.vocab_size
        piece = self._tokenizer.convert_ids_to_tokens(token_id) if is_known else None
        if not isinstance(piece, str):
            return b""
        if self._is_byte_level:
            table = byte_alphabet()
            if all(character in table for character in piece):
                return bytes(table[character] for character in piece)
        if self._is_byte_fallback:
            if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
                return bytes([int(piece[3:5], 16)])
            return piece.replace("\u2581", " ").encode()
        return self.decode([token_id], skip_special_tokens=False).encode()

    def token_text(self, token_id: int) -> str:
        """Return the token's bytes as text, with U+FFFD where they are no whole character."""
        return self.token_bytes(token_id).decode(errors="replace")


def _decoder_kinds(decoder: Mapping[str, Any] | None) -> set[str]:
    """Return the types of a backend's decoder and of those nested in it."""
    if decoder is None:
        return set()
    kinds = {str(decoder.get("type"))}
    for inner in decoder.get("decoders", ()):
        kinds |= _decoder_kinds(inner)
    return kinds
