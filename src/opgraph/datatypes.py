"""Data types and conversions for users: what relates `data_type` to NumPy and torch, and packing of 4-bit
types."""

from __future__ import annotations

from opgraph.ir.datatypes import (
    as_data_type,
    dlpack_dtype,
    element_bits,
    from_dlpack_dtype,
    numpy_dtype,
    pack_subbyte,
    round_to,
    torch_to_cudnn_data_type,
    unpack_subbyte,
)

__all__ = [
    "as_data_type",
    "dlpack_dtype",
    "element_bits",
    "from_dlpack_dtype",
    "numpy_dtype",
    "pack_subbyte",
    "round_to",
    "torch_to_cudnn_data_type",
    "unpack_subbyte",
]
