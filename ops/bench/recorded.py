"""An Arrow answer as the server's own writer makes it, without a server."""

from functools import cache

import numpy as np

from engine.fake import byte_tokenizer
from engine.segments import Segment
from engine.types import ModelInfo, RowDtype, TokenEvent
from ops.bench.transport_server import VOCAB_SIZE
from schemas.chat import AssistantMessage, ChatChoice, ChatCompletion
from schemas.logits import PromptTokensDetails, Usage
from service.arrow import RowWriter
from service.convert.choice import Token
from service.convert.plan import Plan


def _plan() -> Plan:
    info = ModelInfo(
        name="x", vocab_size=VOCAB_SIZE, tokenizer_vocab_size=261, dtype="float32", max_model_len=4096
    )
    return Plan(
        id="x",
        object="chat.completion",
        created=0,
        model="x",
        info=info,
        encoding="b64_fp16",
        wants_rows=True,
        wants_entries=False,
        num_top_logprobs=0,
        wants_token_ids=False,
        do_sample=False,
        arrow_compression=None,
        prompts=((1,),),
    )


@cache
def _tokens(num_rows: int) -> list[Token]:
    """Return tokens whose row t holds t."""
    return [
        Token(
            TokenEvent(97, ("a",), 0.0, row=np.full(VOCAB_SIZE, place, RowDtype.FLOAT16.value)),
            Segment.CONTENT,
        )
        for place in range(num_rows)
    ]


def recorded_pieces(num_rows: int) -> list[memoryview]:
    """Return what the server sends for so many rows, in the pieces in which it sends it."""
    writer = RowWriter(_plan(), byte_tokenizer())
    pieces = [piece for token in _tokens(num_rows) for piece in writer.write(0, [token], None)]
    choice = ChatChoice(
        index=0, message=AssistantMessage(content=""), logprobs=None, finish_reason="stop", stop_reason=None
    )
    completion = ChatCompletion(
        id="x",
        created=0,
        model="x",
        choices=[choice],
        usage=Usage(
            prompt_tokens=1,
            completion_tokens=num_rows,
            total_tokens=num_rows + 1,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=0),
        ),
        metadata=_plan().metadata(),
        rows=[num_rows],
    )
    return pieces + writer.end(completion)
