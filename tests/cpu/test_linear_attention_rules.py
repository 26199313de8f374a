"""Gated linear attention: which nodes are refused, in what words, and what boundaries may hold."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from gated import GRADIENTS, VARIANTS, Call, problem
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
    (
        "", (), {"overwrite_initial_state": True, "output_final_state": True},
        ["overwrite_initial_state needs initial_state"],
    ),
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
