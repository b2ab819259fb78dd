"""Bodies that are nearly right: those of the OpenAPI document's examples, with one thing or two wrong."""

import copy
import json
from collections.abc import Callable
from random import Random
from typing import Any

LEAVES: list[Any] = [
    *(None, True, False, 0, -1, 1, 2, 3, 0.5, -0.0, 1e-320, 1e308, 2**31, 2**53, 2**63 - 1, 2**63, -(2**64)),
    *(
        "",
        "x",
        "\x00",
        "\ufeff",
        "\U0010ffff",
        "\u202e",
        "<|im_end|>",
        "json",
        "b64_fp32",
        "null",
        "5",
        "x" * 3000,
    ),
    *(
        [],
        {},
        [[]],
        [{}],
        {"": {}},
        [None],
        ["a", 1],
        [0] * 300,
        {"type": "json_object"},
        {"a": {"a": {"a": 1}}},
    ),
]

# What no encoder writes.
LITERALS = [
    *(
        b"NaN",
        b"Infinity",
        b"-Infinity",
        b"1e999",
        b"-1e999",
        b"1" * 400,
        b"0." + b"0" * 400 + b"1",
        b"-0",
        b"01",
    ),
    *(
        b"+1",
        b"1.",
        b".5",
        b"0x10",
        b"'x'",
        b"undefined",
        b'"\\ud800"',
        b'"\\udc00\\ud800"',
        b'"\\u12"',
        b'"\\x"',
    ),
    *(b'"\x00"', b'"\t"', b'"\xff\xfe"', b'"\xed\xa0\x80"', b'"\xc0\xaf"', b"[1,]", b"{,}", b'{"a":1 "b":2}'),
    *(b"/* x */ 1", b"[" * 3000, b"[" * 90 + b"]" * 90, b'{"a":' * 200 + b"1" + b"}" * 200, b'{"a":1,"a":2}'),
]


def examples(document: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Return paths of an OpenAPI document with bodies that they take."""
    found: list[tuple[str, dict[str, Any]]] = []
    for path, operations in document["paths"].items():
        if "post" in operations:
            content = operations["post"]["requestBody"]["content"]["application/json"]
            streams = "text/event-stream" in operations["post"]["responses"]["200"]["content"]
            found += [(path, {**content["example"], **more}) for more in ({}, *(STREAMED if streams else ()))]
    return found


STREAMED: list[dict[str, Any]] = [
    {"stream": True, "stream_options": {"include_usage": True}, "n": 2},
    {"return_logits": True, "return_prompt_logits": True, "stop": ["zz"], "logit_bias": {"65": 1}},
    {"token_stats": True, "logit_token_ids": [1, 2, 3]},
]
"""What else a generation may ask for."""


def _places(value: Any) -> list[tuple[Any, Any]]:
    """Return every container in a value with each of its keys."""
    places: list[tuple[Any, Any]] = []
    if isinstance(value, dict | list):
        keys: list[Any] = list(value) if isinstance(value, dict) else list(range(len(value)))
        for key in keys:
            places += [(value, key), *_places(value[key])]
    return places


MARK = "5e1f-here"


def _with_literal(chance: Random, body: Any, literal: bytes) -> bytes:
    """Return a body with something in it that is no JSON."""
    where, key = chance.choice(_places(body))
    where[key] = MARK
    return json.dumps(body).encode().replace(f'"{MARK}"'.encode(), literal)


def _leaf(chance: Random, body: Any) -> bytes:
    for _ in range(chance.choice((1, 1, 2))):
        where, key = chance.choice(_places(body))
        where[key] = copy.deepcopy(chance.choice(LEAVES))
    return json.dumps(body).encode("utf-8", "surrogatepass")


def _literal(chance: Random, body: Any) -> bytes:
    return _with_literal(chance, body, chance.choice(LITERALS))


def _without(chance: Random, body: Any) -> bytes:
    where, key = chance.choice(_places(body))
    del where[key]
    return json.dumps(body).encode()


def _stranger(chance: Random, body: Any) -> bytes:
    body[chance.choice(("return_logit", "", "\x00", "a.b", "__proto__", "x" * 5000, "model\x00"))] = 1
    return json.dumps(body, ensure_ascii=chance.random() < 0.5).encode()


def _twice(chance: Random, body: Any) -> bytes:
    text = json.dumps(body)
    key = chance.choice(list(body))
    return f"{{{json.dumps(key)}: {json.dumps(body[key])}, {text[1:]}".encode()


def _cut(chance: Random, body: Any) -> bytes:
    text = json.dumps(body).encode()
    return text[: chance.randrange(len(text))]


def _flipped(chance: Random, body: Any) -> bytes:
    text = bytearray(json.dumps(body).encode())
    for _ in range(chance.randint(1, 4)):
        text[chance.randrange(len(text))] ^= 1 << chance.randrange(8)
    return bytes(text)


def _stuffed(chance: Random, body: Any) -> bytes:
    text = json.dumps(body).encode()
    place = chance.randrange(len(text))
    return text[:place] + chance.randbytes(chance.randint(1, 20)) + text[place:]


def _encoded(chance: Random, body: Any) -> bytes:
    return json.dumps(body).encode(chance.choice(("utf-16", "utf-16-le", "utf-32", "utf-8-sig", "utf-7")))


def _around(chance: Random, body: Any) -> bytes:
    text = json.dumps(body).encode()
    return (
        chance.choice(
            (b"[%s]", b"%s%s" % (text, b"%s"), b"%s,", b"\x00%s", b"%s\x00", b"\n\t %s \r\n", b'"%s"')
        )
        % text
    )


MUTATIONS: dict[str, Callable[[Random, Any], bytes]] = {
    "as it is": lambda _, body: json.dumps(body).encode(),
    "other values": _leaf,
    "no JSON inside": _literal,
    "a field missing": _without,
    "an unknown field": _stranger,
    "a key twice": _twice,
    "cut": _cut,
    "bits flipped": _flipped,
    "bytes between": _stuffed,
    "another encoding": _encoded,
    "something around": _around,
    "empty": lambda *_: b"",
    "noise": lambda chance, _: chance.randbytes(chance.randint(1, 400)),
}
"""What may be wrong with a body, by name."""
