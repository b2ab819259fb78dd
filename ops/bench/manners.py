"""The clients of the soak: what each kind asks for, how it behaves, and how its answer may end."""

import json
import threading
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

from ops.bench.clients import Ask, ask
from ops.fuzz.bodies import examples
from ops.fuzz.firing import fire
from ops.fuzz.requests import shot

STALL_TIMEOUT_S = 2.0
MAX_BODY_BYTES = 2**20
MAX_LOGIT_TOKENS = 256
MAX_MODEL_LEN = 512
OUTBOX_BYTES = 2**20
TIMEOUT_S = 180.0
"""For any byte of an answer, queue included."""


def settings_for() -> dict[str, str]:
    """Return the settings that make these clients meet the server's limits."""
    return {
        "STALL_TIMEOUT": str(STALL_TIMEOUT_S),
        "MAX_BODY_BYTES": str(MAX_BODY_BYTES),
        "MAX_LOGIT_TOKENS": str(MAX_LOGIT_TOKENS),
        "MAX_MODEL_LEN": str(MAX_MODEL_LEN),
        "OUTBOX_BYTES": str(OUTBOX_BYTES),
    }


@dataclass(frozen=True, slots=True)
class Manner:
    """One kind of client.

    Attributes:
        kind: Its name.
        weight: How often it comes, beside the others.
        behave: Sends one request to a server, and returns how that ended.
        allowed: The ends that the contract allows.
    """

    kind: str
    weight: int
    behave: Callable[[str, Random], str]
    allowed: frozenset[str]


CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
GENERATE = "/inference/v1/generate"
LOGITS = "/v1/logits"

FULL = frozenset({"whole", "refused queue_full"})


def _chat(chance: Random) -> dict[str, Any]:
    subject = chance.choice(("bread", "rain", "two rivers", "the last train", "a lighthouse", "winter"))
    return {"messages": [{"role": "user", "content": f"Write about {subject}."}], **_sampling(chance)}


def _completion(chance: Random) -> dict[str, Any]:
    return {
        "prompt": chance.choice(("The capital of France is", "Once upon a time", "1, 2, 3,")),
        **_sampling(chance),
    }


def _sampling(chance: Random) -> dict[str, Any]:
    chosen = chance.choice(
        ({"temperature": 0}, {"temperature": 0.7, "top_p": 0.9}, {"top_k": 20, "min_p": 0.1})
    )
    return {"max_tokens": chance.choice((2, 6, 12)), "seed": chance.randrange(100), **chosen}


def _ids(chance: Random) -> list[int]:
    return [chance.randrange(250) for _ in range(chance.randint(1, 60))]


def _text(chance: Random) -> str:
    return "It was a dark and stormy night. " * chance.randint(1, 8)


ROWS = {"token_stats": True, "return_logits": False}

Body = Callable[[Random], dict[str, Any]]

PLAIN: list[tuple[str, str, bool, Body]] = [
    (
        "chat, JSON",
        CHAT,
        False,
        lambda c: {**_chat(c), "logprobs": True, "top_logprobs": 5, "n": c.choice((1, 3))},
    ),
    ("chat, JSON rows", CHAT, False, lambda c: {**_chat(c), "return_logits": True, "max_tokens": 4}),
    (
        "chat, events",
        CHAT,
        False,
        lambda c: {**_chat(c), "stream": True, "n": c.choice((1, 2)), "logprobs": True},
    ),
    ("chat, Arrow", CHAT, True, lambda c: {**_chat(c), "token_stats": True}),
    ("completions, JSON", COMPLETIONS, False, lambda c: {**_completion(c), "echo": True, "logprobs": 3}),
    (
        "completions, events",
        COMPLETIONS,
        False,
        lambda c: {**_completion(c), "stream": True, "logit_token_ids": [1, 2]},
    ),
    ("completions, Arrow", COMPLETIONS, True, lambda c: {**_completion(c), "return_prompt_logits": True}),
    (
        "generate, JSON",
        GENERATE,
        False,
        lambda c: {"token_ids": _ids(c), "sampling_params": {**_sampling(c), "logprobs": 2}},
    ),
    ("generate, Arrow", GENERATE, True, lambda c: {"token_ids": _ids(c), "sampling_params": _sampling(c)}),
    ("logits, JSON", LOGITS, False, lambda c: {"sequences": [{"text": _text(c)}] * c.randint(1, 3), **ROWS}),
    ("logits, Arrow", LOGITS, True, lambda c: {"sequences": [{"text": _text(c)}], "top_logprobs": 2}),
    (
        "divergence",
        "/v1/divergence",
        False,
        lambda c: {"p": {"text": _text(c)}, "q": {"text": "So"}, "max_tokens": 6},
    ),
    ("tokenize", "/tokenize", False, lambda c: {"prompt": _text(c)}),
    ("detokenize", "/detokenize", False, lambda c: {"tokens": _ids(c)}),
    ("render", f"{CHAT}/render", False, _chat),
]
"""What is right: name, route, whether Arrow is asked for, body."""


