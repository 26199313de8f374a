"""Function forms: `graph()` as a context, and the decorators `jit` and `graph_cache`."""

from __future__ import annotations

from _thread import RLock
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

from opgraph.graph import pygraph
from opgraph.ir.enums import data_type, heur_mode
from opgraph.ir.tensor import Tensor

__all__ = ["graph", "graph_cache", "jit"]


@contextmanager
def graph(
    handle: Any = None,
    name: str = "cudnn_graph",
    io_data_type: Any = data_type.HALF,
    intermediate_data_type: Any = data_type.FLOAT,
    compute_data_type: Any = data_type.FLOAT,
    **options: Any,
) -> Iterator[tuple[pygraph, list[Tensor]]]:
    """`with graph(handle) as (g, tensors):` gives a new `pygraph` and an empty list; builds nothing."""
    yield (
        pygraph(
            name=name,
            handle=handle,
            io_data_type=io_data_type,
            intermediate_data_type=intermediate_data_type,
            compute_data_type=compute_data_type,
            **options,
        ),
        [],
    )


def jit(
    heur_modes: Any = heur_mode.A,
) -> Callable[[Callable[..., Any]], Callable[..., tuple[pygraph, list[int]]]]:
    """Wraps a function that returns `(graph, [tensors])`: builds the graph unless it has plans, returns
    `(graph, [uids])`.

    Outside of `graph_cache`, two calls with one key return the identical, once built, graph.
    """
    if callable(heur_modes) and not isinstance(heur_modes, heur_mode):
        raise TypeError("jit takes heuristics: write @jit() or @jit(heur_modes=...), not @jit")

    def decorate(function: Callable[..., Any]) -> Callable[..., tuple[pygraph, list[int]]]:
        lock = RLock()

        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> tuple[pygraph, list[int]]:
            built, tensors = function(*args, **kwargs)
            with lock:
                if built.get_execution_plan_count() == 0:
                    built.build(heur_modes)
            return built, [t.get_uid() if isinstance(t, Tensor) else t for t in tensors]

        return call

    return decorate


def graph_cache(
    key_fn: Callable[..., Hashable], maxsize: int = 256
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Remembers results by `key_fn(*args, **kwargs)`, dropping the oldest entry beyond `maxsize`.

    A key is computed once even when several threads ask for it at the same time.
    """
    if maxsize < 1:
        raise ValueError(f"graph_cache: maxsize must be 1 or more, got {maxsize}")

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        entries: dict[Hashable, Any] = {}  # insertion order is age
        lock = RLock()

        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            key = key_fn(*args, **kwargs)
            with lock:
                if key in entries:
                    return entries[key]
                result = entries[key] = function(*args, **kwargs)
                if len(entries) > maxsize:
                    del entries[next(iter(entries))]
                return result

        return call

    return decorate
