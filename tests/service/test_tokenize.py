"""Tokenising over HTTP: the very ids that the other endpoints run, and back."""

from typing import Any

import pytest
from tokenizers.processors import TemplateProcessing

from engine.config import EngineConfig
from engine.types import ModelInfo
from engine.worker import Model
from tests.conftest import Serve
from tests.fakes import hooked_load
from tests.serving import Reply, ServerThread

MESSAGES = [{"role": "user", "content": "Say hi."}]
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


def tokenize(server: ServerThread, **fields: Any) -> Reply:
    return server.request("POST", "/tokenize", fields)


def detokenize(server: ServerThread, **fields: Any) -> Reply:
    return server.request("POST", "/detokenize", fields)


def with_start_token(config: EngineConfig) -> tuple[Model, ModelInfo]:
    model, info = hooked_load()(config)
    start = model.tokenizer.special_token_id("<|endoftext|>")
    assert start is not None
    model.tokenizer._backend.post_processor = TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", start)]
    )
    return model, info


def test_a_text_is_answered_with_its_ids_their_count_and_the_context(scripted: ServerThread) -> None:
    reply = tokenize(scripted, prompt="Hé!")
    assert reply.status == 200
    assert reply.json == {
        "count": 4,
        "max_model_len": 4096,
        "tokens": list("Hé!".encode()),
        "token_strs": None,
    }


def test_token_strings_are_the_vocabularys_spellings(scripted: ServerThread) -> None:
    reply = tokenize(scripted, prompt="a b<|im_end|>", return_token_strs=True)
    assert reply.json["token_strs"] == ["a", "Ġ", "b", "<|im_end|>"]
    assert len(reply.json["tokens"]) == reply.json["count"] == 4


def test_an_empty_text_has_no_tokens(scripted: ServerThread) -> None:
    assert tokenize(scripted, prompt="").json["tokens"] == []


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"add_generation_prompt": False},
        {"add_generation_prompt": False, "continue_final_message": True},
        {"tools": [TOOL]},
        {"tools": []},
        {"chat_template_kwargs": {"enable_thinking": False}},
    ],
)
def test_a_conversation_has_the_prompt_that_the_chat_endpoint_runs(
    scripted: ServerThread, fields: dict[str, Any]
) -> None:
    run = scripted.chat(messages=MESSAGES, return_token_ids=True, max_tokens=1, **fields)
    assert run.status == 200
    reply = tokenize(scripted, messages=MESSAGES, **fields)
    assert reply.json["tokens"] == run.json["prompt_token_ids"]


def test_a_text_gets_special_tokens_and_a_conversation_only_if_asked_for(serve: Serve) -> None:
    server = serve(with_start_token)
    assert tokenize(server, prompt="a").json["tokens"] == [256, 97]
    assert tokenize(server, prompt="a", add_special_tokens=False).json["tokens"] == [97]
    plain = tokenize(server, messages=MESSAGES).json["tokens"]
    assert plain[0] != 256
    assert tokenize(server, messages=MESSAGES, add_special_tokens=True).json["tokens"] == [256, *plain]


def test_what_does_not_fit_the_context_is_counted_all_the_same(serve: Serve) -> None:
    server = serve(max_model_len=16)
    assert tokenize(server, prompt="x" * 1000).json["count"] == 1000
    reply = tokenize(server, messages=[{"role": "user", "content": "x" * 1000}])
    assert reply.json["count"] > 1000
    assert reply.json["max_model_len"] == 16


@pytest.mark.parametrize("text", ["", "Hé 🚀\n<|im_start|>user", "  two  spaces "])
def test_ids_become_the_text_again(scripted: ServerThread, text: str) -> None:
    ids = tokenize(scripted, prompt=text).json["tokens"]
    reply = detokenize(scripted, tokens=ids)
    assert (reply.status, reply.json) == (200, {"prompt": text})


def test_padding_rows_of_the_head_have_no_text(scripted: ServerThread) -> None:
    assert detokenize(scripted, tokens=[72, 511, 105.0]).json == {"prompt": "Hi"}


