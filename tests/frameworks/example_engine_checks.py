"""Checks of the example engine, for a process in which its package is installed. Prints one JSON line per
check."""

from __future__ import annotations

import json
import sys
import traceback
from typing import Any

import numpy as np
from conformance import run_case
from conformance.cases import CASES

import opgraph
from opgraph import OperandError, _native, cudnnGraphNotSupportedError, data_type

ENGINE = "tvm_ffi_example"
FLOAT = data_type.FLOAT


def declared(**context: Any) -> tuple[Any, Any, Any, Any]:
    """(a * b) + a, with the product on a virtual edge."""
    graph = opgraph.pygraph(io_data_type=FLOAT, **context)
    a, b = graph.tensor([3, 5], name="a"), graph.tensor([3, 5], name="b")
    out = graph.add(graph.mul(a, b), a).set_output(True).set_name("out")
    return graph, a, b, out


def arrays() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal((3, 5)).astype(np.float32) for _ in range(2))
    return a, b, np.full((3, 5), np.nan, np.float32)


def declined(graph: Any, *words: str) -> None:
    try:
        graph.build(engine=ENGINE, device="cpu")
    except cudnnGraphNotSupportedError as refusal:
        missing = [word for word in (ENGINE, *words) if word not in str(refusal)]
        assert not missing, f"{missing} not in {str(refusal)!r}"
    else:
        raise AssertionError("not declined")


def refused(call: Any, *words: str) -> None:
    try:
        call()
    except OperandError as refusal:
        missing = [word for word in words if word not in str(refusal)]
        assert not missing, f"{missing} not in {str(refusal)!r}"
    else:
        raise AssertionError("not refused")


def check_explain_lists_it() -> None:
    graph, *_ = declared()
    text = graph.explain(device="cpu")
    assert f"{ENGINE}: proposes {ENGINE}" in text, text
    graph.build(device="cpu")
    assert graph.selected_engine.name == "cpu", "the example ranks behind the library's own engine"
    assert ENGINE in [plan.engine for plan in graph.plans]
    named, *_ = declared()
    named.build(engine=ENGINE, device="cpu")
    assert named.selected_engine.name == ENGINE and named.selected_engine.engine_id == 28000


def check_the_conformance_cases_it_serves() -> None:
    ran, left_out = 0, 0
    for case in CASES:
        if case.op not in ("add", "mul", "scale", "identity"):
            continue
        for dtype in case.data_types:
            for problem in case.problems(dtype, np.random.default_rng(1)):
                try:
                    run_case(problem, ENGINE)
                    ran += 1
                except cudnnGraphNotSupportedError:
                    left_out += 1
    assert ran >= 30 and left_out >= 30, (ran, left_out)


def check_other_graphs_are_declined_with_reasons() -> None:
    graph, a, b, _ = declared()
    graph.sub(a, b).set_output(True)
    declined(graph, "operator", "sub ('sub.0')")
    graph = opgraph.pygraph(io_data_type=data_type.HALF, compute_data_type=FLOAT)
    x = graph.tensor([4], name="x")
    graph.add(x, x).set_output(True)
    declined(graph, "data type", "'x' is HALF")
    graph = opgraph.pygraph(io_data_type=FLOAT)
    x = graph.tensor([4, 3], (1, 4), name="x")
    graph.add(x, x).set_output(True)
    declined(graph, "layout", "(1, 4)")
    graph = opgraph.pygraph(io_data_type=FLOAT)
    x, row = graph.tensor([4, 3], name="x"), graph.tensor([1, 3], name="row")
    graph.scale(x, row).set_output(True)
    declined(graph, "shape", "'row' is (1, 3)")
    graph, *_ = declared(is_override_shape_enabled=True)
    declined(graph, "overrides")
    graph, *_ = declared()
    try:
        graph.build(engine=ENGINE, device="cpu", knobs={"speed": 1})
    except ValueError as error:
        assert "speed" in str(error)
    else:
        raise AssertionError("an unknown knob passed")


def check_workspace_is_asked_for_used_and_checked() -> None:
    graph, a, b, out = declared()
    graph.build(engine=ENGINE, device="cpu")
    size = graph.get_workspace_size()
    assert size >= 3 * 5 * 4
    x, y, result = arrays()
    pack = {a: x, b: y, out: result}
    refused(lambda: graph.execute(pack), str(size))
    refused(lambda: graph.execute(pack, np.zeros(size - 1, np.uint8)), str(size), str(size - 1))
    refused(lambda: graph.execute(pack, np.zeros(2 * size, np.uint8)[::2]))
    assert np.isnan(result).all(), "a refused call writes nothing"
    workspace = np.zeros(size, np.uint8)
    graph.execute(pack, workspace)
    np.testing.assert_allclose(result, x * y + x, rtol=1e-6)
    np.testing.assert_array_equal(workspace[: 3 * 5 * 4].view(np.float32).reshape(3, 5), x * y)
    result.fill(np.nan)
    graph.execute(pack, workspace.ctypes.data)  # a bare address: its size is the caller's word
    np.testing.assert_allclose(result, x * y + x, rtol=1e-6)
    two = opgraph.pygraph(io_data_type=FLOAT)
    p = two.tensor([4], name="p")
    two.add(p, p).set_output(True)
    two.build(engine=ENGINE, device="cpu")
    assert two.get_workspace_size() == 0


def check_tvm_ffi_receives_the_callers_memory() -> None:
    from opgraph_tvm_ffi_example import FUNCTIONS, functions

    module = functions()
    seen: list[list[int]] = []

    def spy(name: str) -> Any:
        function = getattr(module, name)

        def call(*slots: Any) -> None:
            assert all(type(slot) is _native.Slot for slot in slots), [type(slot) for slot in slots]
            seen.append([module.address(slot) for slot in slots])
            function(*slots)

        return call

    import opgraph_tvm_ffi_example as example

    spied = type("Spied", (), {name: staticmethod(spy(name)) for name in FUNCTIONS.values()})
    example.functions, original = lambda: spied, example.functions
    try:
        graph, a, b, out = declared()
        graph.build(engine=ENGINE, device="cpu")
    finally:
        example.functions = original
    x, y, result = arrays()
    workspace = np.zeros(graph.get_workspace_size(), np.uint8)
    graph.execute({a: x, b: y, out: result}, workspace)
    at_x, at_y, at_result, scratch = (array.ctypes.data for array in (x, y, result, workspace))
    assert seen == [[at_x, at_y, scratch], [scratch, at_x, at_result]], (seen, at_x, at_y, at_result, scratch)


def check_torch_and_jax_buffers_work_alike() -> None:
    import jax.numpy as jnp
    import torch

    graph, a, b, out = declared()
    graph.build(engine=ENGINE, device="cpu")
    workspace = torch.zeros(graph.get_workspace_size(), dtype=torch.uint8)
    x, y, expected = arrays()
    graph.execute({a: x, b: y, out: expected}, workspace)
    for result in (torch.full((3, 5), float("nan")), np.full((3, 5), np.nan, np.float32)):
        graph.execute({a: torch.from_numpy(x), b: jnp.asarray(y), out: result}, workspace)
        assert np.asarray(result).tobytes() == expected.tobytes()


def main() -> None:
    for name, check in list(globals().items()):
        if name.startswith("check_"):
            try:
                check()
                report = ""
            except Exception:
                report = traceback.format_exc()
            print(json.dumps([name, report]))
            sys.stdout.flush()


if __name__ == "__main__":
    main()
