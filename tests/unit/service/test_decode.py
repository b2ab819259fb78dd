import json
from typing import Any

import pytest

from schemas.chat import ChatRequest
from service.decode import MAX_PARTS, check_content_type, decode, num_parts
from service.errors import MAX_ECHO, Problem, ProblemsError, ServiceError

MESSAGES = [{"role": "user", "content": "hi"}]


def read(**fields: Any) -> ChatRequest:
    body = json.dumps({"messages": MESSAGES, **fields}).encode()
    return decode(ChatRequest, body, ignore_unknown=False)


def problems_of(body: bytes) -> list[Problem]:
    with pytest.raises(ProblemsError) as caught:
        decode(ChatRequest, body, ignore_unknown=False)
    return caught.value.problems


def problem_of(**fields: Any) -> Problem:
    (problem,) = problems_of(json.dumps({"messages": MESSAGES, **fields}).encode())
    return problem


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b'{"model":',
        b"\xff",
        b'{"a": NaN}',
        b'{"a": Infinity}',
        b'{"a": "\\ud800"}',
        b"{} x",
        b'{"a":1e999}',
        b'{"a":-1e999}',
        b"\xef\xbb\xbf{}",
        '{"a":1}'.encode("utf-16"),
        b'{"a":"\xed\xa0\x80"}',
        b'{"\\udc00":1}',
        b'{"a":01}',
        b"{'a':1}",
        b'{"a":1,}',
        b'{"a":"\x00"}',
        b'{"a":' + b"9" * 5000 + b"}",
    ],
)
def test_what_is_no_json_is_malformed(body: bytes) -> None:
    assert [each.code for each in problems_of(body)] == ["malformed_json"]


FREE_FIELDS = [
    "tools",
    "tool_choice",
    "response_format",
    "chat_template_kwargs",
    "metadata",
    "stream_options",
    "no_such_field",
]


@pytest.mark.parametrize("field", FREE_FIELDS)
@pytest.mark.parametrize(
    "value",
    ["NaN", "-Infinity", "1e999", '"\\ud800"', '{"\\ud83d":1}', '{"k":1,"k":1}', '{"k":1,"\\u006b":2}'],
)
def test_what_is_no_json_is_malformed_at_any_depth(field: str, value: str) -> None:
    body = f'{{"messages":[],"{field}":[{{"a":[0,{{"b":{value}}}]}}]}}'
    assert [each.code for each in problems_of(body.encode())] == ["malformed_json"]


@pytest.mark.parametrize(
    "body",
    [
        '{"messages":[],"max_tokens":1,"max_tokens":2}',
        '{"messages":[{"role":"user","max_tokens":"a: b","max_tokens":null}]}',
        '[{"max_tokens":{}},{"max_tokens":{},"other":":","max_tokens":[]}]',
        '{"messages":[],"max_tokens":1,"max\\u005ftokens":1}',
    ],
)
def test_a_key_that_comes_twice_is_malformed_and_named(body: str) -> None:
    (problem,) = problems_of(body.encode())
    assert problem.code == "malformed_json"
    assert "max_tokens comes twice" in problem.message


def test_a_long_key_that_comes_twice_is_named_in_short() -> None:
    key = "k" * 10_000
    (problem,) = problems_of(f'{{"{key}":1,"{key}":1}}'.encode())
    assert len(problem.message) < MAX_ECHO + 100


def test_one_key_in_two_objects_and_colons_in_texts_are_no_duplicates() -> None:
    texts = ['"a": "b"', "a: b", '\\":', "\\u003a", "{'a':1,'a':2}"]
    messages = [{"role": "user", "content": text} for text in texts]
    assert [each.content for each in read(messages=messages).messages] == texts


@pytest.mark.parametrize("field", ["metadata", "chat_template_kwargs", "stream_options", "response_format"])
@pytest.mark.parametrize("number", [10**400, -(10**400), 2**64], ids=["long", "long negative", "65 bits"])
def test_an_integer_over_64_bits_is_an_invalid_value_at_any_depth(field: str, number: int) -> None:
    problem = problem_of(**{field: {"a": [{"b": number}]}})
    assert (problem.code, problem.param) == ("invalid_value", field)


@pytest.mark.parametrize(
    "field",
    ["temperature", "top_p", "max_tokens", "seed", "top_k", "min_tokens", "priority", "stop_token_ids"],
)
@pytest.mark.parametrize("number", [10**400, -(10**400), 1e300], ids=["long", "long negative", "float"])
def test_a_number_that_no_field_can_hold_names_its_field(field: str, number: float) -> None:
    problem = problem_of(**{field: [number] if field == "stop_token_ids" else number})
    assert problem.code == "invalid_value"
    assert (problem.param or "").partition("[")[0] == field


@pytest.mark.parametrize(("opening", "closing"), [("[", "]"), ('{"a":', "}")])
def test_deep_nesting_is_malformed(opening: str, closing: str) -> None:
    body = '{"x":' + opening * 5000 + "1" + closing * 5000 + "}"
    assert [each.code for each in problems_of(body.encode())] == ["malformed_json"]


@pytest.mark.parametrize("levels", [120, 600, 900])
def test_nesting_that_python_could_just_follow_is_malformed_too(levels: int) -> None:
    call = "[" * levels + "]" * levels
    message = '{"role": "assistant", "content": null, "tool_calls": [{"a": ' + call + "}]}"
    body = '{"messages": [' + message + "]}"
    assert [each.code for each in problems_of(body.encode())] == ["malformed_json"]


def test_a_body_that_is_no_object_is_an_invalid_value() -> None:
    assert [each.code for each in problems_of(b"[]")] == ["invalid_value"]


