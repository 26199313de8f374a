"""Run with tests/native/malloc_count.c preloaded: counts what calls allocate, and what references they keep.

    python allocation_probe.py LIBRARY numpy|torch

Prints, as JSON, a list per form of call: allocations of the loop with calls, of a loop without, and the
change of each reference count.
"""

from __future__ import annotations

import ctypes
import gc
import json
import sys
from collections.abc import Callable
from itertools import repeat
from typing import Any

import numpy as np

import opgraph

CALLS = 100_000
WARM_UP = 100
OPERANDS = 8
SHAPE = (2, 3)


def buffers_of(kind: str) -> list[Any]:
    if kind == "numpy":
        return [np.zeros(SHAPE, np.float32) for _ in range(OPERANDS)]
    import torch

    return [torch.zeros(SHAPE) for _ in range(OPERANDS)]


class Loops:
    """The call forms, each as a loop over an iterator, which allocates nothing itself."""

    def __init__(self, kind: str) -> None:
        self.graph = opgraph.pygraph(io_data_type=opgraph.data_type.FLOAT, is_override_shape_enabled=True)
        inputs = [self.graph.tensor(SHAPE) for _ in range(OPERANDS - 1)]
        total = inputs[0]
        for tensor in inputs[1:]:
            total = self.graph.add(total, tensor)
        self.tensors = [*inputs, total.set_output(True)]
        self.graph.build(engine="null", knobs={"workspace": 256}, device="cpu")
        self.buffers = buffers_of(kind)
        self.mapping = dict(zip(self.tensors, self.buffers, strict=True))
        self.by_name = {tensor.name: buffer for tensor, buffer in self.mapping.items()}
        self.uids = [tensor.uid for tensor in self.tensors]
        self.shapes = [[1, 3] for _ in self.tensors]
        self.strides = [(3, 1) for _ in self.tensors]
        self.workspace = np.zeros(256, np.uint8)
        self.call = self.graph.bind(self.mapping, self.workspace)

    def mapping_form(self, times: Any) -> None:
        graph, mapping, workspace = self.graph, self.mapping, self.workspace
        for _ in times:
            graph.execute(mapping, workspace)

    def mapping_by_name(self, times: Any) -> None:
        graph, mapping, workspace = self.graph, self.by_name, self.workspace
        for _ in times:
            graph.execute(mapping, workspace)

    def ordered_form(self, times: Any) -> None:
        graph, buffers, uids, workspace = self.graph, self.buffers, self.uids, self.workspace
        for _ in times:
            graph.execute(buffers, workspace, tensor_uids=uids)

    def overrides(self, times: Any) -> None:
        graph, mapping, workspace = self.graph, self.mapping, self.workspace
        uids, shapes, strides = self.uids, self.shapes, self.strides
        for _ in times:
            graph.execute(mapping, workspace, override_uids=uids, override_shapes=shapes, override_strides=strides)

    def bound(self, times: Any) -> None:
        call = self.call
        for _ in times:
            call()

    def empty(self, times: Any) -> None:
        for _ in times:
            pass

    def allocating(self, times: Any) -> None:
        for _ in times:
            bytes(1000)

    def kept(self) -> list[Any]:
        """What a call could keep a reference to. No ints: the counts are ints themselves."""
        containers = [self.mapping, self.by_name, self.buffers, self.uids, self.shapes, self.strides]
        return [
            *containers, *self.tensors, *self.buffers, *self.shapes, *self.strides,
            self.workspace, self.call, self.graph, self.graph._executable, None, True, False, (), "",
        ]  # fmt: skip


def main(library: str, kind: str) -> None:
    hook = ctypes.CDLL(library)
    begin, end = hook.count_begin, hook.count_end
    end.restype = ctypes.c_long
    loops = Loops(kind)

    def allocations(loop: Callable[[Any], None], calls: int) -> int:
        times = repeat(None, calls)
        begin()
        loop(times)
        return end()

    def counts() -> list[int]:
        return [sys.getrefcount(each) for each in loops.kept()]

    gc.disable()
    result = {}
    for form in ("mapping_form", "mapping_by_name", "ordered_form", "overrides", "bound", "allocating"):
        loop = getattr(loops, form)
        # The warm-up is where records of what was seen are made; the shortest loop is what counting costs.
        allocations(loop, WARM_UP)
        counts()
        none = min(allocations(loops.empty, 1) for _ in range(10))
        before = counts()
        made = allocations(loop, CALLS)
        after = counts()
        result[form] = [made, none, [a - b for a, b in zip(after, before, strict=True)]]
    print(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
