"""Rows to an Arrow IPC stream, without copying them."""

from collections.abc import Sequence
from itertools import groupby
from typing import Any, ClassVar, TypeAlias

import msgspec
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from engine.tokenizer import Tokenizer
from engine.types import TokenEvent
from schemas.arrow import END_KEY, ERROR_KEY, row_schema
from schemas.base import WireResponse
from service import single
from service.convert.choice import Token
from service.convert.plan import Plan

BATCH_BYTES = 64 * 2**10
"""Rows that are ready together share a batch up to this size; beyond it a copy costs more than a batch."""

SMALL_BYTES = 4096
"""Pieces below this are joined, since each piece sent costs a call."""

Piece: TypeAlias = "bytes | memoryview | pa.Buffer"


class _Sink:
    """A file that keeps what is written as it came: small parts as bytes, column buffers uncopied."""

    closed = False

    def __init__(self) -> None:
        self._pieces: list[Piece] = []

    def write(self, data: Piece) -> int:
        self._pieces.append(data)
        return len(data)

    def flush(self) -> None:
        pass

    def close(self) -> None:
        self.closed = True

    def readable(self) -> bool:
        return False

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return False

    def drain(self) -> list[memoryview]:
        """Return what was written since the last call, small neighbours joined."""
        joined: list[memoryview] = []
        small: list[Piece] = []
        for piece in self._pieces:
            if len(piece) < SMALL_BYTES:
                small.append(piece)
                continue
            joined += [memoryview(b"".join(small)), memoryview(piece).cast("B")]
            small.clear()
        self._pieces.clear()
        if small:
            joined.append(memoryview(b"".join(small)))
        return [piece for piece in joined if len(piece)]


