"""What other people's libraries leave behind or warn of, and tests must live with."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

ODD_METADATA = pytest.mark.filterwarnings(
    r"ignore:Pydantic serializer warnings.(\n  PydanticSer[^\n]*field_name='metadata'[^\n]*)+$:UserWarning"
)
"""OpenAI's `metadata` holds strings only, and the SDK says so where it dumps an answer of this server."""


@contextmanager
def loop_of_its_own() -> Iterator[None]:
    """Close the event loop of litellm's synchronous calls: left alone they make one, which stays open."""
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    try:
        yield
    finally:
        asyncio.set_event_loop(None)
        loop.close()
