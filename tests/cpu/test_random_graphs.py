"""Random graphs of exact operators on the CPU engine: virtual and stored edges, repeated inputs, views, and
outputs that lie on inputs. A call is right, or refused with nothing written."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

import opgraph
from opgraph import OperandError, data_type

BINARY = {"add": np.add, "sub": np.subtract, "max": np.maximum, "min": np.minimum}
UNARY = {"neg": np.negative, "abs": np.abs, "identity": np.array}
EDGE = 3  # matrices are square, so that a transpose has the dims of its input


@st.composite
def plans(draw: Any) -> Any:
    """(number of inputs, nodes as (operator, operands), which results are outputs, which input each output
    lies on)."""
    inputs = draw(st.integers(1, 3))
    nodes = []
    for i in range(draw(st.integers(1, 8))):
        op = draw(st.sampled_from([*BINARY, *UNARY, "transpose", "slice"]))
        known = st.integers(0, inputs + i - 1)
        nodes.append((op, [draw(known), draw(known)] if op in BINARY else [draw(known)]))
    outputs = draw(st.sets(st.integers(0, len(nodes) - 1), min_size=1, max_size=3))
    lies_on = {out: draw(st.sampled_from([None, None, *range(inputs)])) for out in sorted(outputs)}
    return inputs, nodes, lies_on


@settings(max_examples=250, deadline=None)
@given(plans(), st.sampled_from(["native", "float64"]))
def test_random_graph(plan, precision):
    count, nodes, lies_on = plan
    rng = np.random.default_rng(count + len(nodes))
    before = [rng.integers(-9, 10, (EDGE, EDGE)).astype(np.float32) for _ in range(count)]
    graph = opgraph.pygraph(io_data_type=data_type.FLOAT)
    tensors = [graph.tensor([EDGE, EDGE], name=f"x{i}") for i in range(count)]
    values = list(before)
    for op, operands in nodes:
        given_tensors = [tensors[i] for i in operands]
        given_values = [values[i] for i in operands]
        if op == "transpose":
            tensors.append(graph.transpose(*given_tensors, permutation=[1, 0]))
            values.append(given_values[0].T)
        elif op == "slice":
            tensors.append(graph.slice(*given_tensors, slices=[slice(0, EDGE), slice(0, EDGE)]))
            values.append(given_values[0])
        else:
            tensors.append(getattr(graph, op)(*given_tensors))
            values.append({**BINARY, **UNARY}[op](*given_values))
    used = {i for _, operands in nodes for i in operands}
    for out in lies_on:
        tensors[count + out].set_output(True).set_stride([EDGE, 1])
    graph.build(engine="cpu", knobs={"precision": precision})

    arrays = [array.copy() for array in before]
    results = {
        out: np.full((EDGE, EDGE), np.nan, np.float32)
        if source is None or source not in used
        else arrays[source]
        for out, source in lies_on.items()
    }
    pack = {tensors[i]: arrays[i] for i in range(count)}
    pack.update({tensors[count + out]: result for out, result in results.items()})
    try:
        graph.execute(pack)
    except OperandError as refusal:
        assert any(source is not None for source in lies_on.values()), refusal
        assert refusal.rule in ("inplace", "overlap"), refusal
        for array, original in zip(arrays, before, strict=True):
            np.testing.assert_array_equal(array, original)
        return
    for out, result in results.items():
        np.testing.assert_array_equal(result, values[count + out], err_msg=f"node {out}: {nodes[out]}")
    for i, array in enumerate(arrays):
        if all(array is not result for result in results.values()):
            np.testing.assert_array_equal(array, before[i])
