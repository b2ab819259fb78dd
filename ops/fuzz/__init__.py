"""Requests that no client should send, and what a server makes of them."""
