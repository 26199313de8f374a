"""Gated linear attention: which nodes are refused and how, contents of boundaries, pools, buffers, names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from conformance.tolerances import relative_norm
from gated import GRADIENTS, VARIANTS, Call, call, close, problem, same_bits, with_gradients
from sums import refused

import opgraph
from opgraph import data_type
from opgraph.ops import OPS
from opgraph.ops.linear_attention_rules import VARIANTS as TABLE

FLOAT = data_type.FLOAT
FAMILY = [name + suffix for name in VARIANTS for suffix in ("", "_bwd", "_summary", "_summary_bwd")]

# T, N, HQ = HV, K, V
TOKENS, SEQUENCES, HEADS, KEYS, WIDTH = 6, 2, 2, 4, 3


def dims(variant: str) -> dict[str, tuple[int, ...]]:
    """Dims of every input port of a variant."""
    channels = (KEYS,) if variant != "gdn" else ()
    found: dict[str, tuple[int, ...]] = {
        "q": (TOKENS, HEADS, KEYS),
        "k": (TOKENS, HEADS, KEYS),
        "v": (TOKENS, HEADS, WIDTH),
        "g": (TOKENS, HEADS, *channels),
        "beta": (TOKENS, HEADS, *(channels if variant == "gdn2" else ())),
        "cu_seqlens": (SEQUENCES + 1,),
        "dO": (TOKENS, HEADS, WIDTH),
        "initial_state": (SEQUENCES, HEADS, WIDTH, KEYS),
        "d_final_state": (SEQUENCES, HEADS, WIDTH, KEYS),
        "state_checkpoints": (TOKENS // 4 + SEQUENCES, HEADS, WIDTH, KEYS),
        "a_log": (HEADS,),
        "dt_bias": (HEADS, *channels),
        "state_indices": (SEQUENCES,),
    }
    if variant == "gdn2":
        found["w"] = (TOKENS, HEADS, WIDTH)
    return found


PORTS = {
    "": ("q", "k", "v", "g", "beta", "w", "cu_seqlens"),
    "_bwd": ("q", "k", "v", "g", "beta", "w", "cu_seqlens", "dO"),
    "_summary": ("k", "v", "g", "beta", "w", "cu_seqlens"),
    "_summary_bwd": ("q", "k", "g", "beta", "cu_seqlens", "dO"),
}


class Node:
    """A graph with one node, whose inputs may be given other dims and types, or be left out with None."""

    def __init__(
        self,
        variant: str,
        suffix: str = "",
        ports: tuple[str, ...] = (),
        changed: Mapping[str, Any] | None = None,
        types: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        self.graph = opgraph.pygraph(io_data_type=FLOAT)
        shapes = {port: dim for port, dim in dims(variant).items() if port in (*PORTS[suffix], *ports)}
        shapes.update(changed or {})
        whole = {"cu_seqlens": data_type.INT32, "state_indices": data_type.INT32, **(types or {})}
        self.tensors = {
            port: None if dim is None else self.graph.tensor(dim, data_type=whole.get(port, FLOAT), name=f"the {port}")
            for port, dim in shapes.items()
        }
        made = getattr(self.graph, variant + suffix)(**self.tensors, **options, name="node")
        self.outputs = [tensor for tensor in made if tensor is not None]

    def refuses(self, *words: str, error: Any = ValueError) -> None:
        """`validate` refuses the node with all of `words`, and again."""
        for _ in range(2):
            refused(self.graph.validate, "node", *words, error=error)

    def validates(self) -> Node:
        self.graph.validate()
        return self


@pytest.fixture(params=VARIANTS)
def variant(request: pytest.FixtureRequest) -> str:
    return request.param


# ---- what is valid


def test_every_operator_is_there():
    assert {name for name in OPS if name.startswith(("gdn", "kda"))} == set(FAMILY)
    assert [variant.name for variant in TABLE] == list(VARIANTS)
    for name in FAMILY:
        ports = OPS[name].optional_outputs
        assert ports and OPS[name].check is not None, name


def test_outputs_of_the_forward(variant):
    node = Node(variant, "", ("initial_state",), output_final_state=True, checkpoint_every_n_tokens=4)
    node.validates()
    assert [t.name for t in node.outputs] == ["node::O", "node::final_state", "node::state_checkpoints"]
    assert [t.get_dim() for t in node.outputs] == [[6, 2, 3], [2, 2, 3, 4], [3, 2, 3, 4]]
    assert [t.get_stride() for t in node.outputs] == [[6, 3, 1], [24, 12, 4, 1], [24, 12, 4, 1]]
    plain = Node(variant).validates()
    assert [t.name for t in plain.outputs] == ["node::O"]


def test_outputs_of_the_backward(variant):
    options = {"safe_gate": True}
    node = Node(variant, "_bwd", ("initial_state", "a_log", "dt_bias"), **options).validates()
    sources = dict(zip(GRADIENTS, ("q", "k", "v", "g", "beta", "w", "initial_state", "a_log", "dt_bias"), strict=True))
    expected = [port for port in GRADIENTS if sources[port] in node.tensors]
    assert [t.name.partition("::")[2] for t in node.outputs] == expected
    for tensor, port in zip(node.outputs, expected, strict=True):
        assert tuple(tensor.get_dim()) == tuple(node.tensors[sources[port]].get_dim())


@pytest.mark.parametrize("suffix", ["", "_bwd", "_summary", "_summary_bwd"])
def test_types_of_outputs(variant, suffix, ml_dtypes):
    graph = opgraph.pygraph(io_data_type=data_type.BFLOAT16, intermediate_data_type=FLOAT, compute_data_type=FLOAT)
    types = {"g": FLOAT, "beta": FLOAT, "a_log": FLOAT, "dt_bias": FLOAT, "cu_seqlens": data_type.INT64}
    ports = [*PORTS[suffix], "a_log", "dt_bias"]
    tensors = {p: graph.tensor(d, data_type=types.get(p), name=p) for p, d in dims(variant).items() if p in ports}
    options = {"": {"output_final_state": True}, "_bwd": {}}.get(suffix, {"output_transition": True})
    made = getattr(graph, variant + suffix)(**tensors, safe_gate=True, **options)
    outputs = [tensor.set_output(True) for tensor in made if tensor is not None]
    graph.validate()
    narrow = {"O", "dQ", "dK", "dV", "dW"}
    for tensor in outputs:
        port = tensor.name.partition("::")[2]
        assert (tensor.get_data_type() is data_type.BFLOAT16) == (port in narrow), port


def test_states_keep_their_type(variant, ml_dtypes):
    for port, suffix in (("initial_state", ""), ("initial_state", "_bwd"), ("d_final_state", "_summary_bwd")):
        options = {"output_final_state": True} if suffix == "" else {}
        node = Node(variant, suffix, (port,), types={port: data_type.BFLOAT16}, **options).validates()
        states = [t for t in node.outputs if t.name.endswith(("final_state", "initial_state"))]
        assert [t.get_data_type() for t in states] == [data_type.BFLOAT16]


def test_heads_of_a_summary(variant):
    few = {"k": (TOKENS, 1, KEYS), "v": (TOKENS, 1, WIDTH)}
    for changed in (few, {"k": few["k"]}, {"v": few["v"]}):
        Node(variant, "_summary", changed=changed).validates()
    for changed in ({"q": (TOKENS, 1, KEYS)}, {"k": (TOKENS, 1, KEYS)}):
        Node(variant, "_summary_bwd", changed=changed).validates()


# ---- what is refused

OF_ALL = [
    # ports, options, words of the message
    ({}, {"gate_domain": "exp"}, ["gate_domain", "'exp'"]),
    ({}, {"gate_domain": "linear", "safe_gate": True}, ["safe_gate excludes", "linear"]),
    (("a_log",), {}, ["a_log needs safe_gate", "the a_log"]),
    (("dt_bias",), {}, ["dt_bias needs safe_gate", "the dt_bias"]),
    ({}, {"allow_neg_eigval": True}, ["allow_neg_eigval needs use_beta_sigmoid"]),
    ({}, {"max_seqlen": -1}, ["max_seqlen", "-1"]),
]


@pytest.mark.parametrize("suffix", PORTS)
@pytest.mark.parametrize("ports, options, words", OF_ALL)
def test_attributes_that_do_not_go_together(variant, suffix, ports, options, words):
    Node(variant, suffix, tuple(ports), **options).refuses(*words)


@pytest.mark.parametrize("suffix", PORTS)
def test_lower_bound(suffix):
    for variant in ("kda", "gdn2"):
        Node(variant, suffix, gate_lower_bound=-2.0).refuses("gate_lower_bound needs safe_gate", "-2.0")
        for bound in (0.0, 1.0, -5.5, np.nan):
            Node(variant, suffix, safe_gate=True, gate_lower_bound=bound).refuses("gate_lower_bound", str(bound))
        Node(variant, suffix, safe_gate=True, gate_lower_bound=-5).validates()
    with pytest.raises(TypeError, match="gate_lower_bound"):
        Node("gdn", suffix, gate_lower_bound=-2.0)


OF_STATES = [
    ("", (), {"overwrite_initial_state": True, "output_final_state": True}, ["overwrite_initial_state needs initial_state"]),
    ("", ("initial_state",), {"overwrite_initial_state": True}, ["overwrite_initial_state needs final_state"]),
    ("_bwd", ("initial_state",), {"overwrite_initial_state": True}, ["overwrite_initial_state needs final_state"]),
    ("", ("state_indices",), {"output_final_state": True}, ["state_indices needs initial_state", "the state_indices"]),
    (
        "", ("state_indices", "initial_state"), {"output_final_state": True, "checkpoint_every_n_tokens": 4},
        ["state_indices excludes checkpoints", "4"],
    ),
    ("", (), {"checkpoint_every_n_tokens": -3}, ["checkpoint_every_n_tokens", "-3"]),
    ("_bwd", (), {"checkpoint_every_n_tokens": 4}, ["come together", "no port state_checkpoints"]),
    ("_bwd", ("state_checkpoints",), {}, ["come together", "checkpoint_every_n_tokens 0"]),
    ("", (), {"scale": float("inf")}, ["scale is finite"]),
]  # fmt: skip


@pytest.mark.parametrize("suffix, ports, options, words", OF_STATES)
def test_states_that_do_not_go_together(variant, suffix, ports, options, words):
    Node(variant, suffix, ports, **options).refuses(*words)


OF_SHAPES = [
    # what changes, words of the message
    ({"q": (TOKENS, HEADS)}, ["q has 3 axes", "the q"]),
    ({"g": (TOKENS, HEADS, KEYS, 1)}, ["g has", "the g"]),
    ({"cu_seqlens": (SEQUENCES + 1, 1)}, ["cu_seqlens has 1 axes"]),
    ({"cu_seqlens": (0,)}, ["cu_seqlens holds N + 1"]),
    ({"q": (TOKENS + 1, HEADS, KEYS)}, ["q is [T, HQ, K]", "(6, 2, 4)", "(7, 2, 4)"]),
    ({"q": (TOKENS, HEADS, KEYS + 1)}, ["q is [T, HQ, K]"]),
    ({"v": (TOKENS - 1, HEADS, WIDTH)}, ["v is [T, HV, V]"]),
    ({"v": (TOKENS, 3, WIDTH)}, ["divides the other", "3 heads", "the v"]),
    ({"v": (TOKENS, 0, WIDTH)}, ["divides the other", "0 heads"]),
    ({"k": (TOKENS, 1, KEYS)}, ["k has the heads of q or those of v", "1 heads", "the k"]),
    ({"q": (TOKENS, 4, KEYS)}, ["g is [T, HO", "the g"]),
    ({"beta": (TOKENS, 1)}, ["beta"]),
    ({"initial_state": (SEQUENCES, HEADS, KEYS, WIDTH)}, ["[N, HO, V, K]", "the initial_state", "(2, 2, 4, 3)"]),
    ({"initial_state": (SEQUENCES + 1, HEADS, WIDTH, KEYS)}, ["[N, HO, V, K]"]),
    ({"q": None}, ["q is missing"]),
    ({"cu_seqlens": None}, ["cu_seqlens is missing"]),
]


@pytest.mark.parametrize("changed, words", OF_SHAPES)
@pytest.mark.parametrize("suffix", ["", "_bwd"])
def test_shapes(variant, suffix, changed, words):
    Node(variant, suffix, changed=changed).refuses(*words)


def test_shapes_of_the_other_ports(variant):
    Node(variant, "_bwd", changed={"dO": (TOKENS, HEADS, WIDTH + 1)}).refuses("dO is [T, HO, V]", "the dO")
    Node(variant, "_bwd", changed={"d_final_state": (SEQUENCES, HEADS, KEYS, WIDTH)}).refuses("d_final_state is")
    for port in ("a_log", "dt_bias"):
        Node(variant, changed={port: (HEADS + 1,)}, safe_gate=True).refuses(f"{port} is [HO", f"the {port}")
    wrong = {"state_checkpoints": (2, HEADS, WIDTH, KEYS)}
    Node(variant, "_bwd", changed=wrong, checkpoint_every_n_tokens=4).refuses("state_checkpoints is", "(3, 2, 3, 4)")
    pool = {"initial_state": (9, HEADS, WIDTH, KEYS), "state_indices": (SEQUENCES + 1,)}
    Node(variant, changed=pool, output_final_state=True).refuses("state_indices is [N]", "(2,)", "(3,)")
    Node(variant, "_summary", changed={"k": (TOKENS, 3, KEYS)}).refuses("divide the output heads", "3 heads")
    wide = {"g": (TOKENS, 8, *dims(variant)["g"][2:]), "beta": (TOKENS, 8, *dims(variant)["beta"][2:])}
    sources = {"k": (TOKENS, 2, KEYS), "v": (TOKENS, 4, WIDTH)}
    Node(variant, "_summary", changed={**wide, **sources}).refuses("k has the heads of v or the output heads")
    if variant == "gdn2":
        Node(variant, changed={"w": (TOKENS, HEADS, WIDTH + 1)}).refuses("w is [T, HO, V]", "the w")
        Node(variant, changed={"w": None}).refuses("w is missing")


def test_the_rank_of_the_gate_tells_the_operators_apart():
    Node("gdn", changed={"g": (TOKENS, HEADS, KEYS)}).refuses("g has 2 axes: token, output head", "(6, 2, 4)")
    for variant in ("kda", "gdn2"):
        Node(variant, changed={"g": (TOKENS, HEADS)}).refuses("g has 3 axes: token, output head, channel", "(6, 2)")


def test_data_types(variant):
    Node(variant, types={"cu_seqlens": FLOAT}).refuses("cu_seqlens is INT32 or INT64", "FLOAT")
    pool = {"initial_state": (9, HEADS, WIDTH, KEYS), "state_indices": (SEQUENCES,)}
    node = Node(variant, changed=pool, types={"state_indices": data_type.INT64}, output_final_state=True)
    node.refuses("state_indices is INT32", "INT64")
    error = opgraph.cudnnGraphNotSupportedError
    Node(variant, types={"k": data_type.INT8}).refuses("plain floating", "the k", "INT8", error=error)
    node = Node(variant)
    node.outputs[0].set_data_type(data_type.INT32)
    node.refuses("O has a plain floating data type", "INT32", error=error)
    node = Node(variant, "", ("initial_state",), output_final_state=True)
    node.outputs[1].set_data_type(data_type.HALF)
    node.refuses("initial_state and final_state have one data type", "FLOAT", "HALF")
    node = Node(variant, "_bwd", ("initial_state", "d_final_state"), types={"d_final_state": data_type.HALF})
    node.refuses("initial_state and d_final_state have one data type")


def test_dims_set_on_an_output(variant):
    node = Node(variant)
    node.outputs[0].set_dim((TOKENS, HEADS, WIDTH + 1))
    node.refuses("the dim set on O", "(6, 2, 3)", "(6, 2, 4)")
    node = Node(variant)
    node.outputs[0].set_dim((TOKENS, HEADS, WIDTH)).set_stride((3, 18, 1))
    assert node.validates().outputs[0].get_stride() == [3, 18, 1]


def test_nodes_of_other_makers(variant):
    """The rules hold for nodes that did not come from the operators' methods."""
    for suffix, outputs, words in (
        (
            "_bwd",
            ("dQ", "dK", "dV", "dG", "dBeta", "dW", "d_initial_state"),
            ["d_initial_state", "initial_state is given"],
        ),
        ("_bwd", ("dQ", "dK", "dV", "dG", "dBeta", "dW", "d_a_log"), ["d_a_log", "a_log is given"]),
        ("", ("O", "final_state"), ["final_state", "output_final_state"]),
        ("", ("final_state",), ["O exists always"]),
        ("", ("O", "state_checkpoints"), ["come together"]),
    ):
        outputs = tuple(port for port in outputs if port != "dW" or variant == "gdn2")
        model = Node(variant, suffix)
        graph = opgraph.pygraph(io_data_type=FLOAT)
        inputs = {p: graph.tensor(t.dim, data_type=t.data_type) for p, t in model.tensors.items()}
        graph._add_node(
            variant + suffix, inputs=inputs, outputs=outputs, params=dict(model.graph.nodes[0].params), name="node"
        )
        refused(graph.validate, "node", *words, error=ValueError)


