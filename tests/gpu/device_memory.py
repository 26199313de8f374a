"""Operands in device memory, in the form the conformance suite asks for: torch, CuPy, bare addresses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from opgraph import data_type

__all__ = ["AddressBuffer", "CupyBuffer", "TorchBuffer"]

Array = np.ndarray[Any, Any]

_TORCH = {
    data_type.FLOAT: "float32",
    data_type.DOUBLE: "float64",
    data_type.HALF: "float16",
    data_type.BFLOAT16: "bfloat16",
    data_type.INT8: "int8",
    data_type.UINT8: "uint8",
    data_type.INT32: "int32",
    data_type.INT64: "int64",
    data_type.BOOLEAN: "bool",
    data_type.FP8_E4M3: "float8_e4m3fn",
    data_type.FP8_E5M2: "float8_e5m2",
}


class TorchBuffer:
    """A strided torch tensor over a copy of the image on the device."""

    def __init__(
        self, image: Array, offset: int, dims: Sequence[int], strides: Sequence[int], dtype: data_type
    ) -> None:
        import torch

        self._bytes = torch.from_numpy(image.copy()).cuda()
        element = getattr(torch, _TORCH[dtype])
        typed = self._bytes.view(element)
        self.operand: Any = typed.as_strided(tuple(dims), tuple(strides), offset // element.itemsize)

    def image(self) -> Array:
        return self._bytes.cpu().numpy()


class AddressBuffer(TorchBuffer):
    """The bare device address of the first element."""

    def __init__(
        self, image: Array, offset: int, dims: Sequence[int], strides: Sequence[int], dtype: data_type
    ) -> None:
        super().__init__(image, offset, dims, strides, dtype)
        self.operand = self._bytes.data_ptr() + offset


class CupyBuffer:
    """A strided CuPy array; types CuPy lacks go through a bare address."""

    def __init__(
        self, image: Array, offset: int, dims: Sequence[int], strides: Sequence[int], dtype: data_type
    ) -> None:
        import cupy

        self._bytes = cupy.asarray(image)
        name = _TORCH[dtype]
        if name == "bfloat16" or name.startswith("float8"):
            self.operand: Any = int(self._bytes.data.ptr) + offset
            return
        element = np.dtype(name)
        steps = tuple(s * element.itemsize for s in strides)
        self.operand = cupy.ndarray(tuple(dims), element, self._bytes.data + offset, strides=steps)

    def image(self) -> Array:
        import cupy

        return cupy.asnumpy(self._bytes)
