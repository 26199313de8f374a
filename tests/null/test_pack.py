"""Variant packs: the slots of one call in their order, the workspace, and the regions a plan carves from it."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from typing import Any

import numpy as np
import pytest
from exchange import Dlpack, Managed
from probe import OneOperand, install

import opgraph as og
from opgraph import _native

D = og.data_type


def workspace_graph(run: Any, **plan: Any) -> og.pygraph:
    """B = identity(A) on 3 elements, uids 1 and 2, with a plan that asks for 64 bytes."""
    graph = og.pygraph(io_data_type=D.FLOAT)
    a = graph.tensor((3,), name="A", uid=1)
    graph.identity(a).set_output(True).set_name("B").set_uid(2)
    install(graph, run, **{"workspace_bytes": 64, **plan})
    return graph


@pytest.mark.parametrize("act", [copy.copy, copy.deepcopy, pickle.dumps])
def test_packs_are_not_copied(act: Any):
    packs: list[Any] = []
    workspace_graph(packs.append).execute({1: 1 << 40, 2: 1 << 41}, np.zeros(64, np.uint8))
    with pytest.raises(TypeError, match="VariantPack cannot be copied or pickled"):
        act(packs[0])


def test_a_pack_is_a_sequence_of_slots_by_uid():
    packs: list[Any] = []
    graph = og.pygraph(io_data_type=D.FLOAT)
    b = graph.tensor((3,), uid=9)
    a = graph.tensor((3,), uid=4)
    c = graph.add(a, b).set_output(True).set_uid(6)
    install(graph, packs.append)
    buffers = {t: np.full(3, t.uid, np.float32) for t in (b, a, c)}
    graph.execute(buffers, handle=og.Handle(device="cpu"))
    pack = packs[0]
    assert pack.uids == (4, 6, 9) and len(pack) == 3
    assert [s.numpy()[0] for s in pack] == [4, 6, 9]
    assert pack[-1].numpy()[0] == 9
    for bad in (3, -4):
        with pytest.raises(IndexError):
            pack[bad]
    assert [s.read_only for s in pack] == [True, False, True]
    assert pack.geometry is None and pack.workspace is None and pack.carves == ()
    assert pack.device == (1, 0) and pack.stream == 0
    with pytest.raises(ValueError, match="no workspace"):
        pack.remaining()
    with pytest.raises(TypeError):
        _native.VariantPack()


def test_carves_and_what_remains():
    packs: list[Any] = []
    carves = [(0, (2, 32, 1), (3, 4)), (256, (2, 16, 1), (5,)), (512, (17, 4, 2), (2, 3)), (768, (1, 8, 1), (0,))]
    graph = workspace_graph(packs.append, workspace_bytes=1000, carves=carves)
    pack = {1: 1 << 40, 2: 1 << 41}
    scratch = np.zeros(4096, np.uint8)
    graph.execute(pack, scratch)
    seen = packs[0]
    assert [(s.ptr - scratch.ctypes.data, s.shape, s.strides, s.nbytes, s.dtype) for s in seen.carves] == [
        (0, (3, 4), (4, 1), 48, "float32"),
        (256, (5,), (1,), 10, "float16"),
        (512, (2, 3), (3, 1), 6, "float4_e2m1fn_x2"),
        (768, (0,), (1,), 0, "uint8"),
    ]
    assert all(not s.read_only and s.is_contiguous() for s in seen.carves)
    seen.carves[1].numpy()[...] = -1
    assert scratch[256:266].any() and not scratch[:256].any() and not scratch[266:].any()
    assert (seen.workspace.ptr, seen.workspace.nbytes) == (scratch.ctypes.data, 4096)
    rest = seen.remaining()
    assert (rest.ptr - scratch.ctypes.data, rest.nbytes, rest.shape) == (1024, 3072, (3072,))  # aligned again
    graph.execute(pack, scratch[:1000])
    assert packs[1].remaining().nbytes == 0
    graph.execute(pack, scratch.ctypes.data)
    assert packs[2].carves[1].ptr == scratch.ctypes.data + 256
    with pytest.raises(ValueError, match="size is unknown"):
        packs[2].remaining()
    for bad in ([(100, (2, 32, 1), (3,))], [(0, (2, 32, 1), (251,))], [(-256, (2, 32, 1), (3,))]):
        with pytest.raises(ValueError, match="workspace region"):
            workspace_graph(packs.append, workspace_bytes=1000, carves=bad)


def test_workspace_regions_keep_the_workspace():
    packs: list[Any] = []
    graph = workspace_graph(packs.append, carves=[(0, (1, 8, 1), (64,))])
    scratch = np.full(64, 9, np.uint8)
    alive = weakref.ref(scratch)
    graph.execute({1: 1 << 40, 2: 1 << 41}, scratch)
    region = packs.pop().carves[0]
    del scratch
    gc.collect()
    assert alive() is not None and (region.numpy() == 9).all()
    del region
    gc.collect()
    assert alive() is None
    handed: list[Managed] = []

    def make(kwargs: Any) -> Any:
        handed.append(Managed(np.full(64, 3, np.uint8)))
        return handed[-1].capsule()

    graph.execute({1: 1 << 40, 2: 1 << 41}, Dlpack(make))
    region = packs.pop().carves[0]
    gc.collect()
    assert handed[0].released == 0 and (region.numpy() == 3).all()
    del region
    gc.collect()
    assert handed[0].released == 1


def test_an_absent_optional_operand():
    packs: list[Any] = []
    graph = workspace_graph(packs.append, workspace_bytes=0, facts={"B": {"optional": True}})
    x = np.zeros(3, np.float32)
    for pack in ({1: x}, {1: x, 2: None}):
        graph.execute(pack)
        slot = packs.pop()[1]
        assert not slot.present and slot.ptr == 0 and slot.nbytes == 0 and slot.shape == ()
        assert repr(slot) == "<opgraph.Slot absent>"
        for act in (slot.__dlpack__, slot.numpy, lambda s=slot: s.__dlpack__(max_version=(1, 0))):
            with pytest.raises(BufferError, match="absent"):
                act()
        with pytest.raises(og.OperandError, match="absent"):
            OneOperand((1,)).give(slot)
        assert slot.__dlpack_device__() == (1, 0)
    graph.execute({1: x, 2: x.copy()})
    assert packs.pop()[1].present
    with pytest.raises(og.OperandError):
        graph.execute({2: x})


def test_an_engines_exception_reaches_the_caller_and_leaves_nothing_behind():
    class Trouble(Exception):
        pass

    def run(pack: Any) -> None:
        raise Trouble

    graph = workspace_graph(run, workspace_bytes=0)
    x, y = np.zeros(3, np.float32), np.zeros(3, np.float32)
    alive = weakref.ref(x)
    with pytest.raises(Trouble):
        graph.execute({1: x, 2: y})
    del x
    gc.collect()
    assert alive() is None
    assert not y.any()
