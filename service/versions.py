"""Versions of the server and of the libraries that shape logits."""

import importlib.metadata
import platform

from service import __version__

LIBRARIES = ("torch", "transformers", "accelerate", "tokenizers", "numpy", "pyarrow")


def versions() -> dict[str, str]:
    """Return them by name."""
    libraries = {library: importlib.metadata.version(library) for library in LIBRARIES}
    return {"logitwire": __version__, "python": platform.python_version(), **libraries}
