"""Settings from the environment, checked at start. A default is written here or in EngineConfig, once."""

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal, get_args, get_type_hints

import msgspec
from msgspec import Meta

from engine.config import DISK, EngineConfig, parse_device_map
from service.cors import parse_origins
from service.keys import ApiKeys, is_loopback, is_readable_by_all, read_keys


class SettingsError(ValueError):
    """A setting has a value that it cannot have; the message names it."""


SECRETS = frozenset({"api_keys"})
"""Settings whose values are never repeated."""


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """All settings. Each is read from the variable of its name in upper case."""

    model_name: Annotated[
        str,
        Meta(description="Checkpoint name or folder; empty is the embedded SmolLM2, `scripted` a fake one"),
    ] = EngineConfig.model_name
    served_model_name: Annotated[
        str, Meta(description="Name in the API; empty takes the checkpoint's, or its folder's")
    ] = ""
    host: Annotated[str, Meta(description="Address to listen on")] = "127.0.0.1"
    port: Annotated[int, Meta(description="Port to listen on; 0 takes a free one", ge=0, le=65535)] = 8000
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        Meta(description="Of the weights; `auto` is the checkpoint's"),
    ] = "auto"
    device_map: Annotated[
        str,
        Meta(
            description="Where the layers go: `auto`, `balanced`, `cpu`, `cuda:0`, …, or a JSON object from "
            "modules to devices or `disk`"
        ),
    ] = EngineConfig.device_map
    offload_dir: Annotated[
        str, Meta(description="Folder for layers that fit no memory; empty keeps all off the disk")
    ] = EngineConfig.offload_dir
    check_memory: Annotated[bool, Meta(description="Refuse a model that cannot fit, before it is loaded")] = (
        EngineConfig.check_memory
    )
    attn_implementation: Annotated[
        str, Meta(description="`sdpa` (`eager` for models without it) or another one of Transformers'")
    ] = EngineConfig.attn_implementation
    quantization: Annotated[
        Literal["", "4bit", "8bit"], Meta(description="By bitsandbytes; needs the extra `quant`")
    ] = ""
    trust_remote_code: Annotated[bool, Meta(description="Run code that a checkpoint brings")] = (
        EngineConfig.trust_remote_code
    )
    pack_weights: Annotated[
        bool, Meta(description="Reorder float32 weights on the CPU: twice as fast, twice the memory")
    ] = EngineConfig.pack_weights
    cache_dir: Annotated[Path, Meta(description="Where the embedded model is kept in converted form")] = (
        EngineConfig.cache_dir
    )
    threads: Annotated[
        int, Meta(description="CPU threads of a forward pass; 0 leaves torch's choice", ge=0)
    ] = EngineConfig.threads
    max_model_len: Annotated[int, Meta(description="Context in tokens; 0 takes the model's own", ge=0)] = (
        EngineConfig.max_model_len
    )
    max_batch_size: Annotated[int, Meta(description="Sequences that run at once", ge=1)] = (
        EngineConfig.max_batch_size
    )
    max_queue: Annotated[
        int, Meta(description="Requests that wait at most; more are refused with 503", ge=1)
    ] = EngineConfig.max_queue
    prefill_chunk: Annotated[
        int, Meta(description="Prompt tokens that are run between two decode steps", ge=1)
    ] = EngineConfig.prefill_chunk
    kv_cache_bytes: Annotated[
        int,
        Meta(
            description="Bytes of the KV cache; 0 is 80 % of the free memory, on the CPU 4 GiB at most", ge=0
        ),
    ] = EngineConfig.kv_cache_bytes
    row_budget_bytes: Annotated[
        int, Meta(description="Bytes of rows that all running requests together may hold", ge=0)
    ] = EngineConfig.row_budget_bytes
    deadline: Annotated[
        float, Meta(description="Seconds that a request may wait and run; 0 is no limit", ge=0)
    ] = EngineConfig.deadline_s
    max_logit_tokens: Annotated[
        int, Meta(description="Rows of logits that one request may ask for", ge=1)
    ] = 4096
    max_answer_bytes: Annotated[
        int, Meta(description="Bytes of rows that one JSON answer may hold; Arrow streams instead", ge=1)
    ] = 2**30
    outbox_bytes: Annotated[
        int, Meta(description="Bytes of rows that a request may have unread before it pauses", ge=1)
    ] = EngineConfig.outbox_bytes
    stall_timeout: Annotated[
        float, Meta(description="Seconds for which a reader may stall before its request is given up", gt=0)
    ] = EngineConfig.stall_timeout_s
    drain_timeout: Annotated[
        float, Meta(description="Seconds that running requests get to finish after SIGTERM", ge=0)
    ] = 30.0
    max_body_bytes: Annotated[int, Meta(description="Size of a request body at most", ge=1)] = 16 * 2**20
    api_keys: Annotated[
        ApiKeys, Meta(description="Keys with commas between; set, all that computes needs one of them")
    ] = ApiKeys()
    api_keys_file: Annotated[
        str, Meta(description="A file of more keys, one a line; `#` begins a comment")
    ] = ""
    cors_origins: Annotated[
        str,
        Meta(description="Origins whose web pages may use the API, with commas between; `*` is all"),
    ] = ""
    max_top_logprobs: Annotated[
        int,
        Meta(
            description="Alternatives per token that a request may ask for, if more than OpenAI's 20 (chat) "
            "and 5 (completions); -1 lifts the limit",
            ge=-1,
        ),
    ] = 0
    keep_alive: Annotated[
        float, Meta(description="Seconds of silence after which a stream of events gets a comment", gt=0)
    ] = 5.0
    reasoning_parser: Annotated[
        str,
        Meta(
            description="Markers around reasoning, such as `<think>,</think>`; `auto` finds the chat "
            "template's, `off` leaves all text content"
        ),
    ] = "auto"
    tool_parser: Annotated[
        Literal["auto", "off", "hermes", "llama3", "mistral"],
        Meta(description="Form of the model's tool calls; `auto` finds the chat template's"),
    ] = "auto"
    allow_chat_template: Annotated[
        bool, Meta(description="Let a request bring its own chat template; Jinja code that may run long")
    ] = False
    sampling_defaults: Annotated[
        Literal["openai", "model"],
        Meta(description="What a request leaves open is OpenAI's default, or the checkpoint's own"),
    ] = "openai"
    unknown_fields: Annotated[
        Literal["error", "ignore"], Meta(description="What happens to request fields that nobody knows")
    ] = "error"
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], Meta(description="Least level that is logged")
    ] = "info"
    log_format: Annotated[
        Literal["json", "text"], Meta(description="One JSON object or one readable line per event")
    ] = "json"
    log_prompts: Annotated[
        bool, Meta(description="Log the beginnings of prompts and answers, and all that exceptions say")
    ] = False
    skip_tokenizer: Annotated[
        bool, Meta(description="Load no tokenizer: ids in, ids out, and all that needs a text is refused")
    ] = EngineConfig.skip_tokenizer
    script: Annotated[str, Meta(description="What the scripted model says")] = EngineConfig.script

    def engine_config(self) -> EngineConfig:
        """Return the engine's share."""
        return EngineConfig(
            model_name=self.model_name,
            dtype=self.dtype,
            device_map=self.device_map,
            offload_dir=self.offload_dir,
            check_memory=self.check_memory,
            attn_implementation=self.attn_implementation,
            quantization=self.quantization,
            trust_remote_code=self.trust_remote_code,
            pack_weights=self.pack_weights,
            cache_dir=self.cache_dir,
            max_model_len=self.max_model_len,
            max_batch_size=self.max_batch_size,
            max_queue=self.max_queue,
            prefill_chunk=self.prefill_chunk,
            kv_cache_bytes=self.kv_cache_bytes,
            row_budget_bytes=self.row_budget_bytes,
            deadline_s=self.deadline,
            outbox_bytes=self.outbox_bytes,
            stall_timeout_s=self.stall_timeout,
            threads=self.threads,
            skip_tokenizer=self.skip_tokenizer,
            script=self.script,
        )


