"""The checks that need more than data: one function per case, or per group of cases, by id."""

import base64
import io
import json
import math
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import polars
import pyarrow as pa
import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion

from tests.cases.runner import SMOLLM2, Answer, Run, wait_idle
from tests.cases.servers import FAILS_AT, KEEPALIVE_S, STALL_TIMEOUT_S, Reference, Servers

README = Path(__file__).resolve().parents[2] / "README.md"
ARROW = "application/vnd.apache.arrow.stream"
END_ID = 2
END_TOKEN = "<|im_end|>"
VOCAB_SIZE = 49152

TOLERANCE = 1e-4
"""Of logprobs of equal requests: who shares the batch changes the last bits."""

REFERENCE_TOLERANCE = 1e-3


class World:
    """What checks may use beside the answers."""

    def __init__(self, servers: Servers) -> None:
        self.servers = servers
        self.reference = Reference()


Check = Callable[[Run, World], None]
CHECKS: dict[str, Check] = {}


def check(*ids: str) -> Callable[[Check], Check]:
    """Register a check for cases."""

    def register(function: Check) -> Check:
        for case_id in ids:
            assert case_id not in CHECKS
            CHECKS[case_id] = function
        return function

    return register


# Reading answers.


def choice(answer: Answer) -> dict[str, Any]:
    (only,) = answer.json["choices"]
    return only


def text(answer: Answer) -> str:
    """The text of the only choice, streamed or not, chat or not."""
    if answer.media_type == "text/event-stream":
        return "".join(_piece(each) for event in answer.events for each in event["choices"])
    only = choice(answer)
    return only["text"] if "text" in only else only["message"]["content"]


def _piece(part: dict[str, Any]) -> str:
    return (part["text"] if "text" in part else part["delta"].get("content")) or ""


def entries(answer: Answer) -> list[dict[str, Any]]:
    """The logprobs entries of a chat's only choice, streamed or not."""
    if answer.media_type != "text/event-stream":
        return choice(answer)["logprobs"]["content"]
    blocks = [each.get("logprobs") for event in answer.events for each in event["choices"]]
    return [entry for block in blocks if block for entry in block["content"]]


def legacy(answer: Answer, index: int = 0) -> dict[str, list[Any]]:
    """The logprobs of one choice of a completion, streamed or not."""
    names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    if answer.media_type != "text/event-stream":
        found = answer.json["choices"][index]["logprobs"]
    else:
        found = {name: [] for name in names}
        for event in answer.events:
            for each in event["choices"]:
                if each["index"] == index and each["logprobs"]:
                    for name in names:
                        found[name] += each["logprobs"][name]
    assert len({len(found[name]) for name in names}) == 1
    return found


def usage(answer: Answer) -> dict[str, Any]:
    if answer.media_type == "text/event-stream":
        return answer.events[-1]["usage"]
    return answer.json["usage"]


def finish_reasons(answer: Answer) -> dict[int, list[str]]:
    """The reasons that each choice of a stream was given, in their order; each part states one or null."""
    found: dict[int, list[str]] = {}
    for event in answer.events:
        for each in event["choices"]:
            reasons = found.setdefault(each["index"], [])
            if each["finish_reason"] is not None:
                reasons.append(each["finish_reason"])
    return found


def rows(answer: Answer) -> np.ndarray:
    """The rows of the only choice of a JSON answer, as they came."""
    block = choice(answer)["logits"]
    dtype = {"b64_fp16": "<f2", "b64_fp32": "<f4"}[block["encoding"]]
    found = [np.frombuffer(base64.b64decode(row, validate=True), dtype) for row in block["data"]]
    assert [len(found), *{len(row) for row in found}] == block["shape"]
    return np.stack(found)


def table(answer: Answer) -> pa.Table:
    """The rows of an Arrow stream that ended well."""
    assert answer.media_type == ARROW
    assert answer.failure is None
    with pa.ipc.open_stream(io.BytesIO(answer.body)) as reader:
        batches, ends = [], []
        while True:
            try:
                batch, metadata = reader.read_next_batch_with_custom_metadata()
            except StopIteration:
                break
            batches.append(batch)
            ends += [metadata[b"logitwire.end"]] if metadata and b"logitwire.end" in metadata else []
        found = pa.Table.from_batches(batches, reader.schema)
    (end,) = ends
    assert sum(json.loads(end)["rows"]) == len(found)
    return found


def arrow_rows(answer: Answer) -> np.ndarray:
    column = table(answer)["logits"]
    width = column.type.list_size
    return column.combine_chunks().flatten().to_numpy(zero_copy_only=True).reshape(-1, width)


