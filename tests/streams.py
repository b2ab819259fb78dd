"""Server-sent events taken apart, and put together again as the whole answer that they must equal."""

import json
from typing import Any


def events_of(body: bytes) -> list[Any]:
    """Return the chunks of a whole stream, which ends with its mark."""
    blocks = body.decode().split("\n\n")
    assert blocks.pop() == ""
    lines = [block for block in blocks if not block.startswith(":")]
    assert all(line.startswith("data: ") and "\n" not in line for line in lines)
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def chat_of(chunks: list[Any]) -> dict[str, Any]:
    """Return the choices that chat chunks add up to, in the shape of the whole answer, by index."""
    choices: dict[int, Any] = {}
    finished: set[int] = set()
    for chunk in chunks:
        for part in chunk["choices"]:
            assert part["index"] not in finished
            choice = choices.setdefault(part["index"], {"index": part["index"], "message": {}})
            _add_delta(choice["message"], part["delta"])
            _add_numbers(choice, part)
            if part["logprobs"] is not None:
                held = choice.setdefault("logprobs", {})
                for name, entries in part["logprobs"].items():
                    if entries is not None:
                        held.setdefault(name, []).extend(entries)
            if part["finish_reason"] is not None:
                finished.add(part["index"])
                choice |= {name: part[name] for name in ("finish_reason", "stop_reason")}
    assert finished == set(choices)
    return choices


def _add_delta(message: dict[str, Any], delta: dict[str, Any]) -> None:
    for name in ("content", "reasoning_content"):
        if name in delta:
            message[name] = message.get(name, "") + delta[name]
    if "role" in delta:
        assert "role" not in message
        message["role"] = delta["role"]
    for part in delta.get("tool_calls", ()):
        calls = message.setdefault("tool_calls", [])
        if part["index"] == len(calls):
            function = {"name": part["function"]["name"], "arguments": ""}
            calls.append({"id": part["id"], "type": part["type"], "function": function})
        calls[part["index"]]["function"]["arguments"] += part["function"]["arguments"]


def completion_of(chunks: list[Any]) -> dict[int, Any]:
    """Return the choices that legacy chunks add up to, by index."""
    choices: dict[int, Any] = {}
    for chunk in chunks:
        for part in chunk["choices"]:
            choice = choices.setdefault(part["index"], {"index": part["index"], "text": "", "logprobs": None})
            choice["text"] += part["text"]
            _add_numbers(choice, part)
            if part["logprobs"] is not None:
                choice["logprobs"] = choice["logprobs"] or {}
                for name, values in part["logprobs"].items():
                    choice["logprobs"].setdefault(name, []).extend(values)
            if part["finish_reason"] is not None:
                choice |= {name: part[name] for name in ("finish_reason", "stop_reason")}
    return choices


def _add_numbers(choice: dict[str, Any], part: dict[str, Any]) -> None:
    for name in ("token_ids", "segments"):
        if name in part:
            choice.setdefault(name, []).extend(part[name])
    if "logits" in part:
        block = choice.setdefault(
            "logits", part["logits"] | {"shape": [0, part["logits"]["shape"][1]], "data": []}
        )
        block["data"] += part["logits"]["data"]
        block["shape"] = [len(block["data"]), block["shape"][1]]
    if "selected_logits" in part:
        block = choice.setdefault("selected_logits", part["selected_logits"] | {"values": []})
        block["values"] += part["selected_logits"]["values"]
    for name, values in part.get("token_stats", {}).items():
        choice.setdefault("token_stats", {}).setdefault(name, []).extend(values)
