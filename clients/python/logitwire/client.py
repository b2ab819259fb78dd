"""The synchronous client. It uses the standard library's HTTP, which can receive into memory that exists."""

import http.client
import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, Self
from urllib.parse import urlsplit

import msgspec
import numpy as np
from numpy.typing import NDArray

from logitwire.arrow import MEDIA_TYPE, Table, read_table
from logitwire.errors import APIError, ConnectionFailedError, IncompleteStreamError

ENCODINGS = {"float16": "b64_fp16", "float32": "b64_fp32"}


@dataclass(frozen=True, slots=True, eq=False)
class ChatResult:
    """One completion of T tokens, the end token included if one was generated.

    Attributes:
        text: What the model said; stop strings and special tokens are cut from it only.
        reasoning: What it thought before that, if the server splits that off and it is not hidden.
        segments: T words: "content", "reasoning", "tool" or "special".
        token_ids: T ids.
        tokens: T token texts.
        logprobs: float32 (T,): log-softmax of the raw row over all of V, at the emitted token.
        logits: (T, V) float16 or float32, read-only. ``logits[t]`` is the distribution that produced token t.
            It is the memory that was received into. ``None`` if no rows were asked for.
        prompt_logits: (P - 1, V), read-only, with ``return_prompt_logits=True``: the rows that predict the
            prompt's tokens 1 to P-1.
        finish_reason: "stop", "length" or "tool_calls"; the calls are in ``response``.
        stop_reason: The stop string or stop token id that was met, if any.
        usage: Token counts.
        metadata: What the numbers are: ``source_dtype``, ``wire_dtype``, ``vocab_size`` and so on.
        response: The whole answer without rows, as OpenAI's shape.
        columns: The stream's other columns by name, such as ``entropy`` with ``token_stats=True``, or
            ``selected_logits`` with ``logit_token_ids``.
    """

    text: str
    reasoning: str | None
    segments: list[str]
    token_ids: list[int]
    tokens: list[str]
    logprobs: NDArray[np.float32]
    logits: NDArray[np.floating] | None
    prompt_logits: NDArray[np.floating] | None
    finish_reason: str
    stop_reason: str | int | None
    usage: dict[str, Any]
    metadata: dict[str, Any]
    response: dict[str, Any]
    columns: dict[str, list[Any]]


@dataclass(frozen=True, slots=True, eq=False)
class ScoreResult:
    """T rows of one sequence of given tokens: what the model says of tokens that it did not choose.

    Attributes:
        token_ids: All ids of the sequence, those without a row too.
        positions: T places in ``token_ids``. The row at position i predicts token i, so position 0 has none.
            With ``next_token=True`` the last one lies behind the last token.
        segments: T words: "prompt" for context, "content" for what follows it.
        tokens: T token texts.
        logprobs: float32 (T,): log-softmax of the raw row over all of V, at the token that is there; 0 for a
            ``next_token`` row.
        logits: (T, V) float16 or float32, read-only. ``logits[t]`` is the distribution that predicts
            ``token_ids[positions[t]]``. It is the memory that was received into. ``None`` if no rows were
            asked for.
        metadata: What the numbers are: ``source_dtype``, ``wire_dtype``, ``vocab_size`` and so on.
        response: The whole answer without numbers, all sequences in it, with ``usage``.
        columns: The other columns of these rows by name, such as ``entropy`` with ``token_stats=True``,
            ``top_token_ids`` and ``top_logprobs`` with ``top_logprobs``, or ``selected_logits``.
    """

    token_ids: list[int]
    positions: list[int]
    segments: list[str]
    tokens: list[str]
    logprobs: NDArray[np.float32]
    logits: NDArray[np.floating] | None
    metadata: dict[str, Any]
    response: dict[str, Any]
    columns: dict[str, list[Any]]


