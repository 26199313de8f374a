"""
Native core of opgraph: reading buffers, the operand contract, calls, and host loops of the CPU engine.
"""

from collections.abc import Sequence
import types
from typing import Annotated, overload

import numpy
from numpy.typing import NDArray


from collections.abc import Callable, Mapping, Sequence
from typing import Any

class Slot:
    """
    One operand or workspace region of a call, as engines and kernels receive it.

    A DLPack producer (exchange table, __dlpack__). Valid as long as it is held: it keeps
    the caller's buffer alive; a bare address is the caller's to keep.
    """

    def __dlpack__(self, *, stream: Any = None, max_version: tuple[int, int] | None = None, dl_device: tuple[int, int] | None = None, copy: bool | None = None) -> Any:
        """
        A DLPack capsule: versioned when max_version allows, legacy otherwise. It may outlive the slot.
        """

    def __dlpack_device__(self) -> tuple[int, int]:
        """(device_type, device_id)."""

    def permute(self, *axes: int) -> Slot:
        """A slot over the same memory with its axes in another order."""

    def reshape(self, *dims: int) -> Slot:
        """
        A slot over the same memory with other extents; ValueError where a copy would be needed.
        """

    def is_contiguous(self) -> bool:
        """True when the elements lie in C order."""

    def numpy(self) -> NDArray[Any]:
        """
        A NumPy view (read-only for inputs). BufferError on a device. Sub-byte pairs show as uint8.
        """

    @property
    def ptr(self) -> int:
        """Address of the first element, an int."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Extents in the declared axis order, storage units."""

    @property
    def strides(self) -> tuple[int, ...]:
        """Strides in storage units, declared axis order."""

    @property
    def dtype(self) -> str:
        """Name of the dtype, e.g. 'float32'."""

    @property
    def dlpack_dtype(self) -> tuple[int, int, int]:
        """DLPack (code, bits, lanes)."""

    @property
    def device(self) -> tuple[int, int]:
        """DLPack (device_type, device_id)."""

    @property
    def nbytes(self) -> int:
        """
        Bytes from the first to past the last element; the true size of a ragged operand.
        """

    @property
    def present(self) -> bool:
        """False for an optional operand the caller bound no buffer to."""

    @property
    def read_only(self) -> bool:
        """True for inputs."""

    __dlpack_c_exchange_api__: Any = ...

