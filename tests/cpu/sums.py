"""The graph most field cases are about, C = A + B, with guarded buffers and a check for refused calls."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

import opgraph
from opgraph import data_type
from opgraph.engines.support import Candidate, CompiledPlan, layout_carves
from opgraph.engines.support import Engine as EngineBase
from opgraph.ir.datatypes import numpy_dtype

GUARD = 16  # elements on either side of a guarded buffer
HERE = Path(__file__).parent


class Engine:
    """One engine with its knobs, and whether it computes (the null engine leaves outputs as they are)."""

    def __init__(self, name: str, knobs: dict[str, Any] | None = None) -> None:
        self.name = name
        self.knobs = knobs
        self.computes = name != "null"

    def build(self, graph: opgraph.pygraph) -> opgraph.pygraph:
        graph.build(engine=self.name, knobs=self.knobs, device="cpu")
        return graph

    def __repr__(self) -> str:
        return f"{self.name}{self.knobs or ''}"


NULL = Engine("null")
ENGINES = (Engine("cpu", {"precision": "native"}), Engine("cpu", {"precision": "float64"}), NULL)


def span(dim: Any, stride: Any) -> int:
    return 0 if 0 in dim else 1 + sum((n - 1) * s for n, s in zip(dim, stride, strict=True))


class ScratchEngine(EngineBase):
    """C = A + B of contiguous float32 vectors, through a workspace that it fills before use.

    For tests that register it; `look` is called with the pack of each call.
    """

    name = "scratch"
    engine_ids: ClassVar = {29990: {}}
    knobs: ClassVar = {"bytes": "size of the workspace"}
    named_only = True

    def __init__(self, look: Callable[[Any], None] = lambda pack: None) -> None:
        self.look = look

    def propose(self, spec: Any, target: Any) -> list[Candidate]:
        self.check(spec, target)
        return [Candidate(self.name, 29990, target.knobs, workspace_bytes=target.knobs["bytes"])]

    def compile(self, spec: Any, candidate: Candidate, target: Any) -> CompiledPlan:
        carves, size = layout_carves([(data_type.UINT8, (candidate.knobs["bytes"],))])

        def run(pack: Any) -> None:
            self.look(pack)
            a, b, c = (pack[i].numpy() for i in range(3))
            region = pack.carves[0].numpy()
            region[...] = 0xCC
            partial = region[: a.nbytes].view(np.float32)
            partial[...] = a
            np.add(partial, b, out=c)

        return CompiledPlan(run, workspace_bytes=size, carves=carves, overrides=True)


class Guarded:
    """A buffer filled with a sentinel, inside a larger one whose other elements must never change.

    `view` has `dim` and `stride` (elements); gaps of the stride are guarded like the two sides.
    """

    def __init__(
        self,
        dim: Any,
        stride: Any = None,
        dtype: Any = np.float32,
        fill: Any = -1,
        shift: int = 0,
    ) -> None:
        dim = tuple(dim)
        dtype = np.dtype(dtype)
        if stride is None:
            stride = tuple(int(np.prod(dim[axis + 1 :])) for axis in range(len(dim)))
        count = max(span(dim, stride), 1)
        self._memory = np.zeros(count + 2 * GUARD + shift, dtype)
        self._memory.view(np.uint8)[...] = 0xA5
        start = GUARD + shift
        self.view = np.lib.stride_tricks.as_strided(
            self._memory[start : start + count], dim, tuple(s * dtype.itemsize for s in stride)
        )
        self._outside = np.ones(self._memory.shape, bool)
        if 0 not in dim:
            flat = sum(
                np.arange(n).reshape([-1 if axis == k else 1 for k in range(len(dim))]) * s
                for axis, (n, s) in enumerate(zip(dim, stride, strict=True))
            )
            self._outside[start + np.asarray(flat)] = False
        self.view[...] = np.asarray(fill).astype(dtype)
        self._before = self._memory.tobytes()

    def check(self) -> None:
        """Nothing outside of the buffer changed."""
        item = self._memory.itemsize
        now = self._memory.view(np.uint8).reshape(-1, item)
        assert (now[self._outside] == 0xA5).all(), "memory outside of the buffer was written"

    def untouched(self) -> None:
        """Nothing at all changed."""
        assert self._memory.tobytes() == self._before, "a refused call wrote to the output"


class Sum:
    """C = A + B, built on one engine. `execute` fills in good buffers for the operands that are not given."""

    def __init__(
        self,
        engine: Engine,
        dim: Any = (3,),
        *,
        stride: Any = None,
        b_stride: Any = None,
        out_stride: Any = None,
        dtype: data_type = data_type.FLOAT,
        compute: data_type | None = None,
        **options: Any,
    ) -> None:
        self.engine = engine
        self.graph = opgraph.pygraph(io_data_type=dtype, compute_data_type=compute or dtype, **options)
        self.a = self.graph.tensor(dim, stride, name="A")
        self.b = self.graph.tensor(dim, b_stride or stride, name="B")
        self.c = self.graph.add(self.a, self.b).set_output(True).set_name("C")
        if out_stride or stride:
            self.c.set_stride(out_stride or stride)
        engine.build(self.graph)
        self.dtype = numpy_dtype(dtype)
        self.uids = [self.a.uid, self.b.uid, self.c.uid]

    def buffer(self, tensor: Any, values: Any) -> np.ndarray[Any, Any]:
        """A buffer in the declared layout of `tensor`."""
        made = Guarded(tensor.dim, tensor.stride, self.dtype)
        made.view[...] = values
        return made.view

    def out(self) -> Guarded:
        return Guarded(self.c.dim, self.c.stride, self.dtype)

    def execute(self, a: Any = None, b: Any = None, c: Any = None, **kwargs: Any) -> None:
        operands = {
            self.a: self.buffer(self.a, 1) if a is None else a,
            self.b: self.buffer(self.b, 2) if b is None else b,
            self.c: self.out().view if c is None else c,
        }
        self.graph.execute(operands, **kwargs)

    def result(self, a: Any = None, b: Any = None, **kwargs: Any) -> Any:
        """C as nested lists, from a guarded buffer."""
        out = self.out()
        self.execute(a, b, out.view, **kwargs)
        out.check()
        return out.view.astype(np.float64).tolist()

    def usable(self) -> None:
        """A plain call works."""
        out = self.out()
        self.execute(c=out.view)
        out.check()
        if self.engine.computes:
            assert (out.view == 3).all()
        else:
            out.untouched()

    def refuses(
        self, *words: str, error: Any = opgraph.OperandError, c: Any = None, **kwargs: Any
    ) -> Exception:
        """The call is refused with an exception that says all of `words`; no output byte is written, and the
        graph stays usable."""
        out = self.out()
        caught = refused(lambda: self.execute(c=out.view if c is None else c, **kwargs), *words, error=error)
        out.untouched()
        self.usable()
        return caught


def refused(call: Callable[[], Any], *words: str, error: Any = opgraph.OperandError) -> Exception:
    """`call` raises `error` with all of `words` in its text."""
    with pytest.raises(error) as caught:
        call()
    text = str(caught.value)
    for word in words:
        assert word in text, f"{word!r} is missing in: {text}"
    return caught.value


def run_python(code: str, *folders: Path) -> str:
    """Runs code in a process of its own, which must end well, with these folders before all others that this
    process looks in; returns what it printed."""
    # As this process was started: the sanitized run keeps site-packages out of the way.
    switches = ["-S"] if sys.flags.no_site else []
    path = [*map(str, folders), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    done = subprocess.run(
        [sys.executable, *switches, "-X", "faulthandler", "-c", code],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path)},
    )
    assert done.returncode == 0, f"exit status {done.returncode}\n{done.stdout}\n{done.stderr[-4000:]}"
    return done.stdout


def run_child(case: Callable[..., Any], *arguments: Any) -> str:
    """Runs a function of a test module in a process of its own."""
    module, name = case.__module__, case.__name__
    return run_python(f"import {module}; {module}.{name}(*{arguments!r})", HERE)