class Client:
    """Talks to one server. Each call opens its own connection, so threads may share a client."""

    def __init__(self, base_url: str, *, api_key: str | None = None, timeout_s: float = 600.0) -> None:
        """Remember where the server is; connects only when called.

        Args:
            base_url: Such as ``http://127.0.0.1:8000``; a trailing ``/v1`` is allowed.
            api_key: Sent as a bearer token, if given.
            timeout_s: Seconds to wait for the next bytes at most.

        Raises:
            ValueError: The address is no http or https URL.
        """
        parts = urlsplit(base_url)
        if parts.scheme not in ("http", "https") or parts.hostname is None:
            raise ValueError(f"not an http or https URL: {base_url!r}")
        self._is_tls = parts.scheme == "https"
        self._host, self._port = parts.hostname, parts.port
        self._prefix = parts.path.rstrip("/").removesuffix("/v1")
        self._api_key = api_key
        self._timeout_s = timeout_s

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Nothing is held between calls, so there is nothing to close."""

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        max_tokens: int | None = None,
        temperature: float | None = None,
        top_p: float | None = None,
        top_k: int | None = None,
        seed: int | None = None,
        stop: str | Sequence[str] | None = None,
        logits: Literal["float16", "float32"] | None = "float16",
        **options: Any,
    ) -> ChatResult:
        """Continue a conversation, and return it with its rows.

        Args:
            messages: OpenAI's messages.
            max_tokens: Tokens at most; ``None`` leaves it to the server.
            temperature: 0 is greedy.
            top_p: Nucleus; 1 is off.
            top_k: 0 is off.
            seed: Makes a draw reproducible.
            stop: Strings that end the text.
            logits: The dtype of the rows; ``None`` asks for none.
            **options: Any other field of the request, such as ``repetition_penalty`` or ``model``.

        Raises:
            ValueError: ``logits`` is none of its values, or ``n`` is not 1.
            APIError: The server refused or failed the request.
            ConnectionFailedError: There was no answer.
            IncompleteStreamError: The answer broke off.
        """
        if logits not in (None, *ENCODINGS):
            raise ValueError(f"logits must be 'float16', 'float32' or None, not {logits!r}")
        if options.get("n", 1) != 1:
            raise ValueError("one completion per call")
        body: dict[str, Any] = {
            "messages": messages,
            "max_tokens": max_tokens,
            "temperature": temperature,
            "top_p": top_p,
            "top_k": top_k,
            "seed": seed,
            "stop": stop,
            "return_logits": logits is not None,
            "logits_encoding": ENCODINGS[logits or "float16"],
            "return_token_ids": True,
            **options,
        }
        sent = {name: value for name, value in body.items() if value is not None}
        table = self._post_for_table(
            "/v1/chat/completions", sent, max_rows=None if max_tokens is None else int(max_tokens)
        )
        choice = table.end["choices"][0]
        # With return_prompt_logits, the prompt's rows come first.
        num_prompt = table.columns["segment"].count("prompt")
        return ChatResult(
            text=choice["message"]["content"] or "",
            reasoning=choice["message"].get("reasoning_content"),
            segments=table.columns["segment"][num_prompt:],
            token_ids=table.columns["token_id"][num_prompt:],
            tokens=table.columns["token"][num_prompt:],
            logprobs=np.asarray(table.columns["logprob"][num_prompt:], np.float32),
            logits=None if table.logits is None else table.logits[num_prompt:],
            prompt_logits=None if table.logits is None or not num_prompt else table.logits[:num_prompt],
            finish_reason=choice["finish_reason"],
            stop_reason=choice["stop_reason"],
            usage=table.end["usage"],
            metadata=table.end["metadata"],
            response=table.end,
            columns=table.columns,
        )

    def score(
        self,
        sequences: Sequence[Mapping[str, Any]],
        *,
        logits: Literal["float16", "float32"] | None = "float16",
        **options: Any,
    ) -> list[ScoreResult]:
        """Return the rows that predict given tokens; nothing is generated.

        Args:
            sequences: 1 to 64, each ``{"token_ids": [...]}``, ``{"text": "..."}`` or ``{"messages": [...],
                "completion": "..."}``. ``prompt_length`` may be added: tokens that are context only.
            logits: The dtype of the rows; ``None`` asks for none.
            **options: Any other field of the request, such as ``range``, ``next_token``, ``token_stats``,
                ``top_logprobs`` or ``logit_token_ids``.

        Returns:
            One result per sequence, in their order.

        Raises:
            ValueError: ``logits`` is none of its values.
            APIError: The server refused or failed the request.
            ConnectionFailedError: There was no answer.
            IncompleteStreamError: The answer broke off.
        """
        if logits not in (None, *ENCODINGS):
            raise ValueError(f"logits must be 'float16', 'float32' or None, not {logits!r}")
        body: dict[str, Any] = {
            "sequences": sequences,
            "return_logits": logits is not None,
            "logits_encoding": ENCODINGS[logits or "float16"],
            **options,
        }
        sent = {name: value for name, value in body.items() if value is not None}
        table = self._post_for_table(
            "/v1/logits", sent, max_rows_of=[_max_rows(each, options) for each in sequences]
        )
        places: list[list[int]] = [[] for _ in sequences]
        for place, choice in enumerate(table.columns.get("choice", ())):
            places[choice].append(place)
        results = []
        for index, own in enumerate(places):
            columns = {name: [values[place] for place in own] for name, values in table.columns.items()}
            data = table.end["data"][index]
            results.append(
                ScoreResult(
                    token_ids=data["token_ids"],
                    positions=data["positions"],
                    segments=columns.get("segment", []),
                    tokens=columns.get("token", []),
                    logprobs=np.asarray(columns.get("logprob", []), np.float32),
                    logits=None if table.parts is None else table.parts[index],
                    metadata=table.end["metadata"],
                    response=table.end,
                    columns=columns,
                )
            )
        return results

    def _post_for_table(
        self,
        path: str,
        body: Mapping[str, Any],
        *,
        max_rows: int | None = None,
        max_rows_of: Sequence[int | None] | None = None,
    ) -> Table:
        headers = {"content-type": "application/json", "accept": MEDIA_TYPE}
        if self._api_key is not None:
            headers["authorization"] = f"Bearer {self._api_key}"
        connection = self._connection()
        try:
            try:
                connection.request("POST", self._prefix + path, msgspec.json.encode(body), headers)
                response = connection.getresponse()
            except (OSError, http.client.HTTPException) as error:
                raise ConnectionFailedError(f"no answer from {self._host}: {error}") from error
            request_id = response.headers.get("x-request-id")
            try:
                if response.status != 200:
                    raise APIError(response.status, _error_of(response.read()), request_id)
                if response.headers.get_content_type() != MEDIA_TYPE:
                    raise IncompleteStreamError(
                        f"the answer is {response.headers.get_content_type()}, not Arrow"
                    )
                return read_table(
                    response.readinto, max_rows=max_rows, max_rows_of=max_rows_of, request_id=request_id
                )
            except (OSError, http.client.HTTPException) as error:
                raise IncompleteStreamError(f"the answer broke off: {error!r}") from error
        finally:
            connection.close()

    def _connection(self) -> http.client.HTTPConnection:
        if self._is_tls:
            context = ssl.create_default_context()
            return http.client.HTTPSConnection(
                self._host, self._port, timeout=self._timeout_s, context=context
            )
        return http.client.HTTPConnection(self._host, self._port, timeout=self._timeout_s)


def _max_rows(sequence: Mapping[str, Any], options: Mapping[str, Any]) -> int | None:
    """Return how many rows a sequence has, if its tokens are known here; what is wrong, the server says."""
    token_ids, prompt_length = sequence.get("token_ids"), sequence.get("prompt_length")
    if not isinstance(token_ids, Sequence):
        return None
    start = 1
    if isinstance(prompt_length, int) and options.get("range") != "all":
        start = max(1, prompt_length)
    return max(0, len(token_ids) - start + bool(options.get("next_token")))


def _error_of(body: bytes) -> dict[str, Any]:
    """Return the error of an envelope; a proxy may answer with something else."""
    try:
        error = msgspec.json.decode(body)["error"]
    except (msgspec.DecodeError, KeyError, TypeError):
        return {"message": body[:200].decode(errors="replace")}
    return error if isinstance(error, dict) else {"message": str(error)}
