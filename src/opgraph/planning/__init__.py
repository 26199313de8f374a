"""Planning: which engines there are, what they say about a graph, the plan list, and the executable of a
plan.

Its modules are attributes of the package and are imported when they are first used: when a graph is planned,
not when opgraph is imported.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from opgraph.planning import executable, explain, messages, plan, protocols, registry, structure

__all__ = ["executable", "explain", "messages", "plan", "protocols", "registry", "structure"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return import_module(f"{__name__}.{name}")
