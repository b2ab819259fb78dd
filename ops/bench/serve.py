"""The server over HTTP against ``generate`` in this process: the same model, dtype and threads."""

import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from engine.config import EngineConfig
from engine.loading import embedded_checkpoint
from logitwire import Client
from ops.bench.bars import Bar, interleaved, seconds
from ops.process import ServerProcess

MESSAGES = [{"role": "user", "content": "Write a long story about a lighthouse."}]
NUM_TOKENS = 48


def run(threads: int) -> list[Bar]:
    """Measure solo decoding with and without rows."""
    torch.set_num_threads(threads)
    reference = Reference()
    with tempfile.TemporaryDirectory() as folder:
        server = ServerProcess(Path(folder) / "log", THREADS=str(threads))
        try:
            client = Client(server.url)

            def served(*, rows: bool) -> float:
                options = {"logits": "float16" if rows else None, "ignore_eos": True}
                return NUM_TOKENS / seconds(
                    lambda: client.chat(MESSAGES, max_tokens=NUM_TOKENS, temperature=0, **options)  # type: ignore[arg-type]
                )

            with_rows, without, generate_rows, generate = interleaved(
                [
                    lambda: served(rows=True),
                    lambda: served(rows=False),
                    lambda: reference.tokens_per_s(output_logits=True),
                    lambda: reference.tokens_per_s(output_logits=False),
                ]
            )
        finally:
            server.stop()
    return [
        Bar(
            "solo decode, rows to a client",
            with_rows / generate_rows,
            1.0,
            False,
            "x",
            f"{with_rows:.1f} tokens/s, generate {generate_rows:.1f}",
        ),
        Bar(
            "cost of asking for rows",
            (without / with_rows - 1) * 100,
            5,
            True,
            " %",
            f"{without:.1f} tokens/s without rows",
        ),
        Bar(
            "cost of the server, no rows",
            (generate / without - 1) * 100,
            3,
            True,
            " %",
            f"generate {generate:.1f} tokens/s",
        ),
    ]


class Reference:
    """``generate`` on the embedded model, in this process."""

    def __init__(self) -> None:
        path = embedded_checkpoint(EngineConfig.cache_dir)
        self._model = AutoModelForCausalLM.from_pretrained(path).eval()
        self._model.generation_config.eos_token_id = None
        self._inputs = AutoTokenizer.from_pretrained(path).apply_chat_template(
            MESSAGES, add_generation_prompt=True, return_dict=True, return_tensors="pt"
        )

    def tokens_per_s(self, *, output_logits: bool) -> float:
        """Return the rate of one greedy generation."""
        return NUM_TOKENS / seconds(
            lambda: self._model.generate(
                **self._inputs,
                max_new_tokens=NUM_TOKENS,
                do_sample=False,
                output_logits=output_logits,
                return_dict_in_generate=True,
            )
        )