def assert_same_entries(found: list[dict[str, Any]], wanted: list[dict[str, Any]]) -> None:
    """Assert equal entries, but for the last bits of the numbers."""
    assert len(found) == len(wanted) > 0
    for one, other in zip(found, wanted, strict=True):
        assert (one["token"], one["bytes"]) == (other["token"], other["bytes"])
        assert one["logprob"] == pytest.approx(other["logprob"], abs=TOLERANCE)
        assert_same_alternatives(one["top_logprobs"], other["top_logprobs"])


def assert_same_alternatives(found: list[dict[str, Any]], wanted: list[dict[str, Any]]) -> None:
    assert len(found) == len(wanted)
    values = {each["token"]: each["logprob"] for each in wanted}
    # The order of two that are nearly equal may change.
    assert {each["token"]: each["logprob"] for each in found} == pytest.approx(values, abs=TOLERANCE)


def assert_offsets(whole: str, found: dict[str, list[Any]]) -> None:
    """Assert that offsets never decrease, stay inside the text, and say where each token's text stands."""
    offsets = found["text_offset"]
    assert offsets
    assert offsets == sorted(offsets)
    assert 0 <= offsets[0] <= offsets[-1] <= len(whole)
    for token, offset in zip(found["tokens"], offsets, strict=True):
        # Fragments of a character have no text of their own, and special tokens stand in no text.
        if "\ufffd" not in token and not token.startswith(("bytes:", "<|")):
            assert whole[offset:].startswith(token)


def cut(whole: str, *stops: str) -> str:
    """Return a text as it must be with stop strings: up to the earliest match."""
    places = [whole.find(stop) for stop in stops if stop in whole]
    return whole[: min(places)] if places else whole


# Logprobs.


@check("BL-001")
def _finite_completion_logprobs(run: Run, world: World) -> None:
    found = legacy(run[0])
    assert len(found["tokens"]) == usage(run[0])["completion_tokens"]
    values = found["token_logprobs"] + [each for tops in found["top_logprobs"] for each in tops.values()]
    assert all(isinstance(value, float) and math.isfinite(value) and value <= 0 for value in values)
    assert all(len(tops) >= 5 for tops in found["top_logprobs"])


@check("BL-002")
def _filters_leave_prompt_scores(run: Run, world: World) -> None:
    filtered, plain = legacy(run[0]), legacy(run[1])
    assert filtered["tokens"] == plain["tokens"]
    assert filtered["token_logprobs"][0] is None
    assert all(math.isfinite(value) for value in filtered["token_logprobs"][1:])
    assert filtered["token_logprobs"][1:] == pytest.approx(plain["token_logprobs"][1:], abs=TOLERANCE)


@check("BL-006")
def _streamed_entries(run: Run, world: World) -> None:
    assert_same_entries(entries(run[0]), entries(run[1]))
    assert all(len(each["top_logprobs"]) == 3 for each in entries(run[0]))


@check("BL-008")
def _streams_hold_logprobs(run: Run, world: World) -> None:
    assert 0 < len(entries(run[0])) == usage(run[0])["completion_tokens"]


@check("BL-010")
def _end_token_has_its_entry(run: Run, world: World) -> None:
    assert_same_entries(entries(run[0]), entries(run[1]))
    assert len(entries(run[0])) == usage(run[0])["completion_tokens"] == usage(run[1])["completion_tokens"]
    assert entries(run[0])[-1]["token"] == END_TOKEN


@check("BL-014")
def _one_finish_reason(run: Run, world: World) -> None:
    assert finish_reasons(run[0]) == {0: ["length"]}
    assert len(entries(run[0])) == 3


@check("BL-015", "BL-018b")
def _no_alternatives(run: Run, world: World) -> None:
    found = entries(run[0])
    assert len(found) == usage(run[0])["completion_tokens"]
    assert all(each["top_logprobs"] == [] and type(each["logprob"]) is float for each in found)


@check("BL-023")
def _greedy_scores_are_raw(run: Run, world: World) -> None:
    generated, echoed = legacy(run[0]), legacy(run[1])
    assert any(value < 0 for value in generated["token_logprobs"])
    num = len(generated["tokens"])
    assert echoed["tokens"][-num:] == generated["tokens"]
    assert echoed["token_logprobs"][-num:] == pytest.approx(generated["token_logprobs"], abs=TOLERANCE)


@check("BL-024")
def _sampling_never_changes_scores(run: Run, world: World) -> None:
    first, second = entries(run[0])[0], entries(run[1])[0]
    assert len(first["top_logprobs"]) == 3
    assert_same_alternatives(first["top_logprobs"], second["top_logprobs"])


@check("BL-026")
def _every_choice_has_its_scores(run: Run, world: World) -> None:
    choices = run[0].json["choices"]
    assert [each["index"] for each in choices] == [0, 1, 2]
    num_tokens = 0
    for index in range(3):
        found = legacy(run[0], index)
        num_tokens += len(found["tokens"])
        assert all(math.isfinite(value) for value in found["token_logprobs"])
        assert all(len(tops) >= 2 for tops in found["top_logprobs"])
    assert num_tokens == usage(run[0])["completion_tokens"]


