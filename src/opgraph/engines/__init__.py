"""Engines: each folder here is one, and ends in an object named `ENGINE`; `support` and `device` are their
vocabulary.

Folders are found by name when a graph is first planned, and so are entry points of the group
`opgraph.engines` in other packages; importing `opgraph` imports none of them.
"""

from __future__ import annotations

__all__: list[str] = []

__all__ = ["device", "support"]
