"""`Tensor`: the declaration of one tensor of a graph.

Attributes are properties over private slots. Reading one costs a C call; writing one goes through a setter
that refuses once the graph is frozen. Construction pays for neither.
"""

from __future__ import annotations

from functools import lru_cache
from operator import attrgetter, index
from struct import Struct
from struct import error as StructError
from typing import TYPE_CHECKING, Any

import numpy as np

from .datatypes import as_data_type
from .enums import data_type as _data_type
from .enums import scalar_type as _scalar_type
from .enums import tensor_reordering as _tensor_reordering
from .errors import explain, tensor_label

if TYPE_CHECKING:
    from collections.abc import Iterable

    from .program import GraphIR

__all__ = [
    "MAX_RANK",
    "NOT_PACKED",
    "PACKERS",
    "Tensor",
    "as_extents",
    "as_offset",
    "as_positive",
    "as_reordering",
    "overlaps_itself",
    "owned_value",
    "row_major",
    "span",
]

MAX_RANK = 8
_INT64_MAX = 2**63 - 1


@lru_cache(maxsize=4096)
def row_major(dim: tuple[int, ...]) -> tuple[int, ...]:
    """C-contiguous strides of `dim`, in elements. An extent of 0 counts as 1, so no stride is 0."""
    stride = [1] * len(dim)
    for axis in range(len(dim) - 1, 0, -1):
        stride[axis - 1] = stride[axis] * (dim[axis] or 1)
    return tuple(stride)


def span(dim: Iterable[int], stride: Iterable[int]) -> int:
    """Elements from the first to the last one addressed, both included; 0 when an extent is 0."""
    total = 1
    for extent, step in zip(dim, stride, strict=True):
        if extent == 0:
            return 0
        total += (extent - 1) * step
    return total


def overlaps_itself(dim: Iterable[int], stride: Iterable[int]) -> bool:
    """True unless, sorted by stride, each stride is at least the span of the axes below it.

    Interleaved layouts that happen to be free of collisions count as overlapping too: they are refused as
    outputs, because no engine is asked to prove them safe.
    """
    dim = tuple(dim)
    if 0 in dim:
        return False
    below = 1
    for step, extent in sorted(
        (step, extent) for extent, step in zip(dim, stride, strict=True) if extent != 1
    ):
        if step < below:
            return True
        below += (extent - 1) * step
    return False


# (unpack, pack) by rank: a round trip through unsigned words checks kind and sign and converts NumPy integers
# in half the time of `tuple(map(index, values))` and `min`. What it refuses goes to `as_extents`, which has
# the messages.
PACKERS = tuple(
    (packer.unpack, packer.pack) for packer in (Struct(f"{rank}Q") for rank in range(MAX_RANK + 1))
)
NOT_PACKED = (TypeError, IndexError, StructError)


def as_extents(values: Any, what: str, where: str) -> tuple[int, ...]:
    """`values` as a tuple of non-negative Python ints, at most `MAX_RANK` of them."""
    try:
        result = tuple(map(index, values))
    except TypeError:
        raise TypeError(
            explain(
                where,
                f"{what} must be a sequence of integers",
                given=repr(values),
                next_step="pass a list of ints",
            )
        ) from None
    if result and (min(result) < 0 or len(result) > MAX_RANK):
        rule = f"{what} must not be negative" if min(result) < 0 else f"{what} has more than {MAX_RANK} axes"
        raise ValueError(
            explain(where, rule, given=result, next_step=f"declare up to {MAX_RANK} axes, each 0 or more")
        )
    return result


