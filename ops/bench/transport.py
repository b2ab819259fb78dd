"""What it costs to bring a row from a finished step to a numpy view in another process."""

import io
from collections.abc import Callable

import numpy as np

from engine.fake import byte_tokenizer
from engine.types import ModelInfo, RowDtype, TokenEvent
from logitwire.arrow import read_table
from ops.bench.bars import Bar, Options, interleaved, seconds
from schemas.chat import AssistantMessage, ChatChoice, ChatCompletion
from schemas.logits import PromptTokensDetails, Usage
from service.arrow import RowWriter
from service.convert import Plan

VOCAB_SIZE = 152_064
NUM_ROWS = 64


def run(options: Options) -> list[Bar]:
    """Measure encoding and decoding of rows, without a socket."""
    encode_s, decode_s = interleaved([_encode, _decoder()], options.repeats)
    per_row_ms = (encode_s + decode_s) / NUM_ROWS * 1000
    encode_ms, decode_ms = encode_s / NUM_ROWS * 1000, decode_s / NUM_ROWS * 1000
    note = f"V = {VOCAB_SIZE:,}, float16: encode {encode_ms:.3f} ms, decode {decode_ms:.3f} ms"
    return [Bar("row encode + decode", per_row_ms, 0.5, True, " ms", note)]


def _plan() -> Plan:
    info = ModelInfo(
        name="x", vocab_size=VOCAB_SIZE, tokenizer_vocab_size=261, dtype="float32", max_model_len=4096
    )
    return Plan(
        id="x",
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
        prompt_token_ids=(1,),
    )


_EVENTS = [
    TokenEvent(97, "a", 0.0, row=np.full(VOCAB_SIZE, place, RowDtype.FLOAT16.value))
    for place in range(NUM_ROWS)
]


def _stream() -> list[memoryview]:
    writer = RowWriter(_plan(), byte_tokenizer())
    pieces = [piece for event in _EVENTS for piece in writer.write(0, [event])]
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
            completion_tokens=NUM_ROWS,
            total_tokens=NUM_ROWS + 1,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=0),
        ),
        metadata=_plan().metadata(),
        rows=[NUM_ROWS],
    )
    return pieces + writer.end(completion)


def _encode() -> float:
    return seconds(_stream)


def _decoder() -> Callable[[], float]:
    body = b"".join(_stream())

    def decode() -> float:
        source = io.BytesIO(body)

        def readinto(buffer: memoryview) -> int:
            return source.readinto(buffer)

        return seconds(lambda: read_table(readinto, max_rows=NUM_ROWS))

    return decode
