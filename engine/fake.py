"""A scripted model and a byte tokenizer with the real interfaces: for tests, and for `just serve-fake`.

The rows are pseudo-random but deterministic, and the scripted token is the argmax of each.
"""

from collections.abc import Sequence

import torch
from tokenizers import AddedToken, decoders, pre_tokenizers
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from engine.tokenizer import Tokenizer, byte_alphabet

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>")
EOS_TOKEN = "<|im_end|>"  # noqa: S105 - the name of a token, no secret

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

ROWS_IN_POOL = 16


def byte_tokenizer(chat_template: str = CHAT_TEMPLATE) -> Tokenizer:
    """Return a tokenizer with one token a byte, ids 0-255, and a few special tokens behind them."""
    vocab = {character: byte for character, byte in byte_alphabet().items()}
    backend = Backend(BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    return Tokenizer(
        PreTrainedTokenizerFast(
            tokenizer_object=backend, eos_token=EOS_TOKEN, pad_token=EOS_TOKEN, chat_template=chat_template
        )
    )


class ScriptedRunner:
    """Says the same ids to every prompt, then its end token for ever."""

    def __init__(
        self,
        script: Sequence[int],
        *,
        eos_token_id: int,
        vocab_size: int,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self._script = list(script)
        self._eos_token_id = eos_token_id
        self._places: dict[int, int] = {}
        generator = torch.Generator().manual_seed(0)
        self._pool = torch.randn(ROWS_IN_POOL, vocab_size, generator=generator).to(dtype)  # (16, V)
        self.vocab_size = vocab_size
        self.dtype = str(dtype).removeprefix("torch.")
        self.device = torch.device("cpu")

    def prefill(self, sequence_id: int, token_ids: Sequence[int]) -> Tensor:
        """Begin the script; see :class:`engine.runner.Runner`."""
        self._places[sequence_id] = 0
        return self._row(0)

    def decode(self, sequence_id: int, token_id: int) -> Tensor:
        """Go on in the script; see :class:`engine.runner.Runner`."""
        self._places[sequence_id] += 1
        return self._row(self._places[sequence_id])

    def release(self, sequence_id: int) -> None:
        """Forget where a sequence was."""
        self._places.pop(sequence_id, None)

    def recover(self) -> None:
        """Hold nothing that could be given back."""

    def _row(self, place: int) -> Tensor:
        """Return the raw row (V,) at a place of the script."""
        row = self._pool[place % ROWS_IN_POOL].clone()
        token_id = self._script[place] if place < len(self._script) else self._eos_token_id
        row[token_id] = 30.0
        return row