def test_beta_guard_is_not_served():
    for suffix in PORTS:
        node = Node("gdn2", suffix, use_qk_l2norm=True, beta_guard=True)
        node.refuses("beta_guard", error=opgraph.cudnnGraphNotSupportedError)
        node = Node("gdn2", suffix, beta_guard=False).validates()


def test_unknown_keywords():
    with pytest.raises(TypeError, match="did you mean 'use_qk_l2norm'"):
        Node("gdn", use_qk_l2_norm=True)
    with pytest.raises(TypeError, match="did you mean 'd_final_state'"):
        Node("kda", "_bwd", changed={"dfinal_state": (1,)})


# ---- contents


@pytest.mark.parametrize("suffix", PORTS)
@pytest.mark.parametrize(
    "boundaries, words",
    [
        ([1, 3, 6], ["start at 0", "1 at entry 0"]),
        ([0, 3, 5], ["end at the number of tokens", "expected 6", "given 5"]),
        ([0, 3, 7], ["end at the number of tokens", "given 7"]),
        ([0, 4, 3], ["do not decrease", "at least 4 at entry 2", "3 there"]),
        ([0, -1, 6], ["do not decrease"]),
    ],
)
@pytest.mark.parametrize("precision", ["native", "float64"])
def test_boundaries_are_checked_before_anything_is_written(variant, suffix, boundaries, words, precision):
    rng = np.random.default_rng(0)
    values = {port: rng.standard_normal(dim) for port, dim in dims(variant).items() if port in PORTS[suffix]}
    values["g"], values["cu_seqlens"] = -np.abs(values["g"]), np.array([0, 2, 6])
    made = Call(variant + suffix, values, precision=precision, dtype=np.float32)
    buffers = made.buffers()
    pack = made.pack(buffers, cu_seqlens=np.array(boundaries, np.int32))
    caught = refused(lambda: made.graph.execute(pack), "'cu_seqlens' (uid", *words, error=opgraph.OperandError)
    assert caught.tensor == "cu_seqlens" and caught.uid == made.inputs["cu_seqlens"].uid
    for buffer in buffers.values():
        buffer.untouched()
    assert all(np.isfinite(array).all() for array in made.results().values())


