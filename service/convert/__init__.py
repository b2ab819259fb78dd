"""Where wire and engine types meet: requests one way, answers the other way.

Nothing else in the service builds an engine request or reads an engine event.
"""
