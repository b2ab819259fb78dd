"""The server as a newcomer starts it: a process of its own, the embedded model, the documented commands."""

import base64
import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from scipy.spatial.distance import jensenshannon
from scipy.special import rel_entr, softmax

from logitwire import APIError, Client, jsd
from ops.process import ServerProcess

ROOT = Path(__file__).resolve().parents[2]
MESSAGES = [{"role": "user", "content": "Say hi in three words."}]

pytestmark = [pytest.mark.model, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    process = ServerProcess(tmp_path_factory.mktemp("server") / "log")
    yield process
    assert process.stop() == 0


def log_lines(server: ServerProcess) -> list[dict[str, Any]]:
    return [json.loads(line) for line in server.log_path.read_text().splitlines() if line.startswith("{")]


def test_it_announces_a_curl_line_that_works_when_pasted(server: ServerProcess) -> None:
    curl = next(line for line in server.said.splitlines() if line.startswith("curl"))
    output = subprocess.run(["sh", "-c", curl], capture_output=True, check=True, text=True).stdout
    choice = json.loads(output)["choices"][0]
    assert choice["message"]["content"]
    assert all(entry["logprob"] < 0 for entry in choice["logprobs"]["content"])


def test_the_device_map_and_request_ids_are_logged(server: ServerProcess) -> None:
    request = urllib.request.Request(f"{server.url}/v1/models", headers={"x-request-id": "from-a-test"})
    urllib.request.urlopen(request).close()
    deadline = time.monotonic() + 20
    while not any(line.get("request_id") == "from-a-test" for line in log_lines(server)):
        assert time.monotonic() < deadline
    assert any(line.get("device_map") == {"": "cpu"} for line in log_lines(server))


def test_a_chat_is_the_same_over_json_arrow_and_the_sdk(server: ServerProcess) -> None:
    result = Client(server.url).chat(MESSAGES, max_tokens=16, temperature=0, logits="float32")
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as sdk:
        answer = sdk.chat.completions.create(
            model=sdk.models.list().data[0].id,
            messages=MESSAGES,  # type: ignore[arg-type]
            max_tokens=16,
            temperature=0,
            logprobs=True,
            top_logprobs=5,
            extra_body={"return_token_ids": True},
        )
    (choice,) = answer.choices
    assert choice.message.content == result.text
    assert choice.model_extra is not None
    assert choice.model_extra["token_ids"] == result.token_ids
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    entries = [each.logprob for each in choice.logprobs.content]
    np.testing.assert_allclose(entries, result.logprobs, atol=1e-4)
    assert result.logits is not None
    assert result.logits.shape == (len(result.token_ids), 49152)
    assert result.logits.argmax(-1).tolist() == result.token_ids
    # The softmax over the whole row is a distribution, and its logarithm is what the server said.
    rows = result.logits.astype(np.float64)
    logprobs = (
        rows
        - np.log(np.exp(rows - rows.max(-1, keepdims=True)).sum(-1, keepdims=True))
        - rows.max(-1, keepdims=True)
    )
    np.testing.assert_allclose(np.exp(logprobs).sum(-1), 1, atol=1e-9)
    np.testing.assert_allclose(logprobs[range(len(rows)), result.token_ids], result.logprobs, atol=1e-4)
    for entry, row in zip(choice.logprobs.content, logprobs, strict=True):
        assert [each.logprob for each in entry.top_logprobs] == pytest.approx(
            list(np.sort(row)[:-6:-1]), abs=1e-4
        )


def test_float16_rows_are_the_float32_rows_rounded(server: ServerProcess) -> None:
    client = Client(server.url)
    wide = client.chat(MESSAGES, max_tokens=4, temperature=0, logits="float32")
    narrow = client.chat(MESSAGES, max_tokens=4, temperature=0, logits="float16")
    assert wide.logits is not None
    assert narrow.logits is not None
    # One float16 step apart at most: the second request starts from the first one's cache, and a row's last
    # float32 bits depend on how many tokens a pass runs.
    np.testing.assert_allclose(narrow.logits.astype(np.float32), wide.logits, rtol=2**-10, atol=1e-3)
    assert jsd(wide.logits, narrow.logits).max() < 1e-5


def test_sampling_settings_never_change_the_first_row(server: ServerProcess) -> None:
    client = Client(server.url)
    plain = client.chat(MESSAGES, max_tokens=1, temperature=0)
    wild = client.chat(
        MESSAGES, max_tokens=1, temperature=1.9, top_p=0.5, top_k=3, repetition_penalty=2.0, seed=1
    )
    assert plain.logits is not None
    assert wild.logits is not None
    # As float32 they agree to 1e-4; float16 may round one of them the other way.
    np.testing.assert_allclose(plain.logits.astype(np.float32), wild.logits, rtol=2**-10, atol=1e-3)


def test_a_history_that_grows_starts_from_the_cache_and_says_so(server: ServerProcess) -> None:
    client = Client(server.url)
    history = [{"role": "user", "content": "Name a colour, an animal and a tool, please."}]
    first = client.chat(history, max_tokens=12, temperature=0)
    history += [{"role": "assistant", "content": first.text}, {"role": "user", "content": "And now others."}]
    second = client.chat(history, max_tokens=4, temperature=0)
    cached = second.usage["prompt_tokens_details"]["cached_tokens"]
    assert first.usage["prompt_tokens"] <= cached + 5
    with urllib.request.urlopen(f"{server.url}/metrics") as reply:
        metrics = reply.read().decode()
    hits = next(line for line in metrics.splitlines() if line.startswith("vllm:prefix_cache_hits_total"))
    assert float(hits.split()[1]) >= cached


def test_a_seed_repeats_its_answer(server: ServerProcess) -> None:
    client = Client(server.url)
    answers = [
        client.chat(MESSAGES, max_tokens=20, temperature=1.0, seed=seed).token_ids for seed in (123, 123, 7)
    ]
    assert answers[0] == answers[1] != answers[2]


def test_a_chat_that_ends_by_itself_keeps_its_end_token_once(server: ServerProcess) -> None:
    result = Client(server.url).chat(MESSAGES, max_tokens=200, temperature=0)
    assert result.finish_reason == "stop"
    assert result.token_ids.count(2) == 1
    assert result.token_ids[-1] == 2
    assert "<|im_end|>" not in result.text
    assert result.usage["completion_tokens"] == len(result.token_ids)


def test_a_stop_string_cuts_the_text_and_keeps_the_tokens(server: ServerProcess) -> None:
    client = Client(server.url)
    messages = [{"role": "user", "content": "List the weekdays in order, separated by commas."}]
    whole = client.chat(messages, max_tokens=40, temperature=0, logits=None)
    assert "Thursday" in whole.text
    cut = client.chat(messages, max_tokens=40, temperature=0, logits=None, stop="Thursday")
    assert cut.text == whole.text[: whole.text.index("Thursday")]
    assert cut.stop_reason == "Thursday"
    assert cut.token_ids == whole.token_ids[: len(cut.token_ids)]


def test_a_prompt_beyond_the_context_is_refused(server: ServerProcess) -> None:
    with pytest.raises(APIError) as caught:
        Client(server.url).chat([{"role": "user", "content": "word " * 9000}], max_tokens=4)
    assert (caught.value.status, caught.value.code) == (413, "context_length_exceeded")


@pytest.mark.parametrize(
    "command",
    [
        [sys.executable, "clients/python/examples/jsd_two_iterations.py", "--max-tokens", "6", "--base-url"],
        ["sh", "clients/curl/examples.sh"],
    ],
)
def test_the_examples_run(server: ServerProcess, command: list[str]) -> None:
    output = subprocess.run(
        [*command, server.url], cwd=ROOT, capture_output=True, check=True, text=True
    ).stdout
    expected = "JSD (bits)" if "jsd" in command[1] else "did you mean return_logits"
    assert expected in output


def test_a_wrong_setting_stops_the_start_with_its_name() -> None:
    process = subprocess.run(
        [sys.executable, "-m", "service"],
        cwd=ROOT,
        env={**os.environ, "MAX_QUEUE": "many"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert process.returncode == 2
    assert "MAX_QUEUE='many'" in process.stderr


def test_a_port_that_is_taken_is_said_in_one_line(server: ServerProcess) -> None:
    port = server.url.rpartition(":")[2]
    process = subprocess.run(
        [sys.executable, "-m", "service"],
        cwd=ROOT,
        env={**os.environ, "MODEL_NAME": "scripted", "PORT": port},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert process.returncode == 1
    assert f"cannot listen on 127.0.0.1:{port}" in process.stderr
    assert "Traceback" not in process.stderr


def test_given_tokens_have_the_rows_of_the_run_that_generated_them(server: ServerProcess) -> None:
    result = Client(server.url).chat(
        MESSAGES, max_tokens=12, temperature=0, logits="float32", ignore_eos=True
    )
    completion = result.response["choices"][0]["token_ids"]
    sequence = {"token_ids": [*result.response["prompt_token_ids"], *completion]}
    sequence["prompt_length"] = len(result.response["prompt_token_ids"])
    text = {"messages": MESSAGES, "completion": "Hi there, you!"}
    asked = {"sequences": [sequence, text], "logits_encoding": "b64_fp32"}
    given, spelt = post(server, "/v1/logits", asked)["data"]
    rows = np.stack([np.frombuffer(base64.b64decode(each), "<f4") for each in given["logits"]["data"]])
    assert result.logits is not None
    np.testing.assert_allclose(rows, result.logits, atol=1e-3)
    assert given["logprobs"] == pytest.approx(result.logprobs.tolist(), abs=1e-3)
    prompt_length = spelt["positions"][0]
    assert spelt["token_ids"][:prompt_length] == result.response["prompt_token_ids"]
    ids = post(
        server,
        "/v1/completions",
        {"prompt": text["completion"], "echo": True, "max_tokens": 0, "return_token_ids": True},
    )
    assert spelt["token_ids"][prompt_length:] == ids["prompt_token_ids"]


def test_a_divergence_is_that_of_the_rows(server: ServerProcess) -> None:
    contexts = {"p": {"messages": MESSAGES}, "q": {"text": "Say hi in three words."}}
    generated = post(server, "/v1/divergence", {**contexts, "max_tokens": 8})
    spoken = Client(server.url).chat(MESSAGES, max_tokens=8, temperature=0)
    assert generated["token_ids"] == spoken.token_ids
    sequences = [
        {"token_ids": [*ids, *spoken.token_ids], "prompt_length": len(ids)}
        for ids in (
            spoken.response["prompt_token_ids"],
            post(server, "/v1/logits", {"sequences": [contexts["q"]], "return_logits": False})["data"][0][
                "token_ids"
            ],
        )
    ]
    data = post(server, "/v1/logits", {"sequences": sequences, "logits_encoding": "b64_fp32"})["data"]
    p, q = (
        softmax(
            np.stack([np.frombuffer(base64.b64decode(row), "<f4") for row in each["logits"]["data"]]).astype(
                np.float64
            ),
            axis=-1,
        )
        for each in data
    )
    np.testing.assert_allclose(generated["jsd"], jensenshannon(p, q, base=2, axis=-1) ** 2, atol=1e-5)
    np.testing.assert_allclose(generated["kl_pq"], rel_entr(p, q).sum(-1) / np.log(2), atol=1e-4)
    np.testing.assert_allclose(generated["tvd"], np.abs(p - q).sum(-1) / 2, atol=1e-5)


def post(server: ServerProcess, path: str, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(
        server.url + path, json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request) as response:
        return json.load(response)


def test_a_signal_while_the_model_loads_ends_it_cleanly(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "service"],
            cwd=ROOT,
            env={**os.environ, "PORT": "0"},
            stdout=output,
            stderr=output,
        )
    deadline = time.monotonic() + 60
    while "loading the model" not in log.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.terminate()
    assert process.wait(60) == 0


def test_a_checkpoint_that_is_not_there_stops_the_start_with_its_name(tmp_path: Path) -> None:
    process = subprocess.run(
        [sys.executable, "-m", "service"],
        cwd=ROOT,
        env={**os.environ, "MODEL_NAME": str(tmp_path / "none"), "PORT": "0", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert process.returncode == 1
    assert str(tmp_path / "none") in process.stderr


def test_rendering_and_generating_give_what_the_chat_gives(server: ServerProcess) -> None:
    body = {
        "messages": [{"role": "user", "content": "Name a colour. Answer with an emoji 🚀 too."}],
        "max_tokens": 24,
        "temperature": 0.7,
        "seed": 11,
        "stop": ["zzz"],
        "logprobs": True,
        "top_logprobs": 3,
        "return_logits": True,
    }
    direct = post(server, "/v1/chat/completions", body)
    rendered = post(server, "/v1/chat/completions/render", body)
    assert rendered["token_ids"] == direct["prompt_token_ids"]
    generated = post(server, "/inference/v1/generate", rendered)
    (own,), (wanted,) = generated["choices"], direct["choices"]
    assert own["message"] == wanted["message"]
    assert own["token_ids"] == wanted["token_ids"]
    assert [each["token"] for each in own["logprobs"]["content"]] == [
        each["token"] for each in wanted["logprobs"]["content"]
    ]
    rows = [
        np.stack([np.frombuffer(base64.b64decode(row), np.float16) for row in choice["logits"]["data"]])
        for choice in (own, wanted)
    ]
    # The second one starts from the first one's cache, so a last bit may differ.
    np.testing.assert_allclose(rows[0].astype(float), rows[1].astype(float), atol=0.02)
    derendered = post(
        server,
        "/v1/chat/completions/derender",
        {"token_ids": own["token_ids"], "parse_context": rendered["parse_context"]},
    )
    assert derendered["message"] == wanted["message"]
