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

from engine.runner import Chunk
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

    is_batched = True
    capacity_tokens = 0

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
        self._num_prompt: dict[int, int] = {}
        self._num_run: dict[int, int] = {}
        generator = torch.Generator().manual_seed(0)
        self._pool = torch.randn(ROWS_IN_POOL, vocab_size, generator=generator).to(dtype)  # (16, V)
        self.vocab_size = vocab_size
        self.dtype = str(dtype).removeprefix("torch.")
        self.device = torch.device("cpu")

    def open(self, sequence_id: int, token_ids: Sequence[int], *, max_reused: int | None = None) -> int:
        """Remember where the prompt ends; see :class:`engine.runner.Runner`."""
        self._num_prompt.setdefault(sequence_id, len(token_ids))
        self._num_run[sequence_id] = 0
        return 0

    def forward(self, chunks: Sequence[Chunk]) -> Tensor:
        """Return the script's next rows; see :class:`engine.runner.Runner`."""
        rows = []
        for chunk in chunks:
            num_run = self._num_run[chunk.sequence_id] + len(chunk.token_ids)
            rows.append(self._row(max(num_run - self._num_prompt[chunk.sequence_id], 0)))
        # Only now, since a pass that fails must leave everything as it was.
        for chunk in chunks:
            self._num_run[chunk.sequence_id] += len(chunk.token_ids)
        return torch.stack(rows)

    def forward_rows(self, chunks: Sequence[Chunk], keep: Sequence[int]) -> list[Tensor]:
        """Return arbitrary rows for the prompts, and the script's first one behind each."""
        starts = [self._num_run[chunk.sequence_id] for chunk in chunks]
        last = self.forward(chunks)
        rows = []
        for chunk, num, start, behind in zip(chunks, keep, starts, last, strict=True):
            end = start + len(chunk.token_ids)
            # Wherever a chunk ends, the row behind a place is the same.
            places = range(end - num, end if end < self._num_prompt[chunk.sequence_id] else end - 1)
            pooled = [self._pool[(place + 1) % ROWS_IN_POOL] for place in places]
            rows.append(torch.stack([*pooled, behind][:num]))
        return rows

    def close(self, sequence_id: int) -> None:
        """Forget where a sequence was, but not where its prompt ends: it may have to start again."""
        self._num_run.pop(sequence_id, None)

    def recover(self) -> None:
        """Hold nothing that could be given back."""

    def _row(self, place: int) -> Tensor:
        """Return the raw row (V,) at a place of the script."""
        row = self._pool[place % ROWS_IN_POOL].clone()
        token_id = self._script[place] if place < len(self._script) else self._eos_token_id
        row[token_id] = 30.0
        return row