class VariantPack:
    """
    All operands of one call, ascending by uid, with the workspace and what the plan carves
    from it. `pack[i]` is the Slot of operand i.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Slot: ...

    def remaining(self) -> Slot:
        """
        A uint8 slot over the workspace behind what the plan carves; ValueError when its size is unknown.
        """

    @property
    def uids(self) -> tuple[int, ...]:
        """Operand uids, ascending: the order of the slots."""

    @property
    def workspace(self) -> Slot | None:
        """Slot over the whole workspace, or None."""

    @property
    def carves(self) -> tuple[Slot, ...]:
        """One slot per workspace region the plan declared."""

    @property
    def geometry(self) -> Any:
        """Live geometry under overrides, or None: everything as declared."""

    @property
    def stream(self) -> int:
        """Raw stream of the call; 0 is the legacy default stream."""

    @property
    def device(self) -> tuple[int, int]:
        """DLPack (device_type, device_id) of the plan."""

class Handle:
    """The device and stream that calls run on."""

    def __init__(self, device_type: int = 1, device_id: int = 0, stream: int = 0) -> None: ...

    @property
    def device_type(self) -> int:
        """DLPack device type: 1 CPU, 2 CUDA."""

    @property
    def device_id(self) -> int:
        """Device ordinal."""

    @property
    def stream(self) -> int:
        """Raw stream address; 0 is the legacy default stream."""
    @stream.setter
    def stream(self, value: int) -> None: ...

class GraphBase:
    """What a graph runs through: execute() and bind() of its selected plan."""

    def execute(self, tensor_dict: Mapping[Any, Any] | Sequence[Any], workspace: Any = None, handle: Handle | None = None, override_uids: Sequence[int] | None = None, override_shapes: Sequence[Sequence[int]] | None = None, override_strides: Sequence[Sequence[int]] | None = None, tensor_uids: Sequence[int] | None = None) -> None:
        """
        Checks the operands against the contract and runs the plan on them.

        tensor_dict: {Tensor | uid | name: buffer}, or a list of buffers with tensor_uids. A key that names no tensor of this
        graph is a KeyError; None keys, None values and buffers of virtual tensors are ignored. A buffer is an array with an
        exchange table, __dlpack__, an array interface or data_ptr(); an int is an address, whose type and size are taken as
        declared, unchecked. Inputs may be read-only and may require grad; outputs may not. Negative strides are refused.
        workspace: caller-owned; any dense, writable buffer of enough bytes, whatever its data type, or an address.
        override_uids, override_shapes, override_strides: dims and strides of this call, one entry per tensor; they may exceed
        the declared ones where the buffer holds them. Asynchronous on the stream of handle. Nothing is kept after the call; a
        refused call (OperandError, KeyError, TypeError) has written nothing.
        """

    def bind(self, tensor_dict: Mapping[Any, Any] | Sequence[Any], workspace: Any = None, handle: Handle | None = None, override_uids: Sequence[int] | None = None, override_shapes: Sequence[Sequence[int]] | None = None, override_strides: Sequence[Sequence[int]] | None = None, tensor_uids: Sequence[int] | None = None) -> BoundCall:
        """
        Checks the operands once, as execute() does, and returns a BoundCall that keeps them: call() runs again,
        call.update({tensor: buffer}) swaps operands.
        """

    _executable: Executable | None

class Executable:
    """
    One compiled plan and the contract of its operands. Immutable; safe from many threads.
    """

    def __new__(cls, *, operands: tuple[dict[str, Any], ...], keys: dict[Any, int], tensor_type: type, defaults: tuple[Any, ...], device: tuple[int, int], workspace_bytes: int, carves: Sequence[tuple[int, tuple[int, int, int], tuple[int, ...]]], inplace: Sequence[tuple[int, int]], run: Callable[[VariantPack], Any] | Program | None, hooks: Any, overrides: bool, dynamic: bool, stream: int) -> Executable: ...

    def execute(self, tensor_dict: Mapping[Any, Any] | Sequence[Any], workspace: Any = None, handle: Handle | None = None, override_uids: Sequence[int] | None = None, override_shapes: Sequence[Sequence[int]] | None = None, override_strides: Sequence[Sequence[int]] | None = None, tensor_uids: Sequence[int] | None = None) -> None:
        """
        Checks the operands against the contract and runs the plan on them.

        tensor_dict: {Tensor | uid | name: buffer}, or a list of buffers with tensor_uids. A key that names no tensor of this
        graph is a KeyError; None keys, None values and buffers of virtual tensors are ignored. A buffer is an array with an
        exchange table, __dlpack__, an array interface or data_ptr(); an int is an address, whose type and size are taken as
        declared, unchecked. Inputs may be read-only and may require grad; outputs may not. Negative strides are refused.
        workspace: caller-owned; any dense, writable buffer of enough bytes, whatever its data type, or an address.
        override_uids, override_shapes, override_strides: dims and strides of this call, one entry per tensor; they may exceed
        the declared ones where the buffer holds them. Asynchronous on the stream of handle. Nothing is kept after the call; a
        refused call (OperandError, KeyError, TypeError) has written nothing.
        """

    def bind(self, tensor_dict: Mapping[Any, Any] | Sequence[Any], workspace: Any = None, handle: Handle | None = None, override_uids: Sequence[int] | None = None, override_shapes: Sequence[Sequence[int]] | None = None, override_strides: Sequence[Sequence[int]] | None = None, tensor_uids: Sequence[int] | None = None) -> BoundCall:
        """
        Checks the operands once, as execute() does, and returns a BoundCall that keeps them: call() runs again,
        call.update({tensor: buffer}) swaps operands.
        """

    @property
    def uids(self) -> tuple[int, ...]:
        """Operand uids, ascending."""

    @property
    def workspace_bytes(self) -> int:
        """Bytes of workspace a call needs."""

class BoundCall:
    """
    A call with its operands bound: call() runs it, call.update({tensor: buffer}) swaps operands.

    Keeps the operands (owning exports) and the workspace until it is dropped.
    """

    def __call__(self) -> None: ...

    def update(self, changes: Mapping[Any, Any]) -> None:
        """
        Swaps operands: {Tensor | uid | name: buffer}. Checked like execute(); a refused update
        leaves the call as it was. A call running in another thread finishes on the operands it started with.
        """

    __vectorcalloffset__: types.MemberDescriptorType = ...

class CudaModule:
    """A kernel image loaded into a device's primary context."""

