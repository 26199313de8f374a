"""Random calls of Y = identity(X) against the model of the contract: what is accepted computes, what is refused writes
nothing, and nobody reads or writes past a buffer, since guard pages lie right behind (or before) it.

    python tests/fuzz/fuzz_contract.py --buffers 1000000 --seed 7

The worker is a child process: when it dies, the parent names the graph and the call to replay with `--graph`.
"""

from __future__ import annotations

import argparse
import ctypes
import mmap
import os
import struct
import sys
import time
import traceback
from collections import Counter
from random import Random
from typing import Any

import _null_tests  # noqa: F401
import draws
import numpy as np
from arena import Arena, Array
from call_model import Buffer, Layout, Scratch, live_of, operand_rule, overlap_rule, workspace_rule
from contract_model import Declared, Given, span, writes_once
from draws import STORAGE, D
from numpy.lib.stride_tricks import as_strided
from probe import install

import opgraph as og
from opgraph.engines.cpu.program import compile_program

CALLS = 200  # of one graph


class Case:
    """One graph, and the memory its operands are drawn from."""

    def __init__(self, rng: Random, arenas: list[Arena]) -> None:
        self.rng, self.arenas = rng, arenas
        data_type = rng.choice(list(STORAGE))
        self.storage, says = np.dtype(STORAGE[data_type][0]), STORAGE[data_type][1]
        dims, strides = draws.declaration(rng, False)
        out = draws.strides_for(rng, dims, True)
        if span(dims, out) > draws.MOST_UNITS:
            out = draws.dense(dims)
        packed = data_type is D.INT4
        layouts = [(dims, strides), (dims, out)]
        if packed:
            inner = rng.randint(1, 3)
            # The units of a broadcast axis lie apart by nothing, as its elements do.
            layouts = [((*d, inner), (*(n * inner for n in s), 1)) for d, s in layouts]
            if any(span(*layout) > draws.MOST_UNITS for layout in layouts):
                layouts = [((4, inner), (inner, 1))] * 2
        self.want = [Declared(*layouts[i], says, output=i == 1, packed=packed) for i in (0, 1)]
        # Of 4-bit elements, two lie in each unit along the last axis.
        shown = [((*d[:-1], 2 * d[-1]), (*(2 * n for n in s[:-1]), 1)) if packed else (d, s) for d, s in layouts]
        self.graph = og.pygraph(io_data_type=data_type)
        x = self.graph.tensor(*shown[0], data_type=data_type, name="X")
        y = self.graph.identity(x).set_output(True).set_name("Y").set_data_type(data_type).set_stride(shown[1][1])
        self.tensors = (x, y)
        self.graph.build(engine="cpu", device="cpu")
        program = compile_program(self.graph._ir.snapshot(), precise=False)
        self.need = rng.choice((0, 0, 256, 768))
        install(self.graph, program.run, workspace_bytes=self.need, inplace=program.inplace, overrides=True)
        self.inplace = (1, 0) in tuple(program.inplace)
        self.overridable = not packed
        for i, arena in enumerate(arenas):
            units = arena.raw.view(self.storage)
            units[...] = (np.arange(units.size) * 7 + 3 * i) % (2 if self.storage == np.bool_ else 97)
            arena.keep()
        self.layouts: list[list[draws.Axes]] = [[], []]

    # ---- drawing

    def overrides(self) -> tuple[Layout | None, Layout | None]:
        rng = self.rng
        if not self.overridable or rng.random() > 0.2:
            return None, None
        dims = list(self.want[0].dims)
        for axis in range(len(dims)):
            if rng.random() < 0.4:
                dims[axis] = max(0, dims[axis] + rng.choice((-2, -1, -1, 0, 1)))
        live: list[Layout | None] = []
        for i in (0, 1):
            mine = tuple(dims)
            if rng.random() < 0.05:
                mine = (*mine[:-1], mine[-1] + 1)
            strides = self.want[i].strides if rng.random() < 0.5 else draws.strides_for(rng, mine, i == 1)
            if rng.random() < 0.3:
                strides = draws.dense(mine)
            if span(mine, strides) > draws.MOST_UNITS:
                mine, strides = self.want[i].dims, self.want[i].strides
            live.append((mine, strides))
        which = rng.random()
        return (live[0] if which < 0.9 else None), (live[1] if which > 0.1 else None)

    def draw_axes(self, i: int, live: Declared, good: bool) -> draws.Axes:
        rng = self.rng
        if good:
            return list(zip(live.dims, live.strides, strict=True))
        if self.layouts[i] and rng.random() < 0.3:
            return rng.choice(self.layouts[i])  # seen before, which takes another path
        axes = draws.axes_for(rng, live if rng.random() < 0.7 else self.want[i])
        if len(self.layouts[i]) < 12:
            self.layouts[i].append(axes)
        return axes

    def operand(self, i: int, live: Declared, good: bool) -> tuple[Any, Buffer, str]:
        rng, arena = self.rng, self.arenas[i]
        dtype, says = self.storage, (1, 8, 1) if live.packed else live.dtype
        if not good and rng.random() < 0.04:
            dtype, says = rng.choice(draws.NUMPY_TYPES)
        if not good and rng.random() < 0.06:
            return self.address(i, live)
        axes = self.draw_axes(i, live, good)
        dims, strides = tuple(n for n, _ in axes), tuple(s for _, s in axes)
        if not good and draws.HAS_JAX and dtype.itemsize < 8 and rng.random() < 0.01:
            array = draws.jax_array(rng, dims, dtype)
            have = Given(dims, draws.dense(dims), says, read_only=True)
            return array, Buffer(have, array.unsafe_buffer_pointer() if array.size else 0), "jax"
        before, after = draws.reach(dims, strides)
        size = dtype.itemsize
        if (after - before) * size > arena.size:
            dims, strides, before, after = (), (), 0, 1
        start = arena.offset_of(before * size, after * size, rng.random() < 0.6)
        view = self.view(arena, dtype, start, dims, strides)
        name = rng.choice(draws.CHOICES)
        if name == "torch" and any(s < 0 for s in strides):  # torch has none
            name = "numpy"
        make, tells = draws.PROTOCOLS[name]
        have = Given(dims, strides, says)
        if not good and rng.random() < 0.03:
            buffer, have = draws.tabled_lies(rng, view, have)
            return buffer, Buffer(have, 0 if have.null else arena.address + start), "lies"
        if tells and not good and rng.random() < 0.15:
            view.flags.writeable = False
            have = have._replace(read_only=True)
        buffer = make(view)
        grad = name == "torch" and dtype.kind == "f" and rng.random() < 0.2
        if grad:
            buffer = buffer.requires_grad_()
        return buffer, Buffer(have, arena.address + start, grad=grad), name

    def view(self, arena: Arena, dtype: Any, start: int, dims: Any, strides: Any) -> Array:
        at = np.ndarray((0,), dtype, arena.raw.data, min(start, arena.size - dtype.itemsize))
        if start >= arena.size:  # an empty buffer, right at the guard
            return at.reshape(dims)
        return as_strided(at, dims, [s * dtype.itemsize for s in strides])

    def address(self, i: int, live: Declared) -> tuple[int, Buffer, str]:
        arena, size = self.arenas[i], self.storage.itemsize
        where = arena.address + arena.offset_of(0, span(live.dims, live.strides) * size, self.rng.random() < 0.6)
        if self.rng.random() < 0.1:
            where = 0
        return where, Buffer(Given((), ()), where, bare=True), "address"

    def beside(self, x: Buffer, live: Declared) -> tuple[Any, Buffer, str] | None:
        """Y in the memory of X, as declared, a few units away from it."""
        size, arena = self.storage.itemsize, self.arenas[0]
        start = x.address - arena.address + self.rng.choice((0, 0, 1, -1, 2, 3, 5, -7, 11)) * size
        end = start + span(live.dims, live.strides) * size
        if not x.address or start < 0 or end > arena.size or x.bare:
            return None
        view = self.view(arena, self.storage, start, live.dims, live.strides)
        says = (1, 8, 1) if live.packed else live.dtype
        return view, Buffer(Given(live.dims, live.strides, says), arena.address + start), "beside"

    def workspace(self) -> tuple[Any, Scratch | None]:
        rng = self.rng
        if rng.random() < (0.7 if self.need == 0 else 0.05):
            return None, None
        arena = rng.choice(self.arenas) if rng.random() < 0.1 else self.arenas[2]
        dtype = np.dtype(rng.choice((np.uint8, np.uint8, np.float32)))
        count = rng.choice((self.need, self.need, self.need + 64, 1024, max(0, self.need - 8), 0)) // dtype.itemsize
        start = arena.offset_of(0, count * dtype.itemsize, rng.random() < 0.5)
        if arena is not self.arenas[2]:
            # Operands lie at either end.
            start = rng.choice((rng.randrange(0, 256, 8), arena.size - 1024 - rng.randrange(0, 256, 8)))
        if rng.random() < 0.1:
            where = arena.address + min(start, arena.size - max(self.need, 8)) if rng.random() < 0.8 else 0
            return where, Scratch(Given((), ()), 1, where, bare=True)
        dims: tuple[int, ...] = (count,)
        strides: tuple[int, ...] = (1,)
        if count % 4 == 0 and rng.random() < 0.3:
            dims, strides = (4, count // 4), rng.choice(((count // 4, 1), (1, 4)))
        if count and rng.random() < 0.1:
            dims, strides = ((count + 1) // 2,), (2,)
            start = min(start, arena.size - (count + 1) * dtype.itemsize)
        view = self.view(arena, dtype, start, dims, strides)
        read_only = rng.random() < 0.1
        if read_only:
            view.flags.writeable = False
        address = view.ctypes.data
        return view, Scratch(Given(dims, strides, read_only=read_only), dtype.itemsize, address)

    # ---- one call

    def call(self, counts: Counter[str]) -> None:
        rng = self.rng
        override = self.overrides()
        live = [live_of(self.want[i], override[i]) for i in (0, 1)]
        one_good = rng.random()
        x = self.operand(0, live[0], one_good < 0.35)
        y = self.operand(1, live[1], one_good > 0.65)
        if rng.random() < 0.08:
            y = self.beside(x[1], live[1]) or y
        scratch = self.workspace()
        expected = self.expected(override, live, x[1], y[1], scratch[1])
        wanted = None
        if not expected:
            wanted = self.result(live, x[1], y[1])
        got = self.execute(override, x[0], y[0], scratch[0])
        about = f"declared {self.want}, override {override}, X {x[2]} {x[1]}, Y {y[2]} {y[1]}, workspace {scratch[1]}"
        if got != expected:
            raise AssertionError(f"native {got or 'accepted'!r}, model {expected or 'accepted'!r}: {about}")
        for arena in self.arenas:
            changed = wanted if wanted is not None and self.inside(arena, y[1]) else None
            if not arena.holds(changed):
                raise AssertionError(f"wrong bytes after {got or 'accepted'!r}: {about}")
        if wanted is not None:
            for arena in self.arenas:
                if self.inside(arena, y[1]):
                    arena.restore()
        counts[expected or "accepted"] += 1
        for name in (x[2], y[2]):
            counts[f"by {name}"] += 1
        counts["overridden"] += override != (None, None)
        counts["with workspace"] += scratch[1] is not None

    def inside(self, arena: Arena, buffer: Buffer) -> bool:
        return arena.address <= buffer.address <= arena.address + arena.size

    def expected(self, override: Any, live: Any, x: Buffer, y: Buffer, scratch: Scratch | None) -> str:
        if override[1] is not None and not writes_once(live[1].dims, live[1].strides):
            return "self_overlap"
        for i, have in enumerate((x, y)):
            if rule := operand_rule(self.want[i], override[i], have):
                return rule
        if live[0].dims != live[1].dims:
            return "override_geometry"
        layouts = [(w.dims, w.strides) for w in live]
        size = self.storage.itemsize
        return overlap_rule(x, y, layouts[0], layouts[1], size, self.inplace) or workspace_rule(
            self.need, scratch, [(b.address, span(*layout) * size) for b, layout in zip((x, y), layouts, strict=True)]
        )

    def result(self, live: Any, x: Buffer, y: Buffer) -> Array:
        """The bytes of the arena that Y lies in, after the call."""
        if 0 in live[0].dims:
            home = next((a for a in self.arenas if self.inside(a, y)), self.arenas[1])
            return home.raw.copy()
        source = next((a for a in self.arenas if self.inside(a, x)), None)
        home = next(a for a in self.arenas if self.inside(a, y))
        if source is None:  # memory of JAX's own
            size = span(live[0].dims, live[0].strides) * self.storage.itemsize
            flat = np.frombuffer((ctypes.c_uint8 * size).from_address(x.address), self.storage)
            read = as_strided(flat, live[0].dims, [s * self.storage.itemsize for s in live[0].strides])
        else:
            read = self.view(source, self.storage, x.address - source.address, live[0].dims, live[0].strides)
        values = read.copy()
        after = home.raw.copy()
        start = y.address - home.address
        steps = [s * self.storage.itemsize for s in live[1].strides]
        as_strided(after[start:][: span(live[1].dims, live[1].strides) * self.storage.itemsize].view(self.storage),
                   live[1].dims, steps)[...] = values  # fmt: skip
        return after

    def execute(self, override: Any, x: Any, y: Any, workspace: Any) -> str:
        """The rule that refused the call, "" when it ran."""
        rng = self.rng
        form = rng.randrange(6)
        keys = [t if form < 2 else t.uid if form == 2 else t.name for t in self.tensors]
        arguments: dict[str, Any] = {}
        if override != (None, None):
            kept = [(t.uid, list(o[0]), list(o[1])) for t, o in zip(self.tensors, override, strict=True) if o]
            if rng.random() < 0.2:
                kept.reverse()
            names = ("override_uids", "override_shapes", "override_strides")
            arguments = dict(zip(names, map(list, zip(*kept, strict=True)), strict=True))
        try:
            if form == 4:
                self.graph.execute([x, y], workspace, tensor_uids=[t.uid for t in self.tensors], **arguments)
            elif form == 5:
                bound = self.graph.bind(dict(zip(keys, (x, y), strict=True)), workspace, **arguments)
                bound()
            else:
                self.graph.execute(dict(zip(keys, (x, y), strict=True)), workspace, **arguments)
        except og.OperandError as error:
            return str(error.rule)
        except ValueError as error:
            return f"ValueError {error}"
        except TypeError as error:
            return f"TypeError {error}"
        return ""


def work(arguments: argparse.Namespace, place: Any) -> int:
    """The fuzzing itself. `place` is where the parent reads how far it came."""
    arenas = [Arena() for _ in range(3)]
    if arguments.plain:
        draws.without_frameworks()
    counts: Counter[str] = Counter()
    began = time.perf_counter()
    graph, done = arguments.graph or 0, 0
    while done < arguments.buffers:
        rng = Random(f"{arguments.seed}/{graph}")
        case = Case(rng, arenas)
        for call in range(min(CALLS, -(-(arguments.buffers - done) // 2))):
            place[:24] = struct.pack("qqq", graph, call, done)
            if arguments.trespass and call == 20:
                ctypes.memset(arenas[0].address + arenas[0].size, 0, 1)
            try:
                case.call(counts)
            except AssertionError as error:
                print(f"seed {arguments.seed} graph {graph} call {call}: {error}", file=sys.stderr)
                return 1
            done += 2  # X and Y
        counts["graphs"] += 1
        if arguments.graph is not None:
            break
        graph += 1
    seconds = time.perf_counter() - began
    for name, count in sorted(counts.items(), key=lambda item: (item[0].startswith("by "), -item[1])):
        print(f"{count:9d} {name}")
    rate = f"{done} buffers in {seconds:.1f} s, {done / seconds:.0f} buffers/s"
    print(f"{rate}; seed {arguments.seed}: model and library agree")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0] if __doc__ else "")
    parser.add_argument("--buffers", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--graph", type=int, default=None, help="only this graph of the seed")
    parser.add_argument("--plain", action="store_true", help="without torch and JAX")
    parser.add_argument("--trespass", action="store_true", help="touch a guard page, to see that this is noticed")
    arguments = parser.parse_args()
    place = mmap.mmap(-1, 24)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            code = work(arguments, place)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status < 0:
        graph, call, done = struct.unpack("qqq", place[:24])
        print(
            f"signal {-status} in graph {graph}, call {call}, after {done} buffers: replay with "
            f"--seed {arguments.seed} --graph {graph}",
            file=sys.stderr,
        )
        return 1
    return status


if __name__ == "__main__":
    sys.exit(main())