def test_boundaries_are_checked_before_an_earlier_node_writes():
    values = problem("gdn", [2, 4], (1, 1), KEYS, WIDTH)
    graph = opgraph.pygraph(io_data_type=FLOAT)
    tensors = {port: graph.tensor(x.shape, name=port) for port, x in values.items() if port != "cu_seqlens"}
    tensors["cu_seqlens"] = graph.tensor((3,), data_type=data_type.INT32, name="cu_seqlens")
    shifted = graph.add(tensors["v"], 1.0).set_output(True)
    out = graph.gdn(**{**tensors, "v": shifted})[0].set_output(True)
    graph.build(engine="cpu")
    arrays = {port: x.astype(np.float32) for port, x in values.items()}
    written, result = np.full(values["v"].shape, 7, np.float32), np.full(values["v"].shape, 7, np.float32)
    pack = {tensors[port]: x for port, x in arrays.items()} | {shifted: written, out: result}
    pack[tensors["cu_seqlens"]] = np.array([0, 2, 5], np.int32)
    refused(lambda: graph.execute(pack), "'cu_seqlens'")
    assert (written == 7).all() and (result == 7).all()
    pack[tensors["cu_seqlens"]] = np.array([0, 2, 6], np.int32)
    graph.execute(pack)
    assert (written != 7).all() and np.isfinite(result).all()