class CudaFunction:
    """A kernel of a loaded image."""

    @property
    def name(self) -> str:
        """Name of the kernel."""

class Program:
    """
    A compiled plan as a list of native steps. Immutable; safe from many threads.
    """

    @property
    def step_count(self) -> int:
        """Number of driver calls a run makes."""

def make_program(device: int, steps: list, ranks: Sequence[int], needs: Sequence[tuple[int, int]] = [], otherwise: Program | None = None) -> Program:
    """
    A Program from step descriptions (see opgraph.engines.program); ValueError for one that is not well-formed.
    """

def bare_launch_ns(program: Program, addresses: Sequence[int], stream: int, repeat: int) -> float:
    """
    Nanoseconds per launch of the first kernel in a C loop: the floor that benchmarks measure a call against.
    """

def load_module(image: bytes, device: int) -> CudaModule:
    """Loads a cubin into the primary context of a device."""

def get_function(module: CudaModule, name: str, shared_bytes: int = 0) -> CudaFunction:
    """
    A kernel of a module; shared_bytes is the dynamic shared memory its launches will use.
    """

def use_driver(path: str) -> str:
    """
    Loads the CUDA driver from another library (tests); '' restores the usual one. Returns why it could not, or ''.
    """

def driver_failure() -> str:
    """Why no CUDA driver is in use; '' when one is."""

def device_count() -> int:
    """CUDA devices the driver shows; 0 without a driver."""

def current_device() -> int:
    """
    Ordinal of the calling thread's current CUDA device; 0 when none is current.
    """

def describe_device(ordinal: int) -> dict:
    """Name, compute capability, sm_count, shared_bytes, driver_version."""

def describe(buffer: object, stream: int = 0, hooks: object | None = None) -> dict:
    """
    What a buffer says of itself (address, dims, strides in elements, dtype, device, read_only), read as a call reads it.
    """

def borrow_loop_ns(buffers: list, repeat: int) -> float:
    """
    Nanoseconds for one pass of the exchange table's borrowing call over `buffers`, in a native loop.
    """

@overload
def erf(x: Annotated[NDArray[numpy.float32], dict(order='C', device='cpu', writable=False)], out: Annotated[NDArray[numpy.float32], dict(order='C', device='cpu')]) -> None:
    """erf of a C-contiguous array into `out`, which may be `x`."""

@overload
def erf(x: Annotated[NDArray[numpy.float64], dict(order='C', device='cpu', writable=False)], out: Annotated[NDArray[numpy.float64], dict(order='C', device='cpu')]) -> None: ...

@overload
def gelu(x: Annotated[NDArray[numpy.float32], dict(order='C', device='cpu', writable=False)], out: Annotated[NDArray[numpy.float32], dict(order='C', device='cpu')]) -> None:
    """
    0.5 x (1 + erf(x / sqrt 2)) of a C-contiguous array into `out`, which may be `x`.
    """

@overload
def gelu(x: Annotated[NDArray[numpy.float64], dict(order='C', device='cpu', writable=False)], out: Annotated[NDArray[numpy.float64], dict(order='C', device='cpu')]) -> None: ...

@overload
def softmax_block(scores: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu')], row_max: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu')], row_sum: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu')]) -> None:
    """
    In place per row: exp(scores - max); max and sum go to row_max and row_sum. Rows of -inf become zeros.
    """

@overload
def softmax_block(scores: Annotated[NDArray[numpy.float64], dict(shape=(None, None), order='C', device='cpu')], row_max: Annotated[NDArray[numpy.float64], dict(shape=(None,), order='C', device='cpu')], row_sum: Annotated[NDArray[numpy.float64], dict(shape=(None,), order='C', device='cpu')]) -> None: ...

def layernorm_rows(x: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)], scale: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)] | None, bias: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)] | None, eps: float, out: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu')], mean: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu')] | None = None, inv_std: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu')] | None = None) -> None:
    """
    out = (x - mean) * inv_std * scale + bias over the last axis of x [rows, n], float32.
    """