def load_settings(environ: Mapping[str, str]) -> Settings:
    """Return the settings that an environment states. A variable that is set but empty counts as unset.

    Raises:
        SettingsError: A value is of the wrong type, out of range or not one of those allowed.
    """
    values: dict[str, object] = {}
    for name, hint in get_type_hints(Settings, include_extras=True).items():
        variable = name.upper()
        if not (value := environ.get(variable, "")):
            continue
        try:
            values[name] = msgspec.convert(value, hint, strict=False, dec_hook=_to_own)
        except msgspec.ValidationError as error:
            stated = variable if name in SECRETS else f"{variable}={value!r}"
            raise SettingsError(f"{stated}: {error}") from None
    settings = Settings(**values)  # type: ignore[arg-type]
    try:
        parse_origins(settings.cors_origins)
    except ValueError as error:
        raise SettingsError(f"CORS_ORIGINS: {error}") from None
    settings = msgspec.structs.replace(settings, api_keys=keys_of(settings))
    parser = settings.reasoning_parser
    if parser not in ("auto", "off") and (parser.count(",") != 1 or not all(parser.split(","))):
        raise SettingsError(f"REASONING_PARSER={parser!r}: expected auto, off or two markers with a comma")
    try:
        places = parse_device_map(settings.device_map)
    except ValueError as error:
        raise SettingsError(f"DEVICE_MAP={settings.device_map!r}: {error}") from error
    if not isinstance(places, str) and DISK in places.values() and not settings.offload_dir:
        raise SettingsError(f"DEVICE_MAP={settings.device_map!r} names the disk, so set OFFLOAD_DIR too")
    return settings