@check("BL-029")
def _rows_agree_with_the_reference(run: Run, world: World) -> None:
    row = rows(run[0])[0].astype(np.float64)
    logprobs = row - row.max() - math.log(np.exp(row - row.max()).sum())
    assert np.exp(logprobs).sum() == pytest.approx(1, abs=1e-4)
    wanted = world.reference.logprobs(run[0].json["prompt_token_ids"])[-1]
    np.testing.assert_allclose(logprobs, wanted, atol=REFERENCE_TOLERANCE)
    assert run[0].json["metadata"]["source_dtype"] == "float32"


@check("BL-030")
def _greedy_is_the_argmax(run: Run, world: World) -> None:
    assert len({text(answer) for answer in run.answers[0]}) == 1
    for answer in run.answers[0]:
        assert rows(answer).argmax(-1).tolist() == choice(answer)["token_ids"]


@check("BL-031")
def _special_tokens_have_names(run: Run, world: World) -> None:
    found = entries(run[0])
    assert found[-1]["token"] == END_TOKEN
    assert math.isfinite(found[-1]["logprob"])
    assert all(len(each["top_logprobs"]) == 20 for each in found)
    assert all(each["token"] for entry in found for each in (entry, *entry["top_logprobs"]))


@check("BL-032")
def _bytes_are_lists(run: Run, world: World) -> None:
    for entry in entries(run[0]):
        for each in (entry, *entry["top_logprobs"]):
            assert all(type(byte) is int and 0 <= byte <= 255 for byte in each["bytes"])
            assert bytes(each["bytes"]).decode(errors="replace") == each["token"]


@check("BL-034")
def _bytes_are_the_tokens_own(run: Run, world: World) -> None:
    own = [each for each in entries(run[0]) if each["token"] != END_TOKEN]
    content = text(run[0])
    joined = b"".join(bytes(each["bytes"]) for each in own)
    # max_tokens may cut a character, whose rest the text shows as U+FFFD.
    assert joined.decode(errors="replace") == content
    assert any(ord(character) > 0xFFFF for character in content)
    if "\ufffd" not in content:
        assert joined == content.encode()
    assert all(each["bytes"] != [239, 191, 189] for each in own)


# Scores of the prompt.


@check("BL-038")
def _prompt_scores_are_shifted(run: Run, world: World) -> None:
    found = legacy(run[0])
    prompt_scores = found["token_logprobs"][1:-1]
    assert sum(prompt_scores) / len(prompt_scores) > -8
    best = found["top_logprobs"][-1]
    assert found["token_logprobs"][-1] == max(best.values()) == best[found["tokens"][-1]]
    ids = world.reference.tokenizer.encode("The quick brown fox jumps over the lazy dog.")
    wanted = world.reference.logprobs(ids)
    np.testing.assert_allclose(prompt_scores, wanted[range(len(ids) - 1), ids[1:]], atol=REFERENCE_TOLERANCE)
    assert found["token_logprobs"][-1] == pytest.approx(wanted[-1].max(), abs=REFERENCE_TOLERANCE)


@check("BL-039")
def _alternatives_of_a_prompt(run: Run, world: World) -> None:
    ids = run[0].json["prompt_token_ids"]
    found = legacy(run[0])
    assert found["tokens"] == [f"token_id:{token_id}" for token_id in ids]
    wanted = world.reference.logprobs(ids)
    for position in range(1, len(ids)):
        row, tops = wanted[position - 1], found["top_logprobs"][position]
        actual = found["tokens"][position]
        assert found["token_logprobs"][position] == tops[actual]
        assert tops[actual] == pytest.approx(row[ids[position]], abs=REFERENCE_TOLERANCE)
        best = {f"token_id:{token_id}" for token_id in np.argsort(row)[:-6:-1]}
        assert set(tops) == best | {actual}


@check("BL-040")
def _echo_scores_every_token(run: Run, world: World) -> None:
    found = legacy(run[0])
    assert len(found["token_logprobs"]) == usage(run[0])["total_tokens"]
    assert usage(run[0])["completion_tokens"] == 1
    assert found["token_logprobs"][0] is None
    assert found["top_logprobs"][0] is None
    assert all(len(tops) >= 5 for tops in found["top_logprobs"][1:])


@check("BL-044")
def _given_ids_are_scored(run: Run, world: World) -> None:
    ids = run.case.steps[0].body["prompt"]
    found = legacy(run[0])
    assert len(found["tokens"]) == len(ids) == usage(run[0])["prompt_tokens"]
    wanted = world.reference.logprobs(ids)[range(len(ids) - 1), ids[1:]]
    assert found["token_logprobs"][0] is None
    np.testing.assert_allclose(found["token_logprobs"][1:], wanted, atol=REFERENCE_TOLERANCE)
    assert usage(run[0])["completion_tokens"] == 0