def test_a_broken_promise_about_lengths():
    values = problem("gdn", [2, 4], (1, 1))
    made = Call("gdn", values, max_seqlen=3)
    refused(lambda: made.results(), "max_seqlen", "'cu_seqlens'", "at most 3", "4", error=opgraph.OperandError)


# ---- pools


def pooled(variant: str, rows: Any, pool: int = 7) -> dict[str, Any]:
    values = problem(variant, [3, 0, 70, 5])
    rng = np.random.default_rng(9)
    states = rng.standard_normal((pool, *values["initial_state"].shape[1:]))
    return {**values, "initial_state": states, "state_indices": np.array(rows)}


FORM = pytest.mark.parametrize("precision, dtype", [("float64", np.float64), ("native", np.float32)])


@FORM
@pytest.mark.parametrize("in_place", [False, True])
def test_pool(variant, precision, dtype, in_place):
    values = pooled(variant, [5, 2, 0, 3])
    made = Call(
        variant, values, precision=precision, dtype=dtype, output_final_state=True, overwrite_initial_state=in_place
    )
    buffers = made.buffers()
    pool = buffers["final_state"].view
    if in_place:
        pool[...] = made.arrays["initial_state"]
    before = pool.copy()
    made.graph.execute(made.pack(buffers, **({"initial_state": pool} if in_place else {})))
    plain = {port: x for port, x in values.items() if port != "state_indices"}
    plain["initial_state"] = values["initial_state"][[5, 2, 0, 3]]
    expected = call(variant, plain, precision=precision, dtype=dtype)
    same_bits(buffers["O"].view, expected["O"])
    same_bits(pool[[5, 2, 0, 3]], expected["final_state"])
    same_bits(pool[[1, 4, 6]], before[[1, 4, 6]])  # rows of no sequence are not touched
    buffers["final_state"].check()


