"""Planning: which engines there are, what they say about a graph, the plan list, and the executable of a
plan."""

from __future__ import annotations

__all__: list[str] = []

__all__ = ["executable", "explain", "messages", "plan", "protocols", "registry", "structure"]
