"""A scripted model that listens: what it says depends on what the prompt says last.

So one server can hold a conversation with tools, and what is rendered into the prompt is tested with it.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from engine.config import EngineConfig
from engine.engine import Load
from engine.fake import ScriptedRunner, byte_tokenizer
from engine.runner import Chunk
from engine.types import ModelInfo
from engine.worker import Model

VOCAB_SIZE = 300
MODEL = "replying"

GREETING = "Hello from the scripted model. 🚀"
RESULT = "18 degrees"

REPLIES = {
    "": GREETING,
    "Think.": "<think>Two and two.</think>It is 4.",
    "One call.": '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>',
    "Two calls.": 'Sure.<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "get_time", "arguments": {"zone": "CET"}}\n</tool_call>',
    # The result of a call, as it is rendered into the prompt.
    f"<tool_response>\n{RESULT}": "It is 18 degrees in Oslo.",
    "An event.": '{"name": "Fair", "days": [5, 6]}',
    "A call for an event.": '<tool_call>\n{"name": "Event", "arguments": {"name": "Fair", "days": [5, 6]}}\n'
    "</tool_call>",
}
"""What is said where the prompt has this text last."""

TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"Look up by {argument}.",
            "parameters": {
                "type": "object",
                "properties": {argument: {"type": "string"}},
                "required": [argument],
                "additionalProperties": False,
            },
        },
    }
    for name, argument in (("get_weather", "city"), ("get_time", "zone"))
]


class ReplyingRunner(ScriptedRunner):
    """Says to each prompt the reply to the text that it has last."""

    def __init__(self, replies: Mapping[str, Sequence[int]], *, eos_token_id: int) -> None:
        super().__init__([], eos_token_id=eos_token_id, vocab_size=VOCAB_SIZE)
        self._replies = replies
        self._chosen: dict[int, Sequence[int]] = {}

    def open(self, sequence_id: int, token_ids: Sequence[int], *, max_reused: int | None = None) -> int:
        prompt = bytes(each for each in token_ids if each < 256).decode()
        last = max(self._replies, key=lambda text: prompt.rfind(text) if text else 0)
        self._chosen.setdefault(sequence_id, self._replies[last])
        return super().open(sequence_id, token_ids, max_reused=max_reused)

    def forward(self, chunks: Sequence[Chunk]) -> torch.Tensor:
        rows = []
        for chunk in chunks:
            self._script = list(self._chosen[chunk.sequence_id])
            rows.append(super().forward([chunk]))
        return torch.cat(rows)


def replying_load() -> Load:
    """Return a loader of the model."""

    def load(config: EngineConfig) -> tuple[Model, ModelInfo]:
        tokenizer = byte_tokenizer()
        eos = tokenizer.eos_token_id
        assert eos is not None
        replies = {text: tokenizer.encode(reply) for text, reply in REPLIES.items()}
        runner = ReplyingRunner(replies, eos_token_id=eos)
        info = ModelInfo(
            name=MODEL,
            vocab_size=VOCAB_SIZE,
            tokenizer_vocab_size=tokenizer.vocab_size,
            dtype=runner.dtype,
            max_model_len=8192,
        )
        return Model(runner, tokenizer, frozenset({eos}), info.max_model_len), info

    return load
