"""Checks what serving needs, and says what to do: ``python -m ops.doctor``."""