# Offsets.


@check("BL-047")
def _offsets_of_a_stream(run: Run, world: World) -> None:
    whole = text(run[0])
    assert whole.startswith("Hello there,")
    found = legacy(run[0])
    assert found["text_offset"][0] == 0
    assert_offsets(whole, found)
    assert "".join(found["tokens"]) == whole


@check("BL-049")
def _offsets_of_split_characters(run: Run, world: World) -> None:
    prompt = run.case.steps[0].body["prompt"]
    found = legacy(run[0])
    assert text(run[0]) == prompt
    assert_offsets(prompt, found)
    assert found["text_offset"][-1] < len(prompt)
    ids = world.reference.tokenizer.encode(prompt)
    assert len(found["tokens"]) == len(ids)
    # Byte-level pieces have one printable character for each byte.
    sizes = [len(piece) for piece in world.reference.tokenizer.convert_ids_to_tokens(ids)]
    starts = [sum(sizes[:place]) for place in range(len(sizes))]
    begins = [place for place, byte in enumerate(prompt.encode()) if byte & 0xC0 != 0x80]
    # A token begins at the character to which its first byte belongs.
    wanted = [sum(begin <= start for begin in begins) - 1 for start in starts]
    for place, (start, offset) in enumerate(zip(starts, found["text_offset"], strict=True)):
        if start in begins:
            assert offset == wanted[place]
        else:
            # Text before a character, in the token of its first piece, may count with the pieces.
            assert wanted[place - 1] <= offset <= wanted[place]


@check("BL-050")
def _offsets_never_count_labels(run: Run, world: World) -> None:
    labelled, plain = legacy(run[0]), legacy(run[1])
    assert labelled["text_offset"] == plain["text_offset"]
    assert labelled["token_logprobs"] == pytest.approx(plain["token_logprobs"], abs=TOLERANCE)
    names = [*labelled["tokens"], *(key for tops in labelled["top_logprobs"] for key in tops)]
    assert all(re.fullmatch(r"token_id:\d+", name) for name in names)
    assert text(run[0]) == text(run[1])
    assert_offsets(text(run[1]), plain)


@check("BL-051")
def _tokens_join_to_the_text(run: Run, world: World) -> None:
    found = legacy(run[0])
    assert "".join(found["tokens"]) == text(run[0])
    assert text(run[0]).startswith("\n2. Nadia owns 15")
    assert len(found["tokens"]) == usage(run[0])["total_tokens"]


# Stops.


@check("BL-052")
def _stop_over_several_tokens(run: Run, world: World) -> None:
    (stop,) = run.case.steps[0].body["stop"]
    streamed, whole = text(run[0]), text(run[1])
    assert streamed == whole
    unstopped = text(run[2])
    assert unstopped.startswith(" four five six seven")
    assert whole == cut(unstopped, stop)
    reason = "stop" if stop in unstopped else "length"
    assert finish_reasons(run[0]) == {0: [reason]}
    assert choice(run[1])["finish_reason"] == reason
    assert choice(run[1])["stop_reason"] == (stop if reason == "stop" else None)


@check("BL-055")
def _held_text_is_flushed(run: Run, world: World) -> None:
    whole = text(run[1])
    assert whole
    assert text(run[0]) == cut(whole, *run.case.steps[0].body["stop"])
    assert text(run[2]) == whole
    assert finish_reasons(run[2]) == {0: [choice(run[1])["finish_reason"]]}


@check("BL-056")
def _text_after_a_stop_is_gone(run: Run, world: World) -> None:
    assert "Thursday" in text(run[1])
    assert text(run[0]) == cut(text(run[1]), "Thursday")
    assert choice(run[0])["finish_reason"] == "stop"
    assert choice(run[0])["stop_reason"] == "Thursday"


@check("BL-057")
def _earliest_of_two_stops(run: Run, world: World) -> None:
    stops, found = run.case.steps[0].body["stop"], choice(run[0])
    assert not any(stop in found["text"] for stop in stops)
    # SmolLM2 goes on with the pattern, so this stop is met.
    assert found["finish_reason"] == "stop"
    assert found["stop_reason"] == "END]]"
    assert not any(found["text"].endswith("END]]"[:length]) for length in range(1, 5))


