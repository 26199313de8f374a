"""Exception types and the one form of every error message.

A message reads: operation, tensor with uid, the rule, what was expected, what was given, the next step.
"""

from __future__ import annotations

from typing import Any

__all__ = [
    "OperandError",
    "SerializationError",
    "cudnnGraphNotSupportedError",
    "explain",
    "node_label",
    "tensor_label",
]

_UNSET: Any = object()


class cudnnGraphNotSupportedError(Exception):
    """A well-formed graph, data type or feature that nothing here can run.

    Not a `RuntimeError`: `except RuntimeError` does not catch it.
    """


class OperandError(ValueError):
    """A buffer contradicts the declaration of the tensor it was bound to.

    Fields: `tensor` (name), `uid`, `rule` (short identifier of the broken rule), `declared`, `given` and
    `next_step` (what the caller can do about it). The message holds them all.
    """

    def __init__(
        self,
        message: str,
        *,
        tensor: str = "",
        uid: int = -1,
        rule: str = "",
        declared: Any = None,
        given: Any = None,
        next_step: str = "",
    ) -> None:
        super().__init__(message)
        self.tensor = tensor
        self.uid = uid
        self.rule = rule
        self.declared = declared
        self.given = given
        self.next_step = next_step


class SerializationError(ValueError):
    """Data given to `deserialize` is no saved graph that this version reads: foreign, cut off, damaged, or of
    another format version. Nothing of it was loaded."""


def tensor_label(tensor: Any) -> str:
    """`tensor 'A' (uid 3)` for anything that has `name` and `uid`."""
    return f"tensor {tensor.name!r} (uid {tensor.uid})"


def node_label(node: Any) -> str:
    """`matmul 'mm.0'` for anything that has `op` and `name`."""
    return f"{node.op} {node.name!r}"


def explain(
    where: str, rule: str, *, expected: Any = _UNSET, given: Any = _UNSET, next_step: str = ""
) -> str:
    """The message `where: rule; expected E, given G; next step`. Parts that were not passed are left out."""
    facts = []
    if expected is not _UNSET:
        facts.append(f"expected {_plain(expected)}")
    if given is not _UNSET:
        facts.append(f"given {_plain(given)}")
    return "; ".join(part for part in (f"{where}: {rule}", ", ".join(facts), next_step) if part)


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else str(value)