def test_null_means_absent() -> None:
    assert read(temperature=None, stop=None, max_tokens=None) == read()


def test_zero_is_not_absent() -> None:
    request = read(temperature=0, seed=0, max_tokens=0, top_p=0, top_k=0)
    assert (request.temperature, request.seed, request.max_tokens, request.top_p, request.top_k) == (0,) * 5


def test_whole_floats_are_ints_and_ints_are_floats() -> None:
    request = read(max_tokens=5.0, temperature=1, stop_token_ids=[3.0])
    assert (request.max_tokens, request.temperature, request.stop_token_ids) == (5, 1.0, [3])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", "5"),
        ("max_tokens", 5.5),
        ("max_tokens", True),
        ("max_tokens", -1),
        ("temperature", "nan"),
        ("temperature", -0.1),
        ("temperature", 1e6),
        ("top_p", 1.5),
        ("top_k", -5),
        ("seed", 2**63),
        ("seed", -(2**63) - 1),
        ("repetition_penalty", 0),
        ("stream", "true"),
        ("stream", 1),
        ("stop", ""),
        ("stop", ["x"] * 17),
        ("top_logprobs", -2),
        ("logits_encoding", "b64_fp8"),
        ("n", 0),
    ],
)
def test_a_wrong_value_names_its_field(name: str, value: Any) -> None:
    problem = problem_of(**{name: value})
    assert (problem.code, problem.param) == ("invalid_value", name)


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ("hi", "messages"),
        ([*MESSAGES, {"role": "wizard", "content": "x"}], "messages[1].role"),
        ([*MESSAGES, *MESSAGES, {"role": "user", "content": 5}], "messages[2].content"),
        ([{"content": "x"}], "messages[0]"),
        ([{"role": "user", "content": [{"text": "x"}]}], "messages[0].content[0]"),
    ],
)
def test_a_fault_in_messages_has_its_path(messages: Any, param: str) -> None:
    problem = problem_of(messages=messages)
    assert (problem.code, problem.param) == ("invalid_value", param)


def test_a_missing_required_field_is_named() -> None:
    (problem,) = problems_of(b"{}")
    assert (problem.code, problem.param) == ("invalid_value", "messages")


def test_an_unknown_field_is_named_with_the_nearest_known_one() -> None:
    problem = problem_of(return_logit=True)
    assert (problem.code, problem.param) == ("unknown_parameter", "return_logit")
    assert "return_logits" in problem.message
    assert "logits_encoding" in problem_of(logits_dtype="float16").message


def test_every_problem_is_reported_once() -> None:
    found = problems_of(json.dumps({"messages": [], "temperature": -1, "x" * 999: 1}).encode())
    assert [each.code for each in found] == ["invalid_value", "invalid_value", "unknown_parameter"]
    assert all(len(each.param or "") <= MAX_ECHO + 1 for each in found)


def test_unknown_fields_of_options_are_named_with_their_path_or_ignored() -> None:
    options = {"include_usage": True, "x": 1, "y": 2}
    problem = problem_of(stream=True, stream_options=options)
    assert (problem.code, problem.param) == ("unknown_parameter", "stream_options.x")
    body = json.dumps({"messages": MESSAGES, "stream": True, "stream_options": options}).encode()
    request = decode(ChatRequest, body, ignore_unknown=True)
    assert request.stream_options is not None
    assert request.stream_options.include_usage


def test_unknown_fields_may_be_ignored() -> None:
    body = json.dumps({"messages": MESSAGES, "return_logit": True}).encode()
    assert decode(ChatRequest, body, ignore_unknown=True) == read()


def test_unknown_fields_inside_messages_are_ignored() -> None:
    assert read(messages=[{**MESSAGES[0], "id": 7, "opts": {"visible": False}}]) == read()


@pytest.mark.parametrize(
    "content_type",
    [None, "", "application/json", "application/json; charset=utf-8", 'Application/JSON;charset="UTF-8"'],
)
def test_json_and_no_type_at_all_are_taken(content_type: str | None) -> None:
    check_content_type(content_type)


@pytest.mark.parametrize(
    "content_type",
    [
        "text/plain",
        "application/x-www-form-urlencoded",
        "multipart/form-data",
        "application/json; charset=utf-16",
    ],
)
def test_other_types_are_refused(content_type: str) -> None:
    with pytest.raises(ServiceError) as caught:
        check_content_type(content_type)
    assert caught.value.code == "unsupported_media_type"


@pytest.mark.parametrize("part", [b"[],", b"[[]],", b"{},", b'{"":1},', b'["",":"],'])
def test_a_body_of_absurdly_many_parts_is_refused_unread(part: bytes) -> None:
    body = b'{"messages":[' + part * MAX_PARTS + b"1]}"
    with pytest.raises(ServiceError) as caught:
        decode(ChatRequest, body, ignore_unknown=False)
    assert (caught.value.code, str(caught.value)) == (
        "request_too_large",
        "a body may have 250,000 lists, objects and keys",
    )


def test_a_text_may_be_full_of_brackets_quotes_and_backslashes() -> None:
    for text in ("[{:", '"[', "\\[", '\\"[', 'a\\\\"[{', "é[:"):
        content = text * MAX_PARTS
        body = json.dumps({"messages": [{"role": "user", "content": content}]}).encode()
        # A list, two objects, and three keys.
        assert num_parts(body) == 6
        assert decode(ChatRequest, body, ignore_unknown=False).messages[0].content == content


def test_as_many_parts_as_may_be_are_read() -> None:
    body = json.dumps(
        {"messages": MESSAGES, "logit_bias": {str(each): 0 for each in range(100_000)}}
    ).encode()
    assert decode(ChatRequest, body, ignore_unknown=False).messages[0].content == "hi"
