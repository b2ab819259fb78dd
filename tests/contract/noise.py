"""Warnings of other people's libraries that some tests must let pass."""

import pytest

ODD_METADATA = pytest.mark.filterwarnings(
    r"ignore:Pydantic serializer warnings.(\n  PydanticSer[^\n]*field_name='metadata'[^\n]*)+$:UserWarning"
)
"""OpenAI's `metadata` holds strings only, and the SDK says so where it dumps an answer of this server."""