@pytest.mark.parametrize(
    ("path", "fields", "code", "param"),
    [
        ("/tokenize", {}, "invalid_value", "prompt"),
        ("/tokenize", {"prompt": None, "messages": None}, "invalid_value", "prompt"),
        ("/tokenize", {"prompt": "a", "messages": MESSAGES}, "invalid_value", "prompt"),
        ("/tokenize", {"prompt": 1}, "invalid_value", "prompt"),
        ("/tokenize", {"prompt": ["a"]}, "invalid_value", "prompt"),
        ("/tokenize", {"prompt": "a", "tools": [TOOL]}, "invalid_value", "tools"),
        ("/tokenize", {"messages": []}, "invalid_value", "messages"),
        ("/tokenize", {"messages": [{"role": "x"}]}, "invalid_value", "messages[0].role"),
        ("/tokenize", {"messages": [{"role": "user"}]}, "invalid_value", "messages[0].content"),
        (
            "/tokenize",
            {"messages": MESSAGES, "add_generation_prompt": True, "continue_final_message": True},
            "invalid_value",
            "continue_final_message",
        ),
        ("/tokenize", {"messages": MESSAGES, "chat_template": "x"}, "unsupported_parameter", "chat_template"),
        (
            "/tokenize",
            {"messages": MESSAGES, "chat_template_kwargs": {"tokenize": True}},
            "invalid_value",
            "chat_template_kwargs.tokenize",
        ),
        ("/tokenize", {"prompt": "a", "return_token_str": True}, "unknown_parameter", "return_token_str"),
        ("/tokenize", {"prompt": "a", "add_special_tokens": 1}, "invalid_value", "add_special_tokens"),
        ("/detokenize", {}, "invalid_value", "tokens"),
        ("/detokenize", {"tokens": "ab"}, "invalid_value", "tokens"),
        ("/detokenize", {"tokens": [1, "2"]}, "invalid_value", "tokens[1]"),
        ("/detokenize", {"tokens": [1, True]}, "invalid_value", "tokens[1]"),
        ("/detokenize", {"tokens": [-1]}, "invalid_value", "tokens[0]"),
        ("/detokenize", {"tokens": [1, 512]}, "invalid_value", "tokens[1]"),
        ("/detokenize", {"tokens": [2**40]}, "invalid_value", "tokens[0]"),
        ("/detokenize", {"tokens": [1], "skip": 1}, "unknown_parameter", "skip"),
    ],
)
def test_a_wrong_field_is_named(
    scripted: ServerThread, path: str, fields: dict[str, Any], code: str, param: str
) -> None:
    reply = scripted.request("POST", path, fields)
    assert reply.status == 422
    assert (reply.error["code"], reply.error["param"]) == (code, param)


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize"])
def test_bodies_and_models_are_checked_as_everywhere(scripted: ServerThread, path: str) -> None:
    assert scripted.request("POST", path, b"{").error["code"] == "malformed_json"
    text = scripted.request("POST", path, b"{}", {"content-type": "text/plain"})
    assert text.error["code"] == "unsupported_media_type"
    field = {"prompt": "a"} if path == "/tokenize" else {"tokens": [1]}
    other = scripted.request("POST", path, {"model": "other", **field})
    assert (other.status, other.error["code"]) == (404, "model_not_found")
    assert scripted.request("POST", path, {"model": "scripted", **field}).status == 200


def test_unknown_fields_may_be_ignored(serve: Serve) -> None:
    server = serve(unknown_fields="ignore")
    assert tokenize(server, prompt="a", unheard_of=1).status == 200


def test_a_template_of_the_request_is_used_where_that_is_allowed(serve: Serve) -> None:
    server = serve(allow_chat_template=True)
    reply = tokenize(server, messages=MESSAGES, chat_template="{{ messages[0]['content'] }}")
    assert bytes(reply.json["tokens"]) == b"Say hi."


def test_the_tokenizer_describes_itself(scripted: ServerThread) -> None:
    reply = scripted.request("GET", "/tokenizer_info")
    assert reply.status == 200
    info = reply.json
    assert info["tokenizer_class"]
    assert (info["eos_token"], info["pad_token"]) == ("<|im_end|>", "<|im_end|>")
    # Harnesses look whether the names are there at all.
    assert (info["bos_token"], info["unk_token"]) == (None, None)
    assert "<|im_start|>" in info["chat_template"]
    assert info["model_max_length"] == 4096
    ids = {token["content"]: int(name) for name, token in info["added_tokens_decoder"].items()}
    assert ids["<|im_end|>"] == 258
    assert all(token["special"] for token in info["added_tokens_decoder"].values())