@check("BL-058")
def _stop_inside_a_token(run: Run, world: World) -> None:
    for answer, stop in ((run[0], ".."), (run[1], "ou")):
        found = legacy(answer)
        assert stop not in text(answer)
        assert len(found["tokens"]) == usage(answer)["completion_tokens"]
        shown = [token for token in found["tokens"] if not token.startswith("<|")]
        joined = "".join(shown)
        assert joined.startswith(text(answer))
        assert cut(joined, stop) == text(answer)
        assert all(offset <= len(text(answer)) for offset in found["text_offset"])
    assert choice(run[1])["stop_reason"] == "ou"
    assert text(run[1]).endswith("f")
    assert legacy(run[1])["tokens"][-1] == " four"


@check("BL-060")
def _special_token_as_a_stop(run: Run, world: World) -> None:
    found = choice(run[0])
    assert found["finish_reason"] == "stop"
    assert found["stop_reason"] == END_TOKEN
    assert END_TOKEN not in found["text"]
    assert found["text"]
    assert found["token_ids"].index(END_ID) == len(found["token_ids"]) - 1


@check("BL-166a")
def _stop_of_the_prompt(run: Run, world: World) -> None:
    whole = text(run[1])
    assert text(run[0]) == cut(whole, "Q:")
    assert text(run[0]) or whole.startswith("Q:")
    reached = "Q:" in whole
    assert choice(run[0])["finish_reason"] == ("stop" if reached else choice(run[1])["finish_reason"])
    assert choice(run[0])["stop_reason"] == ("Q:" if reached else None)


@check("BL-166b")
def _half_a_stop_in_the_prompt(run: Run, world: World) -> None:
    ids = world.reference.tokenizer.encode(run.case.steps[0].body["prompt"])
    first = world.reference.text([int(world.reference.logprobs(ids)[-1].argmax())])
    assert text(run[0])
    assert text(run[0]).startswith(cut(first, "<<END>>", "<< "))
    assert not any(stop in text(run[0]) for stop in run.case.steps[0].body["stop"])


@check("BL-166c")
def _echo_keeps_the_prompts_stop(run: Run, world: World) -> None:
    prompt = run.case.steps[0].body["prompt"]
    assert text(run[0]).startswith(prompt)
    assert "Q:" not in text(run[0])[len(prompt) :]
    assert usage(run[0])["completion_tokens"] > 0


# Text.


@check("BL-062", "BL-065")
def _streamed_text_is_the_text(run: Run, world: World) -> None:
    streamed, whole = run[0], text(run[1])
    assert text(streamed) == whole
    pieces = [_piece(each) for event in streamed.events for each in event["choices"]]
    assert sum(piece.count("\ufffd") for piece in pieces) == whole.count("\ufffd")
    assert len([piece for piece in pieces if piece]) > 3


@check("BL-064")
def _last_fragment_is_flushed(run: Run, world: World) -> None:
    assert usage(run[0])["completion_tokens"] == 1
    whole = text(run[0])
    assert len(whole) == 1
    assert text(run[1]) == whole
    assert finish_reasons(run[1]) == {0: ["length"]}


@check("BL-066")
def _echo_is_exact(run: Run, world: World) -> None:
    assert text(run[0]) == run.case.steps[0].body["prompt"]


@check("BL-070")
def _every_end_token_ends(run: Run, world: World) -> None:
    for answer in (run[0], run[1]):
        assert choice(answer)["finish_reason"] == "stop"
        assert not any(marker in text(answer) for marker in (END_TOKEN, "<|endoftext|>"))
    assert choice(run[0])["token_ids"][-1] == END_ID
    assert text(run[1]) == "abc"
    assert len(choice(run[1])["token_ids"]) == 4


# Streams.


@check("BL-071a", "BL-071b", "BL-071c", "BL-073b")
def _no_usage_chunk(run: Run, world: World) -> None:
    assert all(len(event["choices"]) == 1 for event in run[0].events)
    assert all(event.get("usage") is None for event in run[0].events)
    assert finish_reasons(run[0]) == {0: ["length"]} or finish_reasons(run[0]) == {0: ["stop"]}


@check("BL-072")
def _usage_chunk(run: Run, world: World) -> None:
    *others, last = run[0].events
    assert last["choices"] == []
    found = last["usage"]
    assert found["total_tokens"] == found["prompt_tokens"] + found["completion_tokens"]
    assert found["completion_tokens"] > 0
    assert all("usage" in event and event["usage"] is None for event in others)
    assert all(event["choices"] for event in others)


@check("BL-074")
def _one_finish_per_choice(run: Run, world: World) -> None:
    reasons = finish_reasons(run[0])
    assert sorted(reasons) == [0, 1, 2]
    assert all(len(each) == 1 for each in reasons.values())
    ended = set()
    for event in run[0].events:
        for each in event["choices"]:
            assert each["index"] not in ended
            if each["finish_reason"] is not None:
                ended.add(each["index"])
    assert run[0].body.count(b"[DONE]") == 1


