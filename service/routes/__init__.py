"""Handlers, one file per endpoint: decode, check, convert, submit, write."""