def _to_own(kind: type, value: object) -> object:
    """Return a text as one of the types that msgspec does not know."""
    return ApiKeys.of(str(value).split(",")) if kind is ApiKeys else Path(str(value))


def keys_of(settings: Settings) -> ApiKeys:
    """Return all keys, those of the file included; none lets everybody in.

    The file is read once for settings that were loaded: it may be a pipe, which gives its keys only once.

    Raises:
        SettingsError: There is no such file, or no key in it.
    """
    if settings.api_keys.file == settings.api_keys_file:
        return settings.api_keys
    try:
        more = read_keys(Path(settings.api_keys_file))
    except ValueError as error:
        raise SettingsError(f"API_KEYS_FILE={settings.api_keys_file!r}: {error}") from None
    return ApiKeys(settings.api_keys.digests + more.digests, settings.api_keys_file)


def exposures(settings: Settings) -> list[str]:
    """Return what lets others in who may not be meant."""
    found = []
    path = settings.api_keys_file
    if path and is_readable_by_all(Path(path)):
        found.append(f"every user of this machine can read API_KEYS_FILE={path!r}; chmod 600 it")
    if not is_loopback(settings.host) and not keys_of(settings):
        found.append(f"anybody who reaches HOST={settings.host} can use this server; set API_KEYS")
    return found


def near_misses(environ: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return variables that look like a misspelt setting, each with the setting it resembles."""
    names = [name.upper() for name in get_type_hints(Settings)]
    found = []
    for variable in environ:
        close = difflib.get_close_matches(variable, names, n=1, cutoff=0.9)
        if close and variable not in names:
            found.append((variable, close[0]))
    return found


def settings_table() -> str:
    """Return the table of settings in Markdown, as the README and ``--help`` print it."""
    lines = ["| variable | default | meaning |", "|---|---|---|"]
    defaults = Settings()
    for name, hint in get_type_hints(Settings, include_extras=True).items():
        kind, meta = get_args(hint)
        default = getattr(defaults, name)
        text = str(default).lower() if isinstance(default, bool) else str(default)
        shown = f"`{text}`" if text else "empty"
        choices = ""
        if get_args(kind):
            choices = " (" + ", ".join(f"`{choice}`" for choice in get_args(kind) if choice) + ")"
        lines.append(f"| `{name.upper()}` | {shown} | {meta.description}{choices} |")
    return "\n".join(lines)
