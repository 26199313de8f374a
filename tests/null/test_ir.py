"""Declaring a graph: numbers, names, roles, default data types, freezing, copying."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
from declared import Declared

from opgraph.ir import (
    GraphIR,
    NodeType,
    Tensor,
    cudnnGraphNotSupportedError,
    data_type,
    scalar_type,
    tensor_reordering,
)
from opgraph.ops import OPS

OPS_PARAMS = {"mode": "relu", "negative_slope": None, "lower_clip": None, "upper_clip": None}


def add_graph(**context):
    graph = Declared(**context)
    a, b = graph.tensor([4], name="A"), graph.tensor([4], name="B")
    c = graph.add(a, b).set_output(True).set_name("C")
    return graph, a, b, c


# ---- numbers


def test_uids_ascend_from_one_in_order_of_declaration():
    _, a, b, c = add_graph()
    assert [t.uid for t in (a, b, c)] == [1, 2, 3]
    assert not any(t.uid_assigned for t in (a, b, c))


def test_a_user_uid_renumbers_the_automatic_holder():
    _, a, b, c = add_graph()
    a.set_uid(3)
    assert a.uid == 3 and a.uid_assigned
    assert c.uid == 4 and not c.uid_assigned
    assert b.uid == 2


def test_automatic_uids_skip_reserved_ones():
    ir = GraphIR()
    assert [ir.tensor([1], uid=2).uid, ir.tensor([1]).uid, ir.tensor([1]).uid] == [2, 1, 3]


def test_two_user_uids_clash_naming_both_tensors():
    _, a, b, _ = add_graph()
    a.set_uid(7)
    with pytest.raises(ValueError, match=r"(?s)'B'.*7.*'A'"):
        b.set_uid(7)
    assert b.uid == 2
    ir = GraphIR()
    ir.tensor([1], name="first", uid=7)
    with pytest.raises(ValueError, match=r"(?s)'second'.*7.*'first'"):
        ir.tensor([1], name="second", uid=7)
    assert ir.find_tensor("second") is None and len(ir.all_tensors) == 1


def test_a_uid_set_twice_keeps_the_last_and_forgets_the_first():
    graph, a, _, _ = add_graph()
    a.set_uid(70)
    a.set_uid(71)
    assert graph.ir.find_tensor(71) is a
    assert graph.ir.find_tensor(70) is None


def test_one_tensor_may_be_both_inputs():
    graph = Declared()
    a = graph.tensor([4], name="A")
    c = graph.add(a, a).set_output(True)
    assert [t.uid for t in graph.ir.snapshot().operands] == [a.uid, c.uid]


def test_uid_zero_is_legal_and_minus_one_means_unset():
    ir = GraphIR()
    assert ir.tensor([1], uid=0).uid == 0
    unset = ir.tensor([1], uid=-1)
    assert unset.uid > 0 and not unset.uid_assigned
    assert unset.set_uid(-1).uid > 0


@pytest.mark.parametrize("uid", [-2, 2**63])
def test_uid_out_of_range(uid):
    ir = GraphIR()
    with pytest.raises(ValueError, match="uid"):
        ir.tensor([1], uid=uid)
    with pytest.raises(ValueError, match="uid"):
        ir.tensor([1]).set_uid(uid)


@pytest.mark.parametrize("uid", ["3", 1.5, True])
def test_uid_of_the_wrong_kind(uid):
    ir = GraphIR()
    with pytest.raises(TypeError, match="uid"):
        ir.tensor([1], uid=uid)
    with pytest.raises(TypeError, match="uid"):
        ir.tensor([1]).set_uid(uid)


def test_setting_the_same_uid_is_legal_even_when_frozen():
    graph, a, b, _ = add_graph()
    b.set_uid(9)
    graph.ir.freeze()
    b.set_uid(9)
    a.set_uid(a.uid)
    with pytest.raises(RuntimeError, match="copy the graph"):
        b.set_uid(10)


# ---- names


def test_missing_names_count_uniquely_named_tensors():
    ir = GraphIR()
    assert [ir.tensor([1]).name, ir.tensor([1], name="x").name, ir.tensor([1]).name] == [
        "tensor_0",
        "x",
        "tensor_2",
    ]


def test_an_automatic_name_never_takes_a_used_one():
    ir = GraphIR()
    ir.tensor([1], name="tensor_1")
    assert ir.tensor([1]).name == "tensor_2"


def test_duplicate_names_are_legal_until_looked_up():
    ir = GraphIR()
    first, second = ir.tensor([1], name="x"), ir.tensor([1], name="x")
    assert "x" not in ir.tensors
    with pytest.raises(ValueError, match=r"'x'.*ambiguous.*1, 2"):
        ir.find_tensor("x")
    second.set_name("y")
    assert ir.find_tensor("x") is first and ir.find_tensor("y") is second
    first.name = "z"
    assert ir.find_tensor("x") is None and ir.tensors == {"y": second, "z": first}


def test_node_and_output_names():
    graph = Declared()
    a = graph.tensor([4])
    first, second, named = graph.add(a, a), graph.add(a, a), graph.relu(a, name="act")
    assert [node.name for node in graph.ir.nodes] == ["add.0", "add.1", "act"]
    assert [t.name for t in (first, second, named)] == ["add.0::OUT_0", "add.1::OUT_0", "act::OUT_0"]
    m = graph.tensor([2, 2])
    assert graph.matmul(m, m).name == "matmul.0::C"
    assert graph.ir.get_node("act").params["mode"] == "relu"
    assert graph.ir.get_node("nothing") is None
    graph.abs(a, name="act")
    with pytest.raises(ValueError, match="ambiguous"):
        graph.ir.get_node("act")


# ---- tensors


def test_dims_strides_and_types_are_taken_in_many_spellings():
    ir = GraphIR(io_data_type=data_type.HALF)
    t = ir.tensor(np.array([2, 3], dtype=np.int32), (np.int64(3), 1), np.float32)
    assert (t.dim, t.stride, t.data_type) == ((2, 3), (3, 1), data_type.FLOAT)
    assert all(type(n) is int for n in t.dim + t.stride)
    assert ir.tensor(n for n in (2, 3)).dim == (2, 3)
    assert ir.tensor([2, 3], []).stride == (3, 1)
    assert ir.tensor([2, 3], data_type=data_type.NOT_SET).data_type is None
    assert ir.tensor([2, 3], reordering_type=tensor_reordering.NONE).reordering_type is None


def test_row_major_default_and_zero_extents():
    ir = GraphIR()
    assert ir.tensor([2, 3, 4]).stride == (12, 4, 1)
    assert ir.tensor([4, 0, 3]).stride == (3, 3, 1)
    assert ir.tensor([0]).dim == (0,)
    assert not ir.tensor([4]).stride_assigned and ir.tensor([4], [1]).stride_assigned


@pytest.mark.parametrize("dim, stride", [([-1], None), ([2, 3], [-3, 1]), ([1] * 9, None), ([1], [1] * 9)])
def test_refused_extents(dim, stride):
    ir = GraphIR()
    with pytest.raises(ValueError, match="'bad'"):
        ir.tensor(dim, stride, name="bad")
    t = ir.tensor([2, 3])
    with pytest.raises(ValueError, match=r"uid"):
        t.set_dim(dim).set_stride(stride or [1])


@pytest.mark.parametrize("dim", [5, [1.0], ["1"], None, [None]])
def test_extents_of_the_wrong_kind(dim):
    with pytest.raises(TypeError, match="dim"):
        GraphIR().tensor(dim)


def test_setters_chain_and_attributes_write_through():
    graph, a, b, _ = add_graph()
    offset = graph.tensor([5, 1, 1, 1], data_type=data_type.INT32)
    same = (
        a.set_dim([4, 1])
        .set_stride([1, 4])
        .set_data_type(data_type.HALF)
        .set_name("AA")
        .set_uid(40)
        .set_is_virtual(False)
        .set_output(True)
        .set_ragged_offset(offset)
        .set_ragged_offset_multiplier(2)
        .set_reordering_type(tensor_reordering.F8_128x4)
        .set_is_pass_by_value(False)
        .set_alignment_value(16)
    )
    assert same is a
    assert a.get_dim() == [4, 1] and a.get_stride() == [1, 4] and a.dim_assigned and a.stride_assigned
    assert a.get_reordering_type() is tensor_reordering.F8_128x4 and a.get_ragged_offset_multiplier() == 2
    assert b.get_data_type() is data_type.NOT_SET and b.get_reordering_type() is tensor_reordering.NONE
    a.dim, a.data_type, a.alignment_value = [8, 1], np.float32, 32
    assert (a.dim, a.data_type, a.alignment_value) == ((8, 1), data_type.FLOAT, 32)
    a.get_dim().append(1)
    assert a.dim == (8, 1)
    with pytest.raises(AttributeError):
        a.uid_assigned = False
    with pytest.raises(ValueError, match="alignment_value"):
        a.set_alignment_value(0)
    with pytest.raises(ValueError, match="multiplier"):
        a.set_ragged_offset_multiplier(0)
    with pytest.raises(TypeError, match="ragged_offset"):
        a.set_ragged_offset(3)


def test_set_dim_on_an_input_renews_its_default_stride_only():
    ir = GraphIR()
    assert ir.tensor([2, 3]).set_dim([4, 5]).stride == (5, 1)
    assert ir.tensor([2, 3], [3, 1]).set_dim([4, 3]).stride == (3, 1)


def test_tensor_validate_rules():
    ir = GraphIR()
    for tensor, text in (
        (ir.tensor([]), "dims not set"),
        (ir.tensor([2, 3]).set_stride([1]), "one rank"),
        (ir.tensor([1], is_virtual=True, is_pass_by_value=True), "virtual and pass-by-value"),
        (ir.tensor([1], ragged_offset_multiplier=2), "needs a ragged_offset"),
    ):
        with pytest.raises(ValueError, match=text):
            tensor.validate()
    with pytest.raises(ValueError, match="dims not set"):
        ir.validate()
    assert not ir.validated


def test_unset_strides_are_named():
    tensor = Tensor("lone", (2,), ())
    with pytest.raises(ValueError, match="strides not set"):
        tensor.validate()


def test_equality_is_identity_and_survives_renaming():
    _, a, b, _ = add_graph()
    table = {a: 1, b: 2}
    a.set_name("other")
    assert table[a] == 1 and a != b


@pytest.mark.parametrize("action", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_lone_tensor_or_node_cannot_be_copied(action):
    graph, a, _, _ = add_graph()
    with pytest.raises(TypeError, match=r"opgraph\.Tensor"):
        action(a)
    with pytest.raises(TypeError, match=r"opgraph\.Node"):
        action(graph.ir.nodes[0])


# ---- default data types


def test_io_type_alone_serves_intermediate_and_compute():
    ir = GraphIR(io_data_type=data_type.HALF)
    assert ir.intermediate_data_type is data_type.HALF and ir.compute_data_type is data_type.HALF


def test_nothing_set_means_float_for_intermediate_and_compute():
    ir = GraphIR(io_data_type=data_type.NOT_SET)
    assert ir.io_data_type is None
    assert ir.intermediate_data_type is data_type.FLOAT and ir.compute_data_type is data_type.FLOAT


def test_final_virtual_state_decides_the_type():
    graph = Declared(data_type.HALF, data_type.FLOAT, data_type.DOUBLE)
    x = graph.tensor([4])
    middle = graph.relu(x)
    y = graph.relu(middle)
    graph.validate()
    assert (x.data_type, middle.data_type, y.data_type) == (data_type.HALF, data_type.FLOAT, data_type.FLOAT)
    y.set_output(True)
    graph.validate()
    assert y.data_type is data_type.HALF
    y.set_data_type(data_type.BFLOAT16)
    graph.validate()
    assert y.data_type is data_type.BFLOAT16
    spec = graph.ir.snapshot()
    assert [node.compute_data_type for node in spec.nodes] == [data_type.DOUBLE] * 2


def test_no_type_anywhere_names_the_tensor():
    graph = Declared(None)
    a = graph.tensor([4], name="A")
    graph.relu(a)
    with pytest.raises(ValueError, match=r"relu\.0.*'A' \(uid 1\).*io_data_type"):
        graph.validate()


def test_a_type_without_counterpart_is_not_supported():
    with pytest.raises(cudnnGraphNotSupportedError, match="complex64"):
        GraphIR(io_data_type=np.complex64)
    with pytest.raises(cudnnGraphNotSupportedError, match=">f4"):
        GraphIR().tensor([1], data_type=np.dtype(">f4"))
    assert not issubclass(cudnnGraphNotSupportedError, RuntimeError)


# ---- roles


def test_outputs_start_virtual_and_inputs_never_are():
    graph, a, b, c = add_graph()
    assert graph.ir.get_inputs() == [a, b] and graph.ir.get_outputs() == [c]
    d = graph.relu(c)
    assert d.is_virtual and d.get_is_virtual()
    v = graph.tensor([4], is_virtual=True, name="V")
    graph.relu(v)
    with pytest.raises(ValueError, match=r"'V' \(uid \d+\) is virtual"):
        graph.validate()


def test_operands_ascend_by_uid_and_leave_embedded_scalars_out():
    graph = Declared(data_type.FLOAT)
    x = graph.tensor([2, 3, 4, 5], name="x")
    offset = graph.tensor([3], data_type=data_type.INT64, name="offset")
    x.set_ragged_offset(offset)
    half = graph.ir.tensor_scalar(0.5, scalar_type.RUNTIME_PARAM, "half")
    eps = graph.tensor([1, 1, 1, 1], is_pass_by_value=True, name="eps")
    graph.tensor([7], name="unused")
    y = graph.add(graph.mul(x, half), eps).set_output(True)
    y.set_uid(0)
    spec = graph.ir.snapshot()
    assert [t.name for t in spec.operands] == [y.name, "x", "offset", "eps"]
    assert spec.tensors[x.uid].ragged_offset == offset.uid
    assert offset.dim == (3, 1, 1, 1)
    assert "unused" not in {t.name for t in spec.tensors.values()}
    assert spec.tensors[half.uid].pass_by_value == 0.5 and spec.tensors[half.uid].is_pass_by_value
    assert spec.tensors[y.uid].is_output and not spec.tensors[x.uid].is_output
    assert not any(t.is_virtual for t in spec.operands)


def test_snapshot_is_immutable():
    graph, a, *_ = add_graph()
    spec = graph.ir.snapshot()
    with pytest.raises(AttributeError, match="read-only"):
        spec.name = "x"
    with pytest.raises(AttributeError, match="read-only"):
        spec.tensors[a.uid].dim = (5,)
    with pytest.raises(TypeError):
        spec.tensors[a.uid] = None
    with pytest.raises(TypeError):
        spec.nodes[0].params["mode"] = "sub"
    a.set_dim([5])
    assert spec.tensors[a.uid].dim == (4,)
    assert graph.ir.nodes[0].node_type is NodeType.POINTWISE
    with pytest.raises(TypeError):
        graph.ir.nodes[0].inputs["IN_0"] = a


@pytest.mark.parametrize(
    "offset, text",
    [
        (dict(dim=[3, 1, 1, 1], data_type=data_type.FLOAT), "INT32 or INT64.*FLOAT"),
        (dict(dim=[3, 1, 1, 1]), "INT32 or INT64.*HALF"),
        (dict(dim=[4, 1, 1, 1], data_type=data_type.INT32), r"\[3, 1, 1, 1\]"),
    ],
)
def test_unfit_ragged_offsets(offset, text):
    graph = Declared(data_type.HALF)
    x = graph.tensor([2, 3, 4, 5], ragged_offset=graph.tensor(**offset, name="O"), name="X")
    graph.relu(x)
    with pytest.raises(ValueError, match=rf"'X' \(uid 2\).*'O' \(uid 1\).*{text}"):
        graph.validate()


def test_tensors_of_another_graph_are_refused():
    graph, other = Declared(), Declared()
    a, foreign = graph.tensor([4], name="A"), other.tensor([4], name="foreign")
    with pytest.raises(ValueError, match=r"add '.*'foreign' \(uid 1\) belongs to another graph"):
        graph.add(a, foreign)
    a.set_ragged_offset(foreign)
    with pytest.raises(ValueError, match="another graph"):
        graph.validate()


def test_caller_declared_outputs():
    graph = Declared()
    a, out = graph.tensor([4], name="A"), graph.tensor([4], name="out")
    results = graph.ir.add_node(OPS["relu"], {"IN_0": a}, {"OUT_0": out}, OPS_PARAMS, "r")
    assert results == {"OUT_0": out} and graph.ir.get_outputs() == [out]
    graph.validate()
    with pytest.raises(ValueError, match="already written by 'r'"):
        graph.ir.add_node(OPS["relu"], {"IN_0": a}, {"OUT_0": out}, OPS_PARAMS)
    with pytest.raises(ValueError, match="also an input"):
        graph.ir.add_node(OPS["relu"], {"IN_0": a}, {"OUT_0": a}, OPS_PARAMS)


def test_a_node_that_reads_what_a_later_node_writes():
    graph = Declared()
    a, late = graph.tensor([4]), graph.tensor([4], name="late")
    graph.relu(late, name="early_reader")
    graph.ir.add_node(OPS["relu"], {"IN_0": a}, {"OUT_0": late}, OPS_PARAMS, "writer")
    with pytest.raises(ValueError, match=r"early_reader.*'late'.*later node 'writer'"):
        graph.validate()


# ---- embedded scalars


@pytest.mark.parametrize(
    "dtype, value",
    [
        (data_type.INT64, 9007199254740993),
        (data_type.INT64, np.int64(9007199254740993)),
        (data_type.FLOAT, 0.1),
        (data_type.FLOAT, np.float32(0.1)),
        (data_type.FLOAT, np.array(0.1, np.float32)),
        (data_type.HALF, 1e-5),
        (data_type.BOOLEAN, True),
    ],
)
def test_embedded_scalars_that_fit(dtype, value):
    graph = Declared(dtype)
    x = graph.tensor([1])
    graph.add(x, graph.ir.tensor_scalar(value, scalar_type.COMPILE_TIME_CONST))
    graph.validate()


@pytest.mark.parametrize(
    "dtype, value", [(data_type.INT32, 0.5), (data_type.INT32, 2**31), (data_type.HALF, 1e6)]
)
def test_embedded_scalars_that_do_not_fit_are_refused_when_the_graph_is_validated(dtype, value):
    graph = Declared(dtype)
    x = graph.tensor([1])
    graph.add(x, graph.ir.tensor_scalar(value, scalar_type.COMPILE_TIME_CONST, "s"))
    with pytest.raises(ValueError, match=r"'s' \(uid 2\)"):
        graph.validate()


def test_an_embedded_array_is_copied():
    graph = Declared(data_type.FLOAT)
    value = np.array([2.0], np.float32)
    s = graph.ir.tensor_scalar(value, scalar_type.RUNTIME_PARAM)
    value[0] = 3.0
    assert s.pass_by_value[0] == 2.0
    with pytest.raises(ValueError):
        s.pass_by_value[0] = 4.0


# ---- what cannot be declared


def test_spans_beyond_64_bits_are_refused():
    graph = Declared(data_type.HALF)
    big = graph.tensor([2**62, 4], name="big")
    graph.relu(big)
    with pytest.raises(ValueError, match=r"'big' \(uid 1\).*64-bit"):
        graph.validate()
    graph = Declared(data_type.DOUBLE)
    graph.relu(graph.tensor([2, 2**60], [2**60, 1], name="bytes"))
    with pytest.raises(ValueError, match="'bytes'"):
        graph.validate()
    graph = Declared(data_type.INT8)
    graph.relu(graph.tensor([65536, 65536]))
    graph.validate()


@pytest.mark.parametrize(
    "dim, stride, fine",
    [
        ([5], [0], False),
        ([1], [0], True),
        ([2, 3], [2, 1], False),
        ([2, 3], [3, 1], True),
        ([2, 3], [1, 2], True),
        ([2, 3], [8, 2], True),
        ([3, 4], [4, 3], False),  # interleaved without collision: refused all the same
        ([0, 3], [0, 0], True),
        ([2, 1, 3], [3, 0, 1], True),
    ],
)
def test_an_output_must_not_overlap_itself(dim, stride, fine):
    graph = Declared()
    x = graph.tensor(dim, name="x")
    y = graph.relu(x).set_output(True).set_name("y").set_stride(stride)
    if fine:
        graph.validate()
        assert y.stride == tuple(stride)
        return
    with pytest.raises(ValueError, match=r"'y' \(uid 2\).*overlaps itself"):
        graph.validate()
    y.set_output(False)
    graph.validate()


def test_an_input_may_repeat_elements():
    graph = Declared()
    x = graph.tensor([5], [0])
    y = graph.add(x, x).set_output(True)
    graph.validate()
    assert y.stride == (1,)


# ---- freezing


def test_a_frozen_graph_refuses_every_change():
    graph, a, b, c = add_graph()
    spec = graph.ir.freeze()
    offset = graph.tensor([5, 1, 1, 1])
    for change in (
        lambda: a.set_dim([5]),
        lambda: setattr(a, "dim", [4]),
        lambda: a.set_stride([2]),
        lambda: a.set_data_type(data_type.HALF),
        lambda: a.set_uid(17),
        lambda: a.set_name("other"),
        lambda: a.set_name("A"),
        lambda: c.set_output(False),
        lambda: b.set_is_virtual(True),
        lambda: a.set_ragged_offset(offset),
        lambda: a.set_alignment_value(16),
        lambda: a.set_is_pass_by_value(True),
        lambda: setattr(a, "pass_by_value", 1.0),
        lambda: setattr(a, "scalar_type", None),
        lambda: a.set_reordering_type(None),
        lambda: setattr(a, "dim_assigned", False),
        lambda: graph.add(a, b),
        lambda: graph.ir.set_context(io=data_type.HALF),
    ):
        with pytest.raises(RuntimeError, match="planning"):
            change()
    assert graph.ir.snapshot() is spec and graph.ir.frozen and graph.ir.validated


def test_new_unattached_tensors_may_follow_but_disturb_nothing():
    graph, a, _, c = add_graph()
    spec = graph.ir.freeze()
    late = graph.tensor([9], name="A")
    assert graph.ir.find_tensor("A") is a and late.uid not in spec.tensors
    with pytest.raises(ValueError, match=f"uid {c.uid}"):
        graph.tensor([1], uid=c.uid)
    assert graph.ir.snapshot() is spec and c.uid == 3


def test_changes_clear_the_validated_mark_and_are_inferred_again():
    graph, a, b, c = add_graph()
    graph.validate()
    assert c.dim == (4,)
    a.set_dim([5])
    b.set_dim([5])
    assert not graph.ir.validated
    graph.validate()
    assert c.dim == (5,) and c.stride == (1,)


def test_a_rejected_graph_raises_again():
    graph = Declared()
    graph.add(graph.tensor([4]), graph.tensor([5]))
    for _ in range(2):
        with pytest.raises(ValueError):
            graph.validate()
    assert not graph.ir.validated


# ---- copying


def test_a_copy_is_independent_and_unfrozen():
    graph, a, b, c = add_graph(io=data_type.HALF)
    c.set_uid(30)
    a.set_ragged_offset(graph.tensor([5, 1, 1, 1], data_type=data_type.INT32, name="off"))
    spec = graph.ir.freeze()
    twin, replaced = graph.ir.copy()
    assert not twin.frozen and set(replaced) == set(graph.ir.all_tensors)
    assert replaced[a].ragged_offset is replaced[a.ragged_offset]
    assert [(t.uid, t.name) for t in twin.all_tensors] == [(t.uid, t.name) for t in graph.ir.all_tensors]
    assert twin.snapshot().operands[0].dim == (4,)
    replaced[a].set_dim([6])
    replaced[b].set_dim([6])
    replaced[a].set_ragged_offset(None)
    twin.validate()
    assert replaced[c].dim == (6,) and c.dim == (4,) and graph.ir.snapshot() is spec
    twin.add_node(OPS["relu"], {"IN_0": replaced[c]}, ("OUT_0",), OPS_PARAMS)
    assert len(twin.nodes) == 2 and len(graph.ir.nodes) == 1


def test_deepcopy_of_a_graph_and_its_tensors_together():
    graph, a, _, _ = add_graph()
    twin, copied = copy.deepcopy((graph.ir, a))
    assert copied is twin.find_tensor("A") and copied is not a
    with pytest.raises(TypeError, match=r"opgraph\.GraphIR"):
        pickle.dumps(graph.ir)


def test_inspect_is_plain():
    import json

    graph, *_ = add_graph()
    graph.validate()
    seen = json.loads(json.dumps(graph.ir.inspect()))
    assert seen["nodes"][0]["inputs"] == {"IN_0": 1, "IN_1": 2}
    assert seen["tensors"][2]["data_type"] == "data_type.FLOAT"