def _plain(name: str, path: str, body: Body, *, is_arrow: bool) -> Manner:
    def behave(url: str, chance: Random) -> str:
        return ask(url, Ask(name, path, body(chance), is_arrow), TIMEOUT_S)

    return Manner(name, 4, behave, FULL)


def _leave(url: str, chance: Random) -> str:
    _, path, is_arrow, body = chance.choice([each for each in PLAIN if each[2] or "events" in each[0]])
    return ask(
        url, Ask("leaves", path, body(chance), is_arrow, leave_after=chance.randint(0, 300_000)), TIMEOUT_S
    )


def _stall(url: str, chance: Random) -> str:
    # Its rows are there at once, and more than the kernel holds for a reader.
    body = {"sequences": [{"token_ids": [chance.randrange(250) for _ in range(MAX_LOGIT_TOKENS)]}]}
    return ask(url, Ask("stalls", LOGITS, body, is_arrow=True, stall_s=3 * STALL_TIMEOUT_S), TIMEOUT_S)


def fill(url: str, chance: Random) -> str:
    """Ask for a completion that fills the context, and so a place in the cache."""
    body = {"token_ids": [chance.randrange(250) for _ in range(MAX_MODEL_LEN - 1)]}
    return ask(url, Ask("fills", GENERATE, body, is_arrow=True), TIMEOUT_S)


def _abort(url: str, chance: Random) -> str:
    request_id = f"soak-{chance.randrange(10**12)}"
    body = {"token_ids": _ids(chance), "request_id": request_id, "sampling_params": {"max_tokens": 100}}
    other = Ask("abort", "/abort_requests", {"request_ids": [request_id]})
    timer = threading.Timer(chance.random() * 3, lambda: ask(url, other, TIMEOUT_S))
    timer.start()
    try:
        return ask(url, Ask("aborted", GENERATE, body, is_arrow=chance.random() < 0.5), TIMEOUT_S)
    finally:
        timer.join()


def _exceed(url: str, chance: Random) -> str:
    body, path = chance.choice(
        (
            ({"messages": [{"role": "user", "content": "x" * (MAX_BODY_BYTES + 1)}]}, CHAT),
            ({"prompt": "one two " * MAX_MODEL_LEN}, COMPLETIONS),
            ({**_chat(chance), "return_logits": True, "max_tokens": MAX_LOGIT_TOKENS + 1}, CHAT),
            ({"prompt": "x", "max_tokens": MAX_MODEL_LEN}, COMPLETIONS),
        )
    )
    return ask(url, Ask("exceeds", path, body), TIMEOUT_S)


def _malform(url: str, chance: Random) -> str:
    with urllib.request.urlopen(f"{url}/schema", timeout=TIMEOUT_S) as response:  # noqa: S310 - our own server
        bodies = examples(json.loads(response.read()))
    ends = fire(url, shot(bodies, chance.randrange(10**9), 0), timeout_s=TIMEOUT_S, is_busy=True)
    return "answered" if ends[-1].isdigit() else ends[-1]


KINDS = [
    *(_plain(name, path, body, is_arrow=is_arrow) for name, path, is_arrow, body in PLAIN),
    Manner("the client leaves", 16, _leave, FULL | {"left"}),
    Manner("the reader stalls", 6, _stall, FULL | {"cut", "failed deadline_exceeded"}),
    Manner("aborted by its id", 6, _abort, FULL),
    Manner(
        "over a limit",
        8,
        _exceed,
        frozenset(
            f"refused {code}"
            for code in ("request_too_large", "context_length_exceeded", "logit_budget_exceeded")
        ),
    ),
    Manner("malformed", 16, _malform, frozenset({"answered", "closed", "reset", "left", "cut"})),
]
"""All that come."""
