"""The engines of this process.

Found once, at the first question: folders of `opgraph.engines`, then entry points of the group
`opgraph.engines` in other packages. An engine whose import fails for want of a package is remembered with
that reason, so that `explain` can name it; any other failure of an engine's import is a bug and reaches the
caller.
"""

from __future__ import annotations

from _thread import RLock
from typing import Any

from opgraph.engines.support import Engine

__all__ = ["Registry", "registry"]

_GROUP = "opgraph.engines"


class Registry:
    """Engines by name, in the order found. All methods may be called from any thread."""

    def __init__(self, *, discover: bool = True) -> None:
        self._lock = RLock()
        self._engines: dict[str, Engine] = {}
        self._unavailable: dict[str, str] = {}
        self._pending = discover

    def engines(self) -> tuple[Engine, ...]:
        """Every engine that could be imported."""
        self._load()
        with self._lock:
            return tuple(self._engines.values())

    def unavailable(self) -> dict[str, str]:
        """Name -> reason, for engines that are installed but whose import lacks something."""
        self._load()
        with self._lock:
            return dict(self._unavailable)

    def names(self) -> list[str]:
        """The names a caller may pin, sorted."""
        return sorted({*(e.name for e in self.engines()), *self.unavailable()})

    def find(self, name: str) -> Engine | None:
        """The engine of that name, or None."""
        self._load()
        with self._lock:
            return self._engines.get(name)

    def by_id(self, engine_id: int) -> Engine | None:
        """The engine that owns an engine id, or None."""
        return next((e for e in self.engines() if engine_id in e.engine_ids), None)

    def unknown_id(self, engine_id: object) -> str:
        """The message for an id that no engine owns."""
        known = ", ".join(str(i) for e in self.engines() for i in sorted(e.engine_ids))
        return f"unknown engine id {engine_id}; known ids: {known}"

    def register(self, engine: Engine) -> None:
        """Adds an engine of this process (tests, notebooks; packages declare an entry point instead).

        Raises:
            ValueError: the name or one of the engine ids is taken.
        """
        self._load()
        with self._lock:
            self._add(engine)

    def unregister(self, name: str) -> None:
        """Removes an engine added by `register`; plans already built keep working."""
        with self._lock:
            self._engines.pop(name, None)

    def _add(self, engine: Engine) -> None:
        _check_new(engine, self._engines)
        self._engines[engine.name] = engine

    def _load(self) -> None:
        if not self._pending:
            return
        with self._lock:
            if not self._pending:
                return
            found: dict[str, Engine] = {}
            unavailable: dict[str, str] = {}
            for name, load in _folders() + _entry_points():
                try:
                    engine = load()
                except ImportError as error:
                    unavailable[name] = f"cannot be imported: {error}"
                    continue
                _check_new(engine, found)
                found[engine.name] = engine
            self._engines, self._unavailable = found, unavailable
            self._pending = False


def _check_new(engine: Engine, known: dict[str, Engine]) -> None:
    if engine.name in known:
        raise ValueError(f"an engine named {engine.name!r} is already registered")
    for other in known.values():
        taken = sorted(set(other.engine_ids) & set(engine.engine_ids))
        if taken:
            raise ValueError(f"engine {engine.name!r}: engine id {taken[0]} belongs to {other.name!r}")


def _folders() -> list[tuple[str, Any]]:
    import importlib
    import pkgutil

    import opgraph.engines

    def loader(name: str) -> Any:
        return lambda: importlib.import_module(f"opgraph.engines.{name}").ENGINE

    return [(m.name, loader(m.name)) for m in pkgutil.iter_modules(opgraph.engines.__path__) if m.ispkg]


def _entry_points() -> list[tuple[str, Any]]:
    from importlib.metadata import entry_points

    return [(point.name, point.load) for point in entry_points(group=_GROUP)]


registry = Registry()
