"""Legacy completions: prompts of every form, their lists of logprobs, and what they share with chat."""

import io
import json
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from engine.config import EngineConfig
from engine.types import ModelInfo, SamplingParams
from engine.worker import Model
from service.convert.choice import text_offsets
from tests.conftest import Serve
from tests.fakes import hooked_load
from tests.serving import Reply, ServerThread

ARROW = {"accept": "application/vnd.apache.arrow.stream"}


def complete(server: ServerThread, headers: dict[str, str] | None = None, **fields: Any) -> Reply:
    body = {"prompt": "Say:", "temperature": 0, **fields}
    return server.request("POST", "/v1/completions", body, headers)


def choices_of(reply: Reply) -> list[Any]:
    assert reply.status == 200, reply.body
    choices: list[Any] = reply.json["choices"]
    return choices


def test_sixteen_tokens_come_if_nothing_is_said(serve: Serve) -> None:
    reply = complete(serve(hooked_load(script="x" * 50)))
    assert choices_of(reply)[0]["text"] == "x" * 16
    assert reply.json["object"] == "text_completion"
    assert reply.json["usage"]["completion_tokens"] == 16


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("Hi", [b"Hi"]),
        (["Hi", "there"], [b"Hi", b"there"]),
        ([72, 105], [b"Hi"]),
        ([72.0, 105], [b"Hi"]),
        ([[72, 105], [33]], [b"Hi", b"!"]),
    ],
)
def test_a_prompt_has_four_forms(scripted: ServerThread, prompt: Any, expected: list[bytes]) -> None:
    reply = complete(scripted, prompt=prompt, echo=True, return_token_ids=True, max_tokens=1)
    choices = choices_of(reply)
    assert [choice["text"][:-1].encode() for choice in choices] == expected
    ids = (
        [reply.json.get("prompt_token_ids")]
        if len(expected) == 1
        else [choice["prompt_token_ids"] for choice in choices]
    )
    assert [bytes(each) for each in ids] == expected


def test_choices_of_several_prompts_are_in_the_prompts_order(scripted: ServerThread) -> None:
    reply = complete(scripted, prompt=["one", "two"], n=2, echo=True, max_tokens=1, temperature=1)
    assert [(each["index"], each["text"][:3]) for each in choices_of(reply)] == [
        (0, "one"),
        (1, "one"),
        (2, "two"),
        (3, "two"),
    ]
    assert reply.json["usage"]["prompt_tokens"] == 6
    assert reply.json["usage"]["completion_tokens"] == 4


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt[0]"),
        ({"prompt": [[-1]]}, "prompt[0][0]"),
        ({"prompt": [1, True]}, "prompt[1]"),
        ({"prompt": [1.5]}, "prompt[0]"),
        ({"prompt": ["a", 1]}, "prompt[1]"),
        ({"prompt": [[1], "a"]}, "prompt[1]"),
        ({"prompt": [2**63]}, "prompt[0]"),
        ({"prompt": [512]}, "prompt"),
        ({"prompt": [[1], [99999]]}, "prompt[1]"),
        ({"prompt": None}, "prompt"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"logprobs": 6}, "logprobs"),
        ({"logprobs": -1}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"prompt": ["x"] * 300}, "prompt"),
        ({"stream_options": {}}, "stream_options"),
    ],
)
def test_a_wrong_prompt_or_number_names_its_place(
    scripted: ServerThread, fields: dict[str, Any], param: str
) -> None:
    reply = complete(scripted, **fields)
    assert reply.status == 422
    assert (reply.error["code"], reply.error["param"]) == ("invalid_value", param)


def test_the_usual_number_of_tokens_is_no_more_than_there_is_room_for(serve: Serve) -> None:
    reply = complete(serve(max_model_len=10), prompt=[1] * 8)
    assert reply.json["usage"]["completion_tokens"] == 2
    reply = complete(serve(max_model_len=10), prompt="x" * 1000)
    assert reply.status == 413
    assert "at least" in reply.error["message"]


@pytest.mark.parametrize("fields", [{"suffix": "x"}, {"best_of": 2}, {"best_of": 0}])
def test_what_is_not_supported_is_refused(scripted: ServerThread, fields: dict[str, Any]) -> None:
    reply = complete(scripted, **fields)
    assert (reply.status, reply.error["code"]) == (422, "unsupported_parameter")
    assert reply.error["param"] in fields


def test_neutral_values_of_those_are_taken(scripted: ServerThread) -> None:
    assert complete(scripted, suffix=None, best_of=1, logprobs=None, echo=False).status == 200


def test_an_empty_prompt_starts_from_the_start_token(scripted: ServerThread) -> None:
    # This tokenizer has no start token, and its end token stands in.
    assert complete(scripted, prompt="", return_token_ids=True).json["prompt_token_ids"] == [258]