def test_swapped_slots_agree(variant):
    one = pooled(variant, [5, 2, 0, 3])
    other = {**one, "initial_state": one["initial_state"][::-1].copy(), "state_indices": np.array([1, 4, 6, 3])}
    first, second = (call(variant, values) for values in (one, other))
    same_bits(first["O"], second["O"])
    same_bits(first["final_state"][[5, 2, 0, 3]], second["final_state"][[1, 4, 6, 3]])


@pytest.mark.parametrize("rows", [[0, 1, 2, 7], [0, -1, 2, 3]])
def test_rows_outside_of_the_pool(variant, rows):
    made = Call(variant, pooled(variant, [0, 1, 2, 3]), output_final_state=True)
    buffers = made.buffers()
    pack = made.pack(buffers, state_indices=np.array(rows, np.int32))
    refused(lambda: made.graph.execute(pack), "'state_indices' (uid", "0 to 6", error=opgraph.OperandError)
    for buffer in buffers.values():
        buffer.untouched()


# ---- buffers


@FORM
def test_final_state_over_the_initial_one(variant, precision, dtype):
    values = problem(variant, [70, 0, 3])
    expected = call(variant, values, precision=precision, dtype=dtype)
    options = {"output_final_state": True, "overwrite_initial_state": True, "precision": precision, "dtype": dtype}
    made = Call(variant, values, **options)
    state = made.arrays["initial_state"].copy()
    out = np.full(expected["O"].shape, np.nan, dtype)
    made.graph.execute(made.pack({"O": out, "final_state": state}, initial_state=state))
    same_bits(out, expected["O"])
    same_bits(state, expected["final_state"])