class RowWriter:
    """Writes the batches of one answer. Each call returns the bytes to send, in pieces.

    A piece may be the memory of a row itself, so the row must not change any more.

    Attributes:
        ends_anywhere: Whether a choice may end with a row of its prompt.
    """

    ends_anywhere: ClassVar[bool] = False

    def __init__(self, plan: Plan, tokenizer: Tokenizer, others: Sequence[pa.Field] = ()) -> None:
        """Prepare.

        Args:
            plan: Of the answer.
            tokenizer: The model's.
            others: Columns that a subclass fills.
        """
        response = msgspec.json.encode(
            {
                "id": plan.id,
                "object": plan.object,
                "created": plan.created,
                "model": plan.model,
                "metadata": plan.metadata(),
            }
        )
        self._tokenizer = tokenizer
        self._dtype = plan.row_dtype
        self._has_stats = plan.wants_stats
        self._num_selected = len(plan.logit_token_ids)
        self._shape = single.Shape(
            plan.info.vocab_size, plan.row_dtype, plan.wants_stats, len(plan.logit_token_ids)
        )
        # Batches of one row are written here, if they are of the usual kind.
        self._is_usual = plan.arrow_compression is None and not others
        self._schema = row_schema(
            plan.info.vocab_size,
            plan.row_dtype,
            response,
            has_stats=self._has_stats,
            num_selected=self._num_selected,
            others=others,
        )
        self._sink = _Sink()
        # The writer holds on to the wrapper, and closes its file when it is dropped.
        self._file: Any = pa.PythonFile(self._sink, mode="w")
        options = pa.ipc.IpcWriteOptions(compression=plan.arrow_compression)
        self._writer = pa.ipc.new_stream(self._file, self._schema, options=options)
        # The writer puts the schema before its own first batch, but another may come before that.
        self._writer.write_batch(self._empty())
        self._sink.drain()
        self._sink.write(self._schema.serialize())
        self.num_rows = [0] * plan.num_choices
        # Positions count from 0 in each part of each choice.
        self._positions: dict[tuple[int, bool], int] = {}

    def write(self, choice: int, tokens: Sequence[Token], finish_reason: str | None) -> list[memoryview]:
        """Write a choice's next tokens as batches; the first call also writes the schema.

        Args:
            choice: Its index.
            tokens: Those that are decided, in their order.
            finish_reason: If these are the last ones.
        """
        rows = [token for token in tokens if token.event is not None and self._has_row(token.event)]
        parts = [list(part) for _, part in groupby(rows, key=lambda token: token.is_prompt)]
        for part in parts:
            is_end = part is parts[-1] and (self.ends_anywhere or not part[0].is_prompt)
            self._write_part(choice, part, finish_reason if is_end else None)
        return self._sink.drain()

    def _has_row(self, event: TokenEvent) -> bool:
        """Tell whether an event fills all columns; an echoed prompt may have logprobs only."""
        return self._dtype is None or event.row is not None

    def _write_part(self, choice: int, tokens: list[Token], finish_reason: str | None) -> None:
        """Write tokens of one part: of the prompt, or generated."""
        first = tokens[0].event
        assert first is not None
        step = max(1, BATCH_BYTES // max(1, first.num_bytes))
        for start in range(0, len(tokens), step):
            part = tokens[start : start + step]
            reason = finish_reason if start + step >= len(tokens) else None
            if len(part) == 1 and self._is_usual:
                self._write_one(choice, part[0], reason)
            else:
                self._writer.write_batch(self._batch(choice, part, reason))
            self.num_rows[choice] += len(part)

    def _write_one(self, choice: int, token: Token, finish_reason: str | None) -> None:
        """Write one token as a batch, as pyarrow would."""
        event = token.event
        assert event is not None
        assert event.logprob is not None
        assert (event.row is None, event.selected is None) == (self._dtype is None, not self._num_selected)
        token_bytes = self._tokenizer.token_bytes(event.token_id)
        self._sink.write(
            single.encode(
                self._shape,
                single.Cells(
                    choice=choice,
                    position=self._next_positions(choice, [token]),
                    segment=(token.segment or "prompt").encode(),
                    token_id=event.token_id,
                    token=token_bytes.decode(errors="replace").encode(),
                    token_bytes=token_bytes,
                    logprob=event.logprob,
                    stats=event.stats,
                    finish_reason=None if finish_reason is None else finish_reason.encode(),
                    selected=b"" if event.selected is None else event.selected.tobytes(),
                ),
            )
        )
        if event.row is not None:
            self._sink.write(event.row.data.cast("B"))
            self._sink.write(bytes(-event.row.nbytes % single.ALIGNMENT))

    def end(self, whole: WireResponse) -> list[memoryview]:
        """Write the end record, the answer without rows, and the end-of-stream mark."""
        self._write_record(END_KEY, msgspec.json.encode(whole))
        self._writer.close()
        return self._sink.drain()

    def fail(self, envelope: bytes) -> list[memoryview]:
        """Write the error record, and no end-of-stream mark: the caller must abort the connection."""
        self._write_record(ERROR_KEY, envelope)
        return self._sink.drain()

    def _write_record(self, key: bytes, value: bytes) -> None:
        self._writer.write_batch(self._empty(), custom_metadata={key: value})

    def _empty(self) -> pa.RecordBatch:
        return pa.RecordBatch.from_pylist([], schema=self._schema)

    def _batch(self, choice: int, decided: Sequence[Token], finish_reason: str | None) -> pa.RecordBatch:
        """Return one batch; its rows are the engine's own memory where there is one token."""
        tokens = [token.event for token in decided if token.event is not None]
        num = len(tokens)
        ids = [event.token_id for event in tokens]
        first = self._next_positions(choice, decided)
        columns = [
            pa.array([choice] * num, pa.int32()),
            pa.array(range(first, first + num), pa.int32()),
            pa.array([token.segment or "prompt" for token in decided], pa.utf8()),
            pa.array(ids, pa.int32()),
            pa.array([self._tokenizer.token_text(each) for each in ids], pa.utf8()),
            pa.array([self._tokenizer.token_bytes(each) for each in ids], pa.binary()),
            pa.array([event.logprob for event in tokens], pa.float32()),
        ]
        if self._has_stats:
            stats = [event.stats for event in tokens if event.stats is not None]
            columns += [
                pa.array([each.entropy for each in stats], pa.float32()),
                pa.array([each.logsumexp for each in stats], pa.float32()),
                pa.array([each.rank for each in stats], pa.int32()),
                pa.array([each.margin for each in stats], pa.float32()),
            ]
        columns.append(pa.array([*[None] * (num - 1), finish_reason], pa.utf8()))
        if self._num_selected:
            selected = [event.selected for event in tokens if event.selected is not None]
            columns.append(self._lists("selected_logits", selected))
        columns += self._other_columns(choice, tokens)
        if self._dtype is not None:
            columns.append(self._lists("logits", [event.row for event in tokens if event.row is not None]))
        return pa.RecordBatch.from_arrays(columns, schema=self._schema)

    def _other_columns(self, choice: int, tokens: Sequence[TokenEvent]) -> list[pa.Array]:
        """Return the columns that only this kind of answer has."""
        return []

    def _next_positions(self, choice: int, tokens: Sequence[Token]) -> int:
        """Return the position of the first of some tokens of one part, and count them."""
        part = (choice, tokens[0].is_prompt)
        first = self._positions.get(part, 0)
        self._positions[part] = first + len(tokens)
        return first

    def _lists(self, name: str, rows: Sequence[NDArray[np.floating]]) -> pa.Array:
        """Return a column of fixed-size lists; of one row it is the row's own memory."""
        values = rows[0] if len(rows) == 1 else np.concatenate(rows)  # (k * V,)
        kind = self._schema.field(name).type
        flat = pa.Array.from_buffers(kind.value_type, values.size, [None, pa.py_buffer(values)])
        return pa.FixedSizeListArray.from_arrays(flat, type=kind)