class Tensor:
    """One tensor of a graph: extents, strides (both in elements), data type and role.

    Made by `graph.tensor(...)` and by operators, not by hand. Equality and hash are identity, so a tensor
    stays a valid dictionary key when it is renamed. Every setter returns the tensor, and raises
    `RuntimeError` once the graph has been planned; to change a planned graph, copy it.

    A tensor belongs to its graph: a lone one can be neither copied nor pickled.
    """

    __slots__ = (
        "__weakref__",
        "_alignment_value",
        "_data_type",
        "_data_type_assigned",
        "_dim",
        "_dim_assigned",
        "_is_pass_by_value",
        "_is_virtual",
        "_name",
        "_owner",
        "_pass_by_value",
        "_producer",
        "_ragged_offset",
        "_ragged_offset_multiplier",
        "_reordering_type",
        "_scalar_type",
        "_stride",
        "_stride_assigned",
        "_uid",
        "_uid_assigned",
    )

    def __init__(
        self,
        name: str = "",
        dim: tuple[int, ...] = (),
        stride: tuple[int, ...] = (),
        data_type: _data_type | None = None,
        is_virtual: bool = False,
        is_pass_by_value: bool = False,
        uid: int = -1,
        uid_assigned: bool = False,
        dim_assigned: bool = False,
        stride_assigned: bool = False,
        owner: GraphIR | None = None,
    ) -> None:
        self._name = name
        self._dim = dim
        self._stride = stride
        self._data_type = data_type
        self._is_virtual = is_virtual
        self._is_pass_by_value = is_pass_by_value
        self._uid = uid
        self._uid_assigned = uid_assigned
        self._dim_assigned = dim_assigned
        self._stride_assigned = stride_assigned
        self._data_type_assigned = data_type is not None
        self._owner = owner
        self._pass_by_value: Any = None
        self._scalar_type: _scalar_type | None = None
        self._reordering_type: _tensor_reordering | None = None
        self._ragged_offset: Tensor | None = None
        self._ragged_offset_multiplier = 1
        self._alignment_value = 1
        self._producer: Any = None  # the node that writes this tensor

    # -- writing ---------------------------------------------------------------------------------------------

    def _change(self, what: str) -> None:
        """Refuses on a frozen graph, else marks the graph as not validated."""
        owner = self._owner
        if owner is not None:
            owner._change(f"{what} of {tensor_label(self)}")

    def set_name(self, name: str) -> Tensor:
        """Renames the tensor. Names are labels: duplicates are legal until someone looks one up."""
        if not isinstance(name, str):
            raise TypeError(explain(tensor_label(self), "a name is a str", given=repr(name)))
        self._change("name")
        old, self._name = self._name, name
        if self._owner is not None:
            self._owner._renamed(self, old)
        return self

    def set_uid(self, uid: int) -> Tensor:
        """Gives the tensor this uid for good; an automatic holder of the number is renumbered.

        -1 means unset: the tensor keeps its number as an automatic one. Setting the number it has is legal
        even on a frozen graph. Raises `ValueError` when another tensor was given the same uid.
        """
        try:
            if isinstance(uid, bool):
                raise TypeError
            uid = index(uid)
        except TypeError:
            raise TypeError(explain(tensor_label(self), "a uid is an int", given=repr(uid))) from None
        if uid < -1 or uid > _INT64_MAX:
            raise ValueError(explain(tensor_label(self), "a uid is 0 or more and fits in 64 bits", given=uid))
        owner = self._owner
        if uid == self._uid and (self._uid_assigned or (owner is not None and owner._frozen)):
            return self
        self._change("uid")
        if owner is None:
            self._uid, self._uid_assigned = uid, uid >= 0
        else:
            owner._assign_uid(self, uid)
        return self

    def set_dim(self, dim: Iterable[int]) -> Tensor:
        """Sets the extents. Strides that were not set follow from them again."""
        extents = as_extents(dim, "dim", tensor_label(self))
        self._change("dim")
        self._dim, self._dim_assigned = extents, bool(extents)
        if not self._stride_assigned:
            self._stride = row_major(extents) if self._producer is None else ()
        return self

    def set_stride(self, stride: Iterable[int]) -> Tensor:
        """Sets the strides, in elements."""
        strides = as_extents(stride, "stride", tensor_label(self))
        self._change("stride")
        self._stride, self._stride_assigned = strides, bool(strides)
        if not strides and self._producer is None:
            self._stride = row_major(self._dim)
        return self

    def set_data_type(self, data_type: Any) -> Tensor:
        """Sets the data type; None and NOT_SET leave it to the graph's defaults."""
        converted = as_data_type(data_type)
        self._change("data_type")
        self._data_type, self._data_type_assigned = converted, converted is not None
        return self

    def set_is_virtual(self, is_virtual: bool) -> Tensor:
        """A virtual tensor has no storage outside the plan."""
        self._change("is_virtual")
        self._is_virtual = bool(is_virtual)
        return self

    def set_output(self, is_output: bool = True) -> Tensor:
        """Makes the tensor an operand of `execute` (True) or virtual (False)."""
        self._change("is_virtual")
        self._is_virtual = not is_output
        return self

    def set_is_pass_by_value(self, is_pass_by_value: bool) -> Tensor:
        """Says that the operand is one host scalar, read at call time."""
        self._change("is_pass_by_value")
        self._is_pass_by_value = bool(is_pass_by_value)
        return self

    def set_pass_by_value(self, value: Any) -> Tensor:
        """Embeds a host scalar: the tensor needs no entry in the variant pack. None removes it."""
        self._change("pass_by_value")
        self._pass_by_value = owned_value(value)
        if value is not None:
            self._is_pass_by_value = True
        return self

    def set_scalar_type(self, scalar_type: _scalar_type | None) -> Tensor:
        """Whether an embedded scalar is a launch argument or a constant of the plan."""
        if scalar_type is not None and not isinstance(scalar_type, _scalar_type):
            raise TypeError(
                explain(tensor_label(self), "scalar_type is a scalar_type", given=repr(scalar_type))
            )
        self._change("scalar_type")
        self._scalar_type = scalar_type
        return self

    def set_ragged_offset(self, ragged_offset: Tensor | None) -> Tensor:
        """The INT32 or INT64 tensor [B+1, 1, 1, 1] of the first element of each batch entry."""
        offset = None if ragged_offset is None else as_offset(ragged_offset, self)
        self._change("ragged_offset")
        self._ragged_offset = offset
        return self

    def set_ragged_offset_multiplier(self, multiplier: int) -> Tensor:
        """Elements per unit of the ragged offset (H*D when offsets count tokens)."""
        multiplier = as_positive(multiplier, "ragged_offset_multiplier", tensor_label(self))
        self._change("ragged_offset_multiplier")
        self._ragged_offset_multiplier = multiplier
        return self

    def set_reordering_type(self, reordering_type: _tensor_reordering | None) -> Tensor:
        """A physical element order that strides cannot express; NONE means none."""
        converted = as_reordering(reordering_type, tensor_label(self))
        self._change("reordering_type")
        self._reordering_type = converted
        return self

    def set_alignment_value(self, alignment: int) -> Tensor:
        """A promise: the address in bytes, or every offset the tensor holds, is a multiple of this."""
        alignment = as_positive(alignment, "alignment_value", tensor_label(self))
        self._change("alignment_value")
        self._alignment_value = alignment
        return self

    def _read_only(self, value: object) -> None:
        self._change("derived attribute")
        raise AttributeError(
            "uid_assigned, dim_assigned and stride_assigned follow from set_uid, set_dim, set_stride"
        )

    # -- reading ---------------------------------------------------------------------------------------------

    if TYPE_CHECKING:
        name: str
        data_type: _data_type | None
        dim: tuple[int, ...]
        stride: tuple[int, ...]
        is_virtual: bool
        is_pass_by_value: bool
        pass_by_value: Any
        uid: int
        uid_assigned: bool
        dim_assigned: bool
        stride_assigned: bool
        reordering_type: _tensor_reordering | None
        ragged_offset: Tensor | None
        ragged_offset_multiplier: int
        alignment_value: int
        scalar_type: _scalar_type | None
    else:
        name = property(attrgetter("_name"), set_name, doc="Label; see `set_name`.")
        data_type = property(attrgetter("_data_type"), set_data_type, doc="`data_type`, or None when unset.")
        dim = property(attrgetter("_dim"), set_dim, doc="Extents, a tuple; empty when unset.")
        stride = property(
            attrgetter("_stride"), set_stride, doc="Strides in elements, a tuple; empty when unset."
        )
        is_virtual = property(attrgetter("_is_virtual"), set_is_virtual, doc="True when it has no buffer.")
        is_pass_by_value = property(
            attrgetter("_is_pass_by_value"), set_is_pass_by_value, doc="True for a host scalar."
        )
        pass_by_value = property(
            attrgetter("_pass_by_value"), set_pass_by_value, doc="Embedded value, or None."
        )
        uid = property(attrgetter("_uid"), set_uid, doc="Number, unique in the graph.")
        uid_assigned = property(
            attrgetter("_uid_assigned"), _read_only, doc="True when the uid was set by hand."
        )
        dim_assigned = property(attrgetter("_dim_assigned"), _read_only, doc="True when dim was set by hand.")
        stride_assigned = property(
            attrgetter("_stride_assigned"), _read_only, doc="True when stride was set by hand."
        )
        reordering_type = property(
            attrgetter("_reordering_type"), set_reordering_type, doc="`tensor_reordering`, or None."
        )
        ragged_offset = property(
            attrgetter("_ragged_offset"), set_ragged_offset, doc="Offset tensor, or None."
        )
        ragged_offset_multiplier = property(
            attrgetter("_ragged_offset_multiplier"),
            set_ragged_offset_multiplier,
            doc="Elements per offset unit.",
        )
        alignment_value = property(
            attrgetter("_alignment_value"), set_alignment_value, doc="Promised alignment."
        )
        scalar_type = property(attrgetter("_scalar_type"), set_scalar_type, doc="`scalar_type`, or None.")

    def get_name(self) -> str:
        """The label."""
        return self._name

    def get_uid(self) -> int:
        """The uid; automatic ones may change until the graph is built."""
        return self._uid

    def get_dim(self) -> list[int]:
        """A copy of the extents."""
        return list(self._dim)

    def get_stride(self) -> list[int]:
        """A copy of the strides, in elements."""
        return list(self._stride)

    def get_data_type(self) -> _data_type:
        """The data type, `NOT_SET` when there is none yet."""
        return _data_type.NOT_SET if self._data_type is None else self._data_type

    def get_is_virtual(self) -> bool:
        """True when the tensor has no buffer."""
        return self._is_virtual

    def get_is_pass_by_value(self) -> bool:
        """True for a host scalar."""
        return self._is_pass_by_value

    def get_reordering_type(self) -> _tensor_reordering:
        """The physical order, `NONE` by default."""
        return _tensor_reordering.NONE if self._reordering_type is None else self._reordering_type

    def get_ragged_offset_multiplier(self) -> int:
        """Elements per unit of the ragged offset."""
        return self._ragged_offset_multiplier

    # -- checking --------------------------------------------------------------------------------------------

    def validate(self) -> None:
        """Raises `ValueError` when dim or stride is unset, their ranks differ, or the flags contradict."""
        dim, stride = self._dim, self._stride
        if not dim:
            raise ValueError(explain(tensor_label(self), "dims not set", next_step="call set_dim"))
        if not stride:
            raise ValueError(explain(tensor_label(self), "strides not set", next_step="call set_stride"))
        if len(dim) != len(stride):
            raise ValueError(
                explain(
                    tensor_label(self),
                    "dim and stride must have one rank",
                    expected=f"{len(dim)} strides for dim {dim}",
                    given=stride,
                    next_step="set both",
                )
            )
        if self._is_virtual and self._is_pass_by_value:
            raise ValueError(
                explain(
                    tensor_label(self),
                    "a tensor cannot be both virtual and pass-by-value",
                    next_step="a by-value scalar is an operand: set_is_virtual(False)",
                )
            )
        if self._ragged_offset_multiplier != 1 and self._ragged_offset is None:
            raise ValueError(
                explain(
                    tensor_label(self),
                    "ragged_offset_multiplier needs a ragged_offset",
                    given=self._ragged_offset_multiplier,
                    next_step="call set_ragged_offset",
                )
            )

    def __repr__(self) -> str:
        kind = "virtual" if self._is_virtual else "by value" if self._is_pass_by_value else "operand"
        dtype = self.get_data_type().name
        return f"<Tensor {self._name!r} uid={self._uid} dim={self._dim} stride={self._stride} {dtype} {kind}>"

    def __reduce_ex__(self, protocol: object) -> Any:
        raise TypeError(
            "opgraph.Tensor belongs to its graph and cannot be copied or pickled alone; "
            "copy the graph (copy.deepcopy), or serialize it"
        )


def as_offset(value: Any, tensor: Tensor) -> Tensor:
    """`value` as a ragged offset: a Tensor, whose fitness is checked when the graph is validated."""
    if not isinstance(value, Tensor):
        raise TypeError(
            explain(tensor_label(tensor), "ragged_offset is a Tensor of the graph", given=repr(value))
        )
    return value


def as_reordering(value: Any, where: str) -> _tensor_reordering | None:
    """`value` as a `tensor_reordering`, NONE as None."""
    if value is None or value is _tensor_reordering.NONE:
        return None
    if not isinstance(value, _tensor_reordering):
        raise TypeError(explain(where, "reordering_type is a tensor_reordering", given=repr(value)))
    return value


def as_positive(value: Any, what: str, where: str) -> int:
    try:
        number = index(value)
    except TypeError:
        raise TypeError(explain(where, f"{what} is an int", given=repr(value))) from None
    if number < 1:
        raise ValueError(explain(where, f"{what} must be 1 or more", given=number))
    return number


def owned_value(value: Any) -> Any:
    """A private copy of an embedded array, so that a later write by the caller does not reach the graph."""
    if not isinstance(value, np.ndarray):
        return value
    value = value.copy()
    value.setflags(write=False)
    return value