def test_output_over_an_input(variant):
    """O in the buffer of v, which later chunks and sequences still read."""
    values = problem(variant, [150, 9], (2, 2), 6, 6)
    expected = call(variant, values, precision="native", dtype=np.float32)
    made = Call(variant, values, precision="native", dtype=np.float32)
    shared = made.arrays["v"].copy()
    made.graph.execute(made.pack({"O": shared}, v=shared))
    same_bits(shared, expected["O"])


@FORM
@pytest.mark.parametrize("suffix", ["", "_bwd"])
def test_outputs_left_virtual_may_have_a_buffer(variant, precision, dtype, suffix):
    values = problem(variant, [70, 3])
    options: dict[str, Any] = {"precision": precision, "dtype": dtype}
    if suffix:
        values = with_gradients(values)
    else:
        options.update(output_final_state=True, checkpoint_every_n_tokens=64)
    expected = Call(variant + suffix, values, **options).results()
    made = Call(variant + suffix, values, virtual=True, **options)
    for wanted in (list(expected), list(expected)[:1], list(expected)[1:], []):
        buffers = {port: b for port, b in made.buffers().items() if port in wanted}
        made.graph.execute(made.pack(buffers))
        for port, buffer in buffers.items():
            close({port: buffer.view}, {port: expected[port]}, 1e-6)