def test_a_prompt_with_max_tokens_0_is_scored(scripted: ServerThread) -> None:
    reply = complete(scripted, prompt="abc", echo=True, logprobs=1, max_tokens=0)
    (choice,) = choices_of(reply)
    assert (choice["text"], choice["finish_reason"]) == ("abc", "length")
    logprobs = choice["logprobs"]
    assert logprobs["tokens"] == ["a", "b", "c"]
    assert logprobs["token_logprobs"][0] is None
    assert logprobs["top_logprobs"][0] is None
    assert all(isinstance(each, float) for each in logprobs["token_logprobs"][1:])
    assert reply.json["usage"]["completion_tokens"] == 0


def test_prompt_scores_are_those_of_the_rows_before(scripted: ServerThread) -> None:
    reply = complete(
        scripted,
        prompt="abcd",
        echo=True,
        logprobs=2,
        max_tokens=1,
        return_prompt_logits=True,
        logits_encoding="json",
        top_k=1,
    )
    (choice,) = choices_of(reply)
    rows = np.array(reply.json["prompt_logits"]["data"], np.float64)  # (3, V)
    logprobs = rows - np.log(np.exp(rows).sum(-1, keepdims=True))
    expected = [logprobs[place, ord(letter)] for place, letter in enumerate("bcd")]
    assert choice["logprobs"]["token_logprobs"][1:4] == pytest.approx(expected, abs=1e-4)
    assert len(choice["logprobs"]["tokens"]) == 5
    assert choice["logits"]["shape"][0] == 1 if "logits" in choice else True


def test_nothing_that_shares_a_string_is_lost(scripted: ServerThread) -> None:
    # The rows' best ids are halves of characters, which all look alike as text.
    reply = complete(scripted, prompt=[200, 201, 202], echo=True, logprobs=5, max_tokens=0)
    logprobs = choices_of(reply)[0]["logprobs"]
    for value, top in zip(logprobs["token_logprobs"][1:], logprobs["top_logprobs"][1:], strict=True):
        assert top["\ufffd"] == value
        assert len(top) in (5, 6)
        assert max(top.values()) >= value


def test_token_strings_may_be_ids_and_offsets_are_of_the_text(scripted: ServerThread) -> None:
    fields: dict[str, Any] = {"prompt": "a🚀b", "echo": True, "logprobs": 1, "max_tokens": 3}
    plain = choices_of(complete(scripted, **fields))[0]
    named = choices_of(complete(scripted, return_tokens_as_token_ids=True, **fields))[0]
    assert named["text"] == plain["text"]
    assert named["logprobs"]["text_offset"] == plain["logprobs"]["text_offset"]
    assert named["logprobs"]["text_offset"][:6] == [0, 1, 1, 1, 1, 2]
    assert named["logprobs"]["tokens"][:2] == ["token_id:97", "token_id:240"]
    assert all(key.startswith("token_id:") for top in named["logprobs"]["top_logprobs"][1:] for key in top)


class _Pieces:
    """Bytes of tokens that are larger than one byte."""

    def __init__(self, *pieces: bytes) -> None:
        self._pieces = pieces

    def token_bytes(self, token_id: int) -> bytes:
        return self._pieces[token_id]

    def is_special(self, token_id: int) -> bool:
        return self._pieces[token_id].startswith(b"<|")


@pytest.mark.parametrize(
    ("pieces", "texts", "expected"),
    [
        ([b"a", b" b", b"c"], ["a", " b", "c"], [0, 1, 3]),
        # A space and half an emoji are one token; the other half begins in the emoji, not at the space.
        ([b"x", b" \xf0\x9f", b"\x98\x80", b"y"], ["x", "", " 😀", "y"], [0, 1, 2, 3]),
        ([b"\xe6\x97", b"\xa5\xe6\x9c", b"\xac!"], ["", "", "日本!"], [0, 0, 1]),
        ([b"a", b"<|e|>", b"b", b"<|e|>"], ["a", "", "b", ""], [0, 1, 1, 2]),
        # Cut at the end, so the parts are not all there.
        ([b"a", b"\xf0\x9f", b"\x98"], ["a", "", "\ufffd"], [0, 1, 1]),
    ],
)
def test_offsets_are_those_of_the_characters_that_tokens_begin_in(
    pieces: list[bytes], texts: list[str], expected: list[int]
) -> None:
    tokenizer: Any = _Pieces(*pieces)
    assert text_offsets(tokenizer, range(len(pieces)), texts) == expected
    assert text_offsets(tokenizer, range(len(pieces)), texts, start=5) == [5 + each for each in expected]


def test_a_stop_string_in_the_prompt_does_not_count(serve: Serve) -> None:
    server = serve(hooked_load(script=" one\nQ: two"))
    (choice,) = choices_of(complete(server, prompt="Q: x\nA:", stop=["Q:"], echo=True))
    assert choice["text"] == "Q: x\nA: one\n"
    assert choice["stop_reason"] == "Q:"


