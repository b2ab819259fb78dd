"""The HTTP service: routes, content negotiation, writers, settings. It joins schemas and engine."""

__version__ = "0.1.0"
