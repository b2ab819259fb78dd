"""Checks of the settings: model, memory, port, folders, access."""

import os
import shutil
import socket
import sys
from pathlib import Path
from typing import Any, Iterator, Mapping

from ops.doctor.line import FAIL, GIB, OK, SET_UP, WARN, Line, Unchecked

LOOPBACK = ("127.", "localhost", "::1")

SPARE_BYTES = GIB
"""Of the cache folder: the embedded model takes half of it."""


def check_settings(environ: Mapping[str, str]) -> Iterator[Line]:
    """Check every variable."""
    from service.settings import SettingsError, load_settings, near_misses

    for variable, setting in near_misses(environ):
        yield Line(WARN, "settings", "%s is no setting" % variable, "did you mean %s?" % setting)
    try:
        load_settings(environ)
    except SettingsError as error:
        yield Line(FAIL, "settings", str(error), "ops/serve.sh --help lists what is allowed")
    else:
        yield Line(OK, "settings", "all have values that they can have")


def _settings(environ: Mapping[str, str]) -> Any:
    """Return the settings.

    Raises:
        Unchecked: They are wrong, which :func:`check_settings` says.
    """
    from service.settings import SettingsError, load_settings

    try:
        return load_settings(environ)
    except SettingsError as error:
        raise Unchecked("the settings are wrong") from error


def check_model(environ: Mapping[str, str]) -> Iterator[Line]:
    """Check that the model is here, or where it will come from."""
    import importlib.metadata

    from engine.loading import EMBEDDED_PACKAGE, SCRIPTED_NAME, is_missing_folder

    name = _settings(environ).model_name
    if name == SCRIPTED_NAME:
        yield Line(OK, "model", "scripted: none is loaded")
    elif not name:
        try:
            versions = [
                "%s %s" % (each, importlib.metadata.version(each)) for each in (EMBEDDED_PACKAGE, "gguf")
            ]
            yield Line(OK, "model", "the embedded one (%s)" % ", ".join(versions))
        except importlib.metadata.PackageNotFoundError as error:
            remedy = "%s, or set MODEL_NAME" % SET_UP
            yield Line(FAIL, "model", "no MODEL_NAME, and %s is not installed" % error.name, remedy)
    elif is_missing_folder(name):
        yield Line(FAIL, "model", "there is no folder %s" % name, "correct MODEL_NAME")
    elif Path(name).is_dir():
        if (Path(name) / "config.json").is_file():
            yield Line(OK, "model", name)
        else:
            yield Line(FAIL, "model", "%s has no config.json" % name, "name the folder of a checkpoint")
    else:
        from huggingface_hub import try_to_load_from_cache

        if isinstance(try_to_load_from_cache(name, "config.json"), str):
            yield Line(OK, "model", "%s, in the cache of Hugging Face" % name)
        else:
            yield Line(WARN, "model", "%s is not here yet" % name, "the first start downloads it")


def check_memory(environ: Mapping[str, str]) -> Iterator[Line]:
    """Check that the model fits, by the same estimate as the server."""
    from engine.errors import LoadError
    from engine.estimate import describe, gib
    from engine.loading import SCRIPTED_NAME
    from engine.memory import fit, room

    settings = _settings(environ)
    free = room()
    where = "free: host %s" % gib(free.host)
    where += "".join(", %s %s" % (name, gib(size)) for name, size in free.gpus.items())
    if settings.model_name == SCRIPTED_NAME:
        yield Line(OK, "memory", where)
        return
    try:
        need = _need(settings)
    except (LoadError, OSError, ValueError) as error:
        yield Line(WARN, "memory", "%s; needed: unknown (%s)" % (where, str(error).split("\n")[0]))
        return
    if need is None:
        yield Line(WARN, "memory", "%s; needed: unknown for this kind of checkpoint" % where)
        return
    found = "%s; %s" % (describe(need, settings.engine_config()), where)
    try:
        how = fit(need, free, settings.engine_config())
    except LoadError as error:
        yield Line(FAIL, "memory", found, str(error))
        return
    yield Line(WARN if how.warnings else OK, "memory", found, "; ".join(how.warnings))


def _need(settings: Any) -> Any:
    """Return the server's estimate for the settings."""
    import dataclasses

    from engine.estimate import estimate
    from engine.loading import converted_folder, embedded_source

    config = settings.engine_config()
    if settings.model_name:
        return estimate(settings.model_name, config)
    folder = converted_folder(config.cache_dir)
    if folder.is_dir():
        return estimate(str(folder), config)
    source = embedded_source()
    # The embedded model is kept as float32; its GGUF file names no dtype.
    dtype = "float32" if config.dtype == "auto" else config.dtype
    path = source.pop("pretrained_model_name_or_path")
    return estimate(path, dataclasses.replace(config, dtype=dtype), **source)


def check_quantization(environ: Mapping[str, str]) -> Iterator[Line]:
    """Check that bitsandbytes is there if it is wanted."""
    import importlib.metadata
    import importlib.util

    kind = _settings(environ).quantization
    if not kind:
        return
    if importlib.util.find_spec("bitsandbytes") is None:
        remedy = "%s -m pip install 'bitsandbytes>=0.48'" % sys.executable
        yield Line(FAIL, "quantize", "QUANTIZATION=%s needs bitsandbytes" % kind, remedy)
    else:
        yield Line(OK, "quantize", "bitsandbytes %s" % importlib.metadata.version("bitsandbytes"))


def check_port(environ: Mapping[str, str]) -> Iterator[Line]:
    """Check that the address can be listened on."""
    settings = _settings(environ)
    address = "%s:%d" % (settings.host, settings.port)
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    try:
        socket.create_server((settings.host, settings.port), family=family).close()
        yield Line(OK, "port", "%s is free" % address)
    except OSError as error:
        yield Line(
            FAIL, "port", "%s: %s" % (address, error.strerror), "set PORT, or 0 for any; HOST must be here"
        )


def check_folders(environ: Mapping[str, str]) -> Iterator[Line]:
    """Check the folders that are written to."""
    settings = _settings(environ)
    folders = [("cache", "CACHE_DIR", Path(settings.cache_dir).expanduser())]
    if settings.offload_dir:
        folders.append(("offload", "OFFLOAD_DIR", Path(settings.offload_dir).expanduser()))
    for what, variable, folder in folders:
        # It is made when it is needed; until then its nearest parent decides.
        there = next(each for each in (folder, *folder.absolute().parents) if each.exists())
        free = shutil.disk_usage(str(there)).free
        found = "%s, %.1f GiB free" % (folder, free / GIB)
        if not there.is_dir() or not os.access(str(there), os.W_OK):
            yield Line(FAIL, what, "%s cannot be written" % folder, "set %s" % variable)
        elif free < SPARE_BYTES:
            yield Line(WARN, what, found, "free some, or set %s" % variable)
        else:
            yield Line(OK, what, found)


def check_access(environ: Mapping[str, str]) -> Iterator[Line]:
    """Warn of a server that anybody can use."""
    host = _settings(environ).host
    if host.startswith(LOOPBACK):
        yield Line(OK, "access", "%s: only this machine reaches it" % host)
    elif environ.get("API_KEYS") or environ.get("API_KEYS_FILE"):
        yield Line(OK, "access", "%s: other machines reach it, with a key" % host)
    else:
        yield Line(
            WARN, "access", "%s: anybody who reaches it can use it" % host, "set API_KEYS or API_KEYS_FILE"
        )
