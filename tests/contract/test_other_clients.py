"""Clients that other people wrote: the OpenAI SDK, pyarrow and polars."""

import io

import numpy as np
import openai
import polars
import pyarrow as pa
import pytest

from tests.serving import ServerThread

ARROW = "application/vnd.apache.arrow.stream"
SCRIPT = "Hello from the scripted model."


@pytest.fixture
def sdk(scripted: ServerThread) -> openai.OpenAI:
    with openai.OpenAI(base_url=f"{scripted.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_the_sdk_lists_models_and_chats(sdk: openai.OpenAI) -> None:
    (model,) = sdk.models.list().data
    answer = sdk.chat.completions.create(
        model=model.id,
        messages=[{"role": "user", "content": "hi"}],
        max_completion_tokens=5,
        temperature=0,
        logprobs=True,
        top_logprobs=2,
        extra_body={"return_logits": True},
    )
    (choice,) = answer.choices
    assert choice.message.content == SCRIPT[:5]
    assert choice.finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 5
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    assert [each.token for each in choice.logprobs.content] == list(SCRIPT[:5])
    assert [len(each.top_logprobs) for each in choice.logprobs.content] == [2] * 5
    assert choice.model_extra is not None
    assert choice.model_extra["logits"]["shape"] == [5, 512]


def test_the_sdk_finds_models_by_id(sdk: openai.OpenAI) -> None:
    assert sdk.models.retrieve("scripted").id == "scripted"
    with pytest.raises(openai.NotFoundError):
        sdk.models.retrieve("other")


def test_the_sdk_sees_what_is_wrong(sdk: openai.OpenAI) -> None:
    with pytest.raises(openai.UnprocessableEntityError) as caught:
        sdk.chat.completions.create(
            model="scripted", messages=[{"role": "user", "content": "hi"}], temperature=-1
        )
    assert (caught.value.code, caught.value.param) == ("invalid_value", "temperature")


async def test_the_async_sdk_chats(scripted: ServerThread) -> None:
    async with openai.AsyncOpenAI(base_url=f"{scripted.url}/v1", api_key="none", max_retries=0) as client:
        answer = await client.chat.completions.create(
            model="scripted", messages=[{"role": "user", "content": "hi"}], temperature=0
        )
    assert answer.choices[0].message.content == SCRIPT


def test_pyarrow_reads_rows_without_copying(scripted: ServerThread) -> None:
    body = scripted.chat(headers={"accept": ARROW}, max_tokens=4).body
    address = pa.py_buffer(body).address
    for batch in pa.ipc.open_stream(body):
        rows = batch["logits"].flatten().to_numpy(zero_copy_only=True)
        if len(rows):
            assert address <= rows.ctypes.data < address + len(body)


def test_polars_reads_float32_rows(scripted: ServerThread) -> None:
    reply = scripted.chat(headers={"accept": ARROW}, max_tokens=4, logits_encoding="b64_fp32")
    frame = polars.read_ipc_stream(io.BytesIO(reply.body), use_pyarrow=False)
    assert frame["token"].to_list() == list(SCRIPT[:4])
    rows = frame["logits"].to_numpy()
    assert np.stack(list(rows)).argmax(-1).tolist() == frame["token_id"].to_list()