def test_an_output_left_virtual_feeds_another_node():
    values = problem("gdn", [3, 2], (1, 1))
    graph = opgraph.pygraph(io_data_type=data_type.DOUBLE, compute_data_type=data_type.DOUBLE)
    arrays = {port: x if x.dtype.kind == "f" else x.astype(np.int32) for port, x in values.items()}
    tensors = {port: graph.tensor(x.shape, data_type=x.dtype, name=port) for port, x in arrays.items()}
    out, state, _ = graph.gdn(**tensors, output_final_state=True)
    twice = graph.mul(out, 2.0).set_output(True)
    graph.build(engine="cpu")
    pack = {tensors[port]: x for port, x in arrays.items()}
    result = np.full(values["v"].shape, np.nan)
    graph.execute({**pack, twice: result})
    expected = call("gdn", values)
    np.testing.assert_allclose(result, 2 * expected["O"], rtol=1e-12)
    held = np.full(values["v"].shape, np.nan)
    states = np.full(values["initial_state"].shape, np.nan)
    graph.execute({**pack, twice: result, out: held, state: states})
    np.testing.assert_allclose(2 * held, result)
    np.testing.assert_allclose(states, expected["final_state"], rtol=1e-12)


@pytest.mark.parametrize("layout", ["packed", "head first", "channel first"])
@FORM
def test_strided_operands(variant, layout, precision, dtype):
    values = problem(variant, [64, 70], (2, 2), 8, 8)
    plain = call(variant, values, precision=precision, dtype=dtype)
    order = {"head first": (1, 0, 2), "channel first": (2, 0, 1)}
    if layout == "packed":
        whole = np.stack([values["q"], values["k"], values["v"]], 1).astype(dtype)
        views = {"q": whole[:, 0], "k": whole[:, 1], "v": whole[:, 2]}
    else:
        axes = order[layout]
        back = tuple(np.argsort(axes))
        views = {
            p: np.ascontiguousarray(values[p].astype(dtype).transpose(axes)).transpose(back) for p in ("q", "k", "v")
        }
    made = Call(variant, {**values, **views}, precision=precision, dtype=dtype, output_final_state=True)
    strides = {port: tensor.get_stride() for port, tensor in made.inputs.items() if port in views}
    assert all(list(strides[p]) == [s // views[p].itemsize for s in views[p].strides] for p in views)
    found = made.results()
    for port, array in plain.items():
        same_bits(found[port], array)


def test_state_of_other_orientation_is_refused(variant):
    made = Call(variant, problem(variant, [3], (1, 1), 3, 2))
    turned = np.zeros((1, 1, 3, 2))
    refused(lambda: made.results(initial_state=turned), "'initial_state'", "(1, 1, 2, 3)", "(1, 1, 3, 2)")


@FORM
def test_live_extents(variant, precision, dtype):
    """Buffers larger than what is live: 40 tokens of 90, 2 sequences of 5."""
    large = problem(variant, [20, 20, 20, 20, 10])
    made = Call(
        variant, large, precision=precision, dtype=dtype, output_final_state=True,
        graph={"is_override_shape_enabled": True},
    )  # fmt: skip
    ports = {**made.inputs, **made.outputs}
    live = {"cu_seqlens": 3, "initial_state": 2, "final_state": 2}
    dims_live = {port: (live.get(port, 40), *tensor.get_dim()[1:]) for port, tensor in ports.items()}
    buffers = made.buffers()
    made.graph.execute(
        made.pack(buffers, cu_seqlens=np.array([0, 7, 40, -1, -1, -1], np.int32)),
        override_uids=[t.uid for t in ports.values()],
        override_shapes=[dims_live[port] for port in ports],
        override_strides=[t.get_stride() for t in ports.values()],
    )
    small = {p: x[:40] for p, x in large.items() if p not in ("cu_seqlens", "initial_state")}
    small |= {"cu_seqlens": np.array([0, 7, 40]), "initial_state": large["initial_state"][:2]}
    expected = call(variant, small, precision=precision, dtype=dtype)
    for port, array in expected.items():
        same_bits(buffers[port].view[: len(array)], array)
        assert np.isnan(buffers[port].view[len(array) :]).all()


@pytest.mark.parametrize("sizes", [(0, 3), (3, 0), (1, 1)])
def test_unusual_widths(variant, sizes):
    for precision in ("native", "float64"):
        values = problem(variant, [70, 2], (1, 2), 4, 4)
        k, v = sizes
        cut = {"q": k, "k": k, "v": v, "w": v}
        values = {p: x[..., : cut[p]] if p in cut else x for p, x in values.items()}
        values["initial_state"] = values["initial_state"][:, :, :v, :k]
        if variant != "gdn":
            values["g"] = values["g"][..., :k]
        if variant == "gdn2":
            values["beta"] = values["beta"][..., :k]
        found = call(variant, values, precision=precision)
        assert found["O"].shape == (72, 2, v) and np.isfinite(found["O"]).all()
        gradients = call(f"{variant}_bwd", with_gradients(values), precision=precision)
        assert all(np.isfinite(array).all() for array in gradients.values())


def test_no_heads(variant):
    values = problem(variant, [3, 2], (1, 1))
    values = {p: x[:, :0] if p != "cu_seqlens" else x for p, x in values.items()}
    assert call(variant, values, precision="native")["O"].shape == (5, 0, 6)
    assert call(f"{variant}_bwd", with_gradients(values), precision="native")["dQ"].shape == (5, 0, 8)


def test_double_is_double_in_chunks(variant):
    values = with_gradients(problem(variant, [130], (1, 2)))
    how = {"precision": "native", "compute": data_type.DOUBLE}
    forward = {port: x for port, x in values.items() if port not in ("dO", "d_final_state")}
    close(call(variant, forward, **how), call(variant, forward), 1e-13)
    close(call(f"{variant}_bwd", values, **how), call(f"{variant}_bwd", values), 1e-12)


def test_double_states_pass_unrounded_through_float_arithmetic(variant):
    values = problem(variant, [0, 3])
    found = call(variant, values, precision="native", dtype=np.float64, compute=FLOAT)
    same_bits(found["final_state"][0], values["initial_state"][0])


# ---- names


def test_long_names(variant):
    long = {"gdn": "gated_delta_net", "gdn2": "gated_delta_net_v2", "kda": "kimi_delta_attention"}[variant]
    values = problem(variant, [3, 4])
    values["beta"] = np.random.default_rng(1).standard_normal(values["beta"].shape)
    short = call(variant, values, use_qk_l2norm=True, use_beta_sigmoid=True)
    found = call(long, values, use_qk_l2norm_in_kernel=True, use_beta_sigmoid_in_kernel=True, output_final_state=True)
    for port, array in short.items():
        same_bits(found[port], array)
    with pytest.raises(TypeError, match="use_qk_l2norm_in_kernel"):
        call(long, values, use_qk_l2norm=True)


@pytest.mark.parametrize("boundaries", [None, "given"])
def test_long_names_take_a_batch(variant, boundaries):
    long = {"gdn": "gated_delta_net", "gdn2": "gated_delta_net_v2", "kda": "kimi_delta_attention"}[variant]
    values = problem(variant, [5, 5, 5], (1, 2))
    expected = call(variant, values, precision="native", dtype=np.float32)
    arrays = {p: x.astype(np.float32) for p, x in values.items() if p != "cu_seqlens"}
    batch = {p: x if p == "initial_state" else x.reshape(3, 5, *x.shape[1:]) for p, x in arrays.items()}
    graph = opgraph.pygraph(io_data_type=FLOAT)
    tensors: dict[str, Any] = {p: graph.tensor(x.shape, name=p) for p, x in batch.items()}
    if boundaries:
        batch["cu_seqlens"] = np.array([0, 5, 10, 15], np.int64)
        tensors["cu_seqlens"] = graph.tensor((4,), data_type=data_type.INT64)
    out, state, rows = getattr(graph, long)(**tensors, output_final_state=True)
    assert rows is None
    out.set_output(True)
    state.set_output(True)
    graph.build(engine="cpu", knobs={"precision": "native"})
    assert out.get_dim() == [3, 5, 2, 6]
    found, kept = np.empty((3, 5, 2, 6), np.float32), np.empty((3, 2, 6, 8), np.float32)
    graph.execute({tensors[p]: x for p, x in batch.items()} | {out: found, state: kept})
    same_bits(found.reshape(15, 2, 6), expected["O"])
    same_bits(kept, expected["final_state"])


def test_arrays_as_arguments():
    values = problem("gdn", [3, 2], (1, 1))
    arrays = {p: x.astype(np.float32 if x.dtype.kind == "f" else np.int32) for p, x in values.items()}
    graph = opgraph.pygraph(io_data_type=FLOAT)
    out = graph.gdn(**arrays)[0].set_output(True)
    graph.build(engine="cpu")
    found = np.empty(out.get_dim(), np.float32)
    graph.execute({out: found})
    assert relative_norm(found, call("gdn", values)["O"]) < 1e-6
