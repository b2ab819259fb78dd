"""Read the settings, build the engine and the app, and serve: ``python -m service``."""

import argparse
import asyncio
import logging
import os
import sys

import msgspec

from engine.engine import Engine
from engine.loading import load
from service import __version__
from service.server import ignore_signals, run
from service.settings import SettingsError, exposures, load_settings, near_misses, settings_table
from service.telemetry import configure_logging
from service.tuning import tune_process

logger = logging.getLogger(__name__)


def main(argv: list[str] | None = None) -> int:
    """Run the server; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m service",
        description="OpenAI-compatible LLM server that returns every logit. Settings are variables:",
        epilog=settings_table(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=__version__)
    parser.parse_args(argv)
    try:
        settings = load_settings(os.environ)
    except SettingsError as error:
        print(f"logitwire: {error}", file=sys.stderr)
        return 2
    configure_logging(settings.log_level, settings.log_format, shows_texts=settings.log_prompts)
    for variable, setting in near_misses(os.environ):
        logger.warning(
            "unknown variable looks like a setting", extra={"variable": variable, "setting": setting}
        )
    logger.info(
        "settings", extra={name: str(value) for name, value in msgspec.structs.asdict(settings).items()}
    )
    for warning in exposures(settings):
        logger.warning(warning)
    tune_process()
    engine = Engine(settings.engine_config(), load)
    try:
        code = asyncio.run(run(settings, engine))
    except OSError as error:
        print(
            f"logitwire: cannot listen on {settings.host}:{settings.port}: {error.strerror}", file=sys.stderr
        )
        return 1
    ignore_signals()
    if engine.is_working:
        # A worker in the middle of a load or a step cannot be stopped, and Python would abort over it.
        logging.shutdown()
        sys.stdout.flush()
        os._exit(code)
    return code


if __name__ == "__main__":
    sys.exit(main())