@check("BL-085")
def _stream_ends(run: Run, world: World) -> None:
    answer = run[0]
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.body.endswith(b"\n\ndata: [DONE]\n\n")
    assert answer.body.count(b"[DONE]") == 1
    assert len(answer.events) > 1
    assert all(event["object"] == "text_completion" for event in answer.events)


@check("BL-086")
def _queued_streams_stay_alive(run: Run, world: World) -> None:
    answer = run[0]
    # The head comes at once, long before the job in front has ended.
    assert answer.headers_s < 1
    assert run[1].seconds > 4 * KEEPALIVE_S
    comments = [part for part in answer.parts if part.startswith(":")]
    # A machine with much else to do may be late with some, but not with all.
    assert len(comments) > run[1].seconds / KEEPALIVE_S / 4
    assert sorted(answer.pauses)[-len(answer.pauses) // 4] < 2 * KEEPALIVE_S
    assert text(answer)
    said = "".join(chunk.choices[0].delta.content or "" for chunk in run[2].chunks)
    assert said == text(answer)


@check("BL-087")
def _proxies_do_not_buffer(run: Run, world: World) -> None:
    assert run[0].media_type == "text/event-stream"
    assert run[1].media_type == ARROW
    for answer in (run[0], run[1]):
        assert answer.headers["x-accel-buffering"] == "no"
        assert "no-cache" in answer.headers["cache-control"]
        assert "content-length" not in answer.headers


# Shapes and seeds.


@check("BL-091a")
def _chat_schema(run: Run, world: World) -> None:
    body = run[0].json
    # OpenAI's newest client knows a "metadata" of its own, of texts only; ours states numbers.
    parsed = ChatCompletion.model_validate_json(
        json.dumps({name: value for name, value in body.items() if name != "metadata"}), strict=True
    )
    assert parsed.id.startswith("chatcmpl-")
    assert type(body["created"]) is int
    assert body["object"] == "chat.completion"
    message = choice(run[0])["message"]
    assert message["role"] == "assistant"
    assert type(message["content"]) is str
    assert message["refusal"] is None
    assert choice(run[0])["logprobs"] is None


@check("BL-091b")
def _completion_schema(run: Run, world: World) -> None:
    parsed = Completion.model_validate_json(run[0].body, strict=True)
    assert parsed.id.startswith("cmpl-")
    assert run[0].json["object"] == "text_completion"
    assert type(run[0].json["created"]) is int
    assert choice(run[0])["logprobs"] is None


@check("BL-093", "BL-108a")
def _seeds_repeat(run: Run, world: World) -> None:
    assert text(run[0]) == text(run[1])
    assert choice(run[0]).get("token_ids") == choice(run[1]).get("token_ids")
    assert text(run[0])


@check("BL-098")
def _end_token_is_kept_once(run: Run, world: World) -> None:
    ids = choice(run[0])["token_ids"]
    assert ids[-1] == END_ID
    assert ids.count(END_ID) == 1
    assert len(ids) == usage(run[0])["completion_tokens"] == len(entries(run[0]))
    assert rows(run[0]).shape == (len(ids), VOCAB_SIZE)


# Batches.


@check("BL-099")
def _short_beside_long(run: Run, world: World) -> None:
    assert text(run[0]) == text(run[2])
    assert_same_entries(entries(run[0]), entries(run[2]))
    assert choice(run[0])["finish_reason"] == "stop"
    assert usage(run[1])["completion_tokens"] == 40


@check("BL-101")
def _settings_are_ones_own(run: Run, world: World) -> None:
    assert usage(run[0])["completion_tokens"] == 5
    assert usage(run[1])["completion_tokens"] == 40
    assert choice(run[0])["finish_reason"] == choice(run[1])["finish_reason"] == "length"
    assert len(text(run[1])) > len(text(run[0]))


@check("BL-102")
def _penalties_are_ones_own(run: Run, world: World) -> None:
    assert text(run[0]) == text(run[2])
    assert text(run[1]) == text(run[3])
    assert text(run[0]) != text(run[1])


@check("BL-103")
def _each_gets_what_it_asked_for(run: Run, world: World) -> None:
    assert_same_entries(entries(run[0]), entries(run[3]))
    assert all(len(each["top_logprobs"]) == 5 for each in entries(run[0]))
    assert choice(run[1])["logprobs"] is None
    assert "logits" not in choice(run[1])
    assert rows(run[2]).shape == (usage(run[2])["completion_tokens"], VOCAB_SIZE)
    assert len({text(run[number]) for number in range(4)}) == 1


@check("BL-104")
def _rows_leave_the_device(run: Run, world: World) -> None:
    found = arrow_rows(run[0])
    assert found.shape == (100, VOCAB_SIZE)
    assert usage(run[1])["completion_tokens"] == 100
    assert run[0].peak_bytes < found.nbytes / 2


# Parameters.


@check("BL-105a", "BL-105b", "BL-105c", "BL-105d", "BL-107b", "BL-107c", "BL-109d")
def _as_good_as_greedy(run: Run, world: World) -> None:
    assert text(run[0]) == text(run[1])
    assert text(run[0])


@check("BL-108b")
def _greedy_repeats(run: Run, world: World) -> None:
    assert len(run.answers[0]) == 10
    assert len({text(answer) for answer in run.answers[0]}) == 1
    assert text(run[0])


@check("BL-109a", "BL-109b", "BL-109c")
def _top_k_is_off(run: Run, world: World) -> None:
    assert text(run[0]) == text(run[1])


@check("BL-110")
def _defaults_filter_nothing(run: Run, world: World) -> None:
    firsts = Counter(choice(answer)["token_ids"][0] for answer in run.answers[0])
    assert sum(firsts.values()) == 300
    assert len(firsts) > 50
    assert run[0].json["metadata"]["do_sample"] is True


@check("BL-113f")
def _bias_chooses_and_rows_stay_raw(run: Run, world: World) -> None:
    assert choice(run[0])["token_ids"] == [28]
    assert choice(run[1])["token_ids"] != [28]
    np.testing.assert_allclose(rows(run[0]), rows(run[1]), atol=REFERENCE_TOLERANCE)


@check("BL-118c")
def _default_length(run: Run, world: World) -> None:
    for answer in (run[0], run[1]):
        assert choice(answer)["finish_reason"] == "stop"
        assert text(answer)
    assert usage(run[1])["completion_tokens"] > 16


@check("BL-118d")
def _null_is_absent(run: Run, world: World) -> None:
    assert text(run[0]) == text(run[1])
    assert usage(run[0]) | {"prompt_tokens_details": None} == usage(run[1]) | {"prompt_tokens_details": None}
    assert choice(run[0])["finish_reason"] == choice(run[1])["finish_reason"] == "stop"


@check("BL-122")
def _padding_is_never_chosen(run: Run, world: World) -> None:
    metadata = run[0].json["metadata"]
    size = metadata["tokenizer_vocab_size"]
    assert metadata["vocab_size"] > size
    found = rows(run[0])
    assert found.shape == (len(choice(run[0])["token_ids"]), metadata["vocab_size"])
    # Not masked either: the padding's logits are the head's own, and finite.
    assert np.isfinite(found).all()
    choices = [each for answer in run.answers[1] for each in answer.json["choices"]]
    assert len(choices) == 200
    ids = [token_id for each in choices for token_id in each["token_ids"]]
    assert all(token_id < size for token_id in (*ids, *choice(run[0])["token_ids"]))
    assert len(set(ids)) > 50


@check("BL-124a")
def _choices_are_prompt_major(run: Run, world: World) -> None:
    choices = run[0].json["choices"]
    assert [each["index"] for each in choices] == [0, 1, 2, 3]
    for each in choices:
        assert each["text"].startswith(("Alpha is", "Beta is")[each["index"] // 2])
    # The first choices of two prompts share a seed, those of one prompt do not.
    assert choices[0]["text"] != choices[1]["text"]
    assert choices[2]["text"] != choices[3]["text"]


@check("BL-124b")
def _streamed_prompts(run: Run, world: World) -> None:
    reasons = finish_reasons(run[0])
    assert sorted(reasons) == [0, 1]
    assert all(len(each) == 1 for each in reasons.values())
    for index, prompt in enumerate(("Alpha is", "Beta is")):
        parts = [each for event in run[0].events for each in event["choices"] if each["index"] == index]
        whole = "".join(_piece(part) for part in parts)
        assert whole.startswith(prompt)
        assert len(whole) > len(prompt)


@check("BL-124c")
def _lists_of_ids(run: Run, world: World) -> None:
    prompts = run.case.steps[0].body["prompt"]
    assert [each["index"] for each in run[0].json["choices"]] == [0, 1]
    num_tokens = 0
    for index, ids in enumerate(prompts):
        each, found = run[0].json["choices"][index], legacy(run[0], index)
        assert each["text"].startswith(world.reference.text(ids))
        assert found["token_logprobs"][0] is None
        assert all(math.isfinite(value) for value in found["token_logprobs"][1:])
        num_tokens += len(found["tokens"])
        wanted = world.reference.logprobs(ids)[range(len(ids) - 1), ids[1:]]
        np.testing.assert_allclose(found["token_logprobs"][1 : len(ids)], wanted, atol=REFERENCE_TOLERANCE)
    assert num_tokens == usage(run[0])["total_tokens"]


# Messages.


@check("BL-127a", "BL-130a")
def _same_prompt(run: Run, world: World) -> None:
    assert usage(run[0])["prompt_tokens"] == usage(run[1])["prompt_tokens"]
    assert text(run[0]) == text(run[1])


@check("BL-127b")
def _joined_parts(run: Run, world: World) -> None:
    assert run[0].json["prompt_token_ids"] == run[1].json["prompt_token_ids"]


@check("BL-128a")
def _tool_text_is_kept(run: Run, world: World) -> None:
    assert "gate 17" in world.reference.text(run[0].json["prompt_token_ids"])


@check("BL-132a")
def _new_turn(run: Run, world: World) -> None:
    assert text(run[0]).strip()
    assert usage(run[0])["completion_tokens"] > 1


@check("BL-132b")
def _continued_turn(run: Run, world: World) -> None:
    ids = run[0].json["prompt_token_ids"]
    assert ids[-1] != END_ID
    assert world.reference.text(ids).endswith("<|im_start|>assistant\n1, 2, ")


@check("BL-137b")
def _json_object(run: Run, world: World) -> None:
    content = text(run[0])
    assert content.lstrip().startswith("{")
    if choice(run[0])["finish_reason"] == "stop":
        assert isinstance(json.loads(content), dict)
    else:
        assert usage(run[0])["completion_tokens"] == 48


# Clients that leave or stall, and answers that break.


@check("BL-152")
def _aborts_leave_nothing(run: Run, world: World) -> None:
    assert len(run.answers[0]) == 100
    assert {answer.media_type for answer in run.answers[0]} == {"text/event-stream"}
    assert run[1].seconds < 10
    wait_idle(world.servers(SMOLLM2))


@check("BL-153")
def _slow_reader_is_cut(run: Run, world: World) -> None:
    assert run[0].media_type == "text/event-stream"
    assert run[0].peak_bytes < 64 * 2**20
    assert run[0].seconds > STALL_TIMEOUT_S
    assert run[0].failure is not None
    assert b"[DONE]" not in run[0].body
    # The other one was answered long before the first was given up.
    assert run[1].seconds < run[0].seconds
    wait_idle(world.servers(SMOLLM2))


@check("BL-158")
def _cut_stream_is_no_short_table(run: Run, world: World) -> None:
    assert run[0].failure is not None
    errors, num_rows = [], 0
    reader = pa.ipc.open_stream(io.BytesIO(run[0].body))
    while True:
        try:
            batch, metadata = reader.read_next_batch_with_custom_metadata()
        except (StopIteration, pa.ArrowInvalid, OSError):
            break
        num_rows += batch.num_rows
        assert not metadata or b"logitwire.end" not in metadata
        errors += [metadata[b"logitwire.error"]] if metadata and b"logitwire.error" in metadata else []
    assert num_rows == FAILS_AT
    (error,) = errors
    assert json.loads(error)["error"]["code"] == "internal_error"
    # The mark that would end the stream well is four bytes of ones and a length of zero.
    assert not run[0].body.endswith(b"\xff\xff\xff\xff\x00\x00\x00\x00")


@check("BL-161")
def _arrow_recipes(run: Run, world: World) -> None:
    narrow, wide = arrow_rows(run[0]), arrow_rows(run[1])
    assert (narrow.dtype, wide.dtype) == (np.float16, np.float32)
    assert narrow.shape == wide.shape == (len(table(run[0])), VOCAB_SIZE)
    frame = polars.from_arrow(table(run[1]))
    assert isinstance(frame, polars.DataFrame)
    np.testing.assert_array_equal(np.stack(frame["logits"].to_list()), wide)
    (recipe,) = [code for code in _python_of(README) if "ipc.open_stream" in code]
    port = urlsplit(world.servers(SMOLLM2).url).port
    names: dict[str, Any] = {}
    exec(recipe.replace("8000", str(port)), names)
    names["connection"].close()
    assert names["logits"].shape == (names["table"].num_rows, VOCAB_SIZE)


@check("BL-162")
def _halves_decode_everywhere(run: Run, world: World) -> None:
    narrow, wide = arrow_rows(run[0]), arrow_rows(run[1])
    np.testing.assert_allclose(narrow.astype(np.float32), wide, rtol=2**-10, atol=REFERENCE_TOLERANCE)
    # IEEE 754-2008, section 3.6: sign, five bits of exponent biased by 15, ten of fraction.
    halves = narrow.view(np.uint16).astype(np.int64)
    sign, exponent, fraction = np.where(halves >> 15, -1.0, 1.0), halves >> 10 & 31, halves & 1023
    by_hand = np.where(
        exponent == 0, sign * fraction * 2.0**-24, sign * (1 + fraction / 1024) * 2.0 ** (exponent - 15.0)
    )
    assert (exponent < 31).all()
    np.testing.assert_array_equal(by_hand, narrow.astype(np.float64))


def _python_of(page: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