def test_an_arrow_answer_has_the_rows_of_every_prompt(scripted: ServerThread) -> None:
    reply = complete(
        scripted,
        ARROW,
        prompt=["abc", "de"],
        n=2,
        max_tokens=2,
        echo=True,
        logprobs=1,
        return_prompt_logits=True,
    )
    assert reply.status == 200
    with pa.ipc.open_stream(io.BytesIO(reply.body)) as reader:
        batches = list(reader.iter_batches_with_custom_metadata())
    end = json.loads(batches[-1].custom_metadata[b"logitwire.end"])
    table = pa.Table.from_batches([batch.batch for batch in batches])
    rows = [(row["choice"], row["segment"], row["position"]) for row in table.drop(["logits"]).to_pylist()]
    assert sorted(rows) == sorted(
        [(0, "prompt", 0), (0, "prompt", 1), (2, "prompt", 0)]
        + [(choice, "content", place) for choice in range(4) for place in range(2)]
    )
    assert end["rows"] == [4, 2, 3, 2]
    assert end["object"] == "text_completion"
    assert [each["text"][:2] for each in end["choices"]] == ["ab", "ab", "de", "de"]
    assert end["choices"][0]["logprobs"]["text_offset"] == [0, 1, 2, 3, 4]


def test_an_arrow_answer_with_echo_but_no_prompt_rows_has_the_generated_ones(scripted: ServerThread) -> None:
    reply = complete(scripted, ARROW, echo=True, logprobs=1, max_tokens=2)
    with pa.ipc.open_stream(io.BytesIO(reply.body)) as reader:
        assert reader.read_all()["segment"].to_pylist() == ["content", "content"]


# What completions and chat share.


def test_a_bias_moves_the_choice_but_not_the_numbers(scripted: ServerThread) -> None:
    plain = scripted.chat(logprobs=True, top_logprobs=1, max_tokens=1).json["choices"][0]
    biased = scripted.chat(
        logprobs=True, top_logprobs=1, max_tokens=1, logit_bias={str(ord("H")): -100, str(ord("z")): 100}
    ).json["choices"][0]
    assert (plain["message"]["content"], biased["message"]["content"]) == ("H", "z")
    (before,), (after,) = plain["logprobs"]["content"], biased["logprobs"]["content"]
    assert after["top_logprobs"] == before["top_logprobs"]
    assert after["logprob"] < before["logprob"]


def test_penalties_change_what_comes_next(serve: Serve) -> None:
    server = serve(hooked_load(hook=lambda place, row: row.__setitem__(ord("b"), 29.0), script="aaaa"))
    assert server.chat(max_tokens=3).json["choices"][0]["message"]["content"] == "aaa"
    reply = server.chat(max_tokens=3, presence_penalty=2)
    assert reply.json["choices"][0]["message"]["content"] == "aba"
    reply = server.chat(max_tokens=4, frequency_penalty=2)
    assert reply.json["choices"][0]["message"]["content"] == "abab"


def test_all_alternatives_come_where_the_server_allows_it(serve: Serve) -> None:
    server = serve(max_top_logprobs=-1)
    entry = server.chat(logprobs=True, top_logprobs=-1, max_tokens=1).json["choices"][0]["logprobs"][
        "content"
    ][0]
    assert len(entry["top_logprobs"]) == 512
    total = sum(np.exp(each["logprob"]) for each in entry["top_logprobs"])
    assert total == pytest.approx(1, abs=1e-5)
    server = serve(max_top_logprobs=30)
    assert server.chat(logprobs=True, top_logprobs=30, max_tokens=1).status == 200
    assert server.chat(logprobs=True, top_logprobs=31, max_tokens=1).status == 422
    assert complete(server, logprobs=30).status == 200


def with_own_sampling(config: EngineConfig) -> tuple[Model, ModelInfo]:
    model, info = hooked_load(script="abc")(config)
    return model, replace(info, sampling=SamplingParams(temperature=0.0))


def test_the_checkpoints_own_sampling_counts_only_if_that_is_set(serve: Serve) -> None:
    body = {"messages": [{"role": "user", "content": "x"}]}
    for defaults, do_sample in (("openai", True), ("model", False)):
        server = serve(with_own_sampling, sampling_defaults=defaults)
        reply = server.request("POST", "/v1/chat/completions", body)
        assert reply.json["metadata"]["do_sample"] is do_sample


def test_nothing_is_computed_that_nobody_asked_for(
    scripted: ServerThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: Any) -> Any:
        raise AssertionError("somebody computed logprobs")

    monkeypatch.setattr("engine.rows.raw_logprobs", never)
    assert scripted.chat().status == 200
    assert scripted.chat(stream=True, temperature=1).status == 200
    assert complete(scripted, echo=True).status == 200
    assert scripted.chat(logprobs=True).status == 500
