"""The native program without a GPU: steps, patches, grids, memsets, contexts and errors, seen by a recording driver."""

from __future__ import annotations

import itertools
import subprocess
import sys

import fake_driver
import numpy as np
import pytest

from opgraph import _native

FUNCTION = 0x3000 + len("kernel")  # what the fake makes of a kernel's name


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    return fake_driver.build(tmp_path_factory.mktemp("driver"))


@pytest.fixture
def driver(library):
    fake = fake_driver.install(library)
    yield fake
    fake_driver.remove()


class Hooks:
    def fail(self, rule, operand, other, facts):
        raise ValueError(rule, operand, facts)

    def key(self, key):
        raise KeyError(key)

    def read(self, obj, device_type, stream):
        raise TypeError(type(obj).__name__)

    def geometry(self, overrides):
        return overrides

    def overlaps(self, a, b):
        return True

    def scalar(self, value, operand):
        return np.float32(value).tobytes()


def operand(uid, dims=(8,), *, output=False, by_value=False):
    strides = tuple(int(np.prod(dims[i + 1 :], dtype=np.int64)) for i in range(len(dims)))
    return dict(
        uid=uid, name=f"t{uid}", dtype=(2, 32, 1), dims=dims, strides=strides, output=output, by_value=by_value,
        optional=False, reorder=False, ragged=-1, ragged_multiplier=1, ragged_rows=-1, pack=1,
    )  # fmt: skip


def executable(program, operands, *, workspace=0, stream=0, device=(2, 0), overrides=True):
    return _native.Executable(
        operands=tuple(operands), keys={o["uid"]: i for i, o in enumerate(operands)}, tensor_type=Hooks,
        defaults=(None,) * len(operands), device=device, workspace_bytes=workspace, carves=(), inplace=(), run=program,
        hooks=Hooks(), overrides=overrides, dynamic=False, stream=stream,
    )  # fmt: skip


def kernel(function, parameters, *, grid=(1, 1, 1), block=(32, 1, 1), shared=0, attributes=()):
    return dict(
        kind="kernel", function=function, grid=grid, block=block, shared=shared, attributes=list(attributes),
        parameters=list(parameters),
    )  # fmt: skip


@pytest.fixture
def function(driver):
    function = _native.get_function(_native.load_module(b"IMAGE", 0), "kernel")
    driver.reset()
    return function


def launch_line(driver):
    (line,) = driver.calls("launch")
    return line


def test_addresses_are_patched_per_call(driver, function):
    steps = [kernel(function, [("address", 1, 0), ("address", 0, 16)])]
    ex = executable(_native.make_program(0, steps, [1, 1]), [operand(1), operand(2, output=True)])
    driver.reset(2)
    ex.execute({1: 0x1000, 2: 0x2000})
    ex.execute({1: 0x5000, 2: 0x6000})
    first, second = driver.calls("launch")
    assert first.endswith("p0=2000 p1=1010") and second.endswith("p0=6000 p1=5010")


def test_extent_dependent_integers_and_grids_follow_overrides(driver, function):
    rows, columns = ("dim", 0, 0), ("dim", 0, 1)
    steps = [
        kernel(
            function,
            [("int64", rows), ("int64", ("stride", 0, 0)), ("int64", ("add", ("mul", rows, 10), ("min", columns, 2)))],
            grid=(("ceil_div", columns, 4), rows, ("max", 1, ("sub", rows, 100))),
        )
    ]
    ex = executable(_native.make_program(0, steps, [2]), [operand(1, (6, 9))])
    driver.reset(3)
    ex.execute({1: 0x1000})
    ex.execute({1: 0x1000}, override_uids=[1], override_shapes=[[2, 5]], override_strides=[[5, 1]])
    declared, live = driver.calls("launch")
    assert "grid 3,6,1" in declared and declared.endswith("p0=6 p1=9 p2=3e")
    assert "grid 2,2,1" in live and live.endswith("p0=2 p1=5 p2=16")


def test_by_value_operands_and_constants_become_arguments(driver, function):
    steps = [kernel(function, [("bytes", (77).to_bytes(8, "little"), 8), ("scalar", 0, 4), ("bytes", b"\0" * 8, 8)])]
    ex = executable(_native.make_program(0, steps, [1, 1]), [operand(1, (1,), by_value=True), operand(2)])
    driver.reset(2)
    ex.execute({1: 1.0, 2: 0x2000})
    words = launch_line(driver).split()
    assert words[-2] == "p0=4d" and words[-1].endswith("3f800000")


def test_launch_attributes_shared_memory_and_stream(driver):
    function = _native.get_function(_native.load_module(b"IMAGE", 0), "kernel", 100_000)
    assert driver.calls("attribute") == [f"attribute {FUNCTION:#x} 8=100000"]
    cluster = (4, (2, 1, 1))
    steps = [kernel(function, [("address", 0, 0)], grid=(4, 1, 1), shared=100_000, attributes=[cluster])]
    ex = executable(_native.make_program(0, steps, [1]), [operand(1)], stream=0x99)
    driver.reset(1)
    ex.execute({1: 0x1000})
    ex.execute({1: 0x1000}, handle=_native.Handle(2, 0, 0x1234))
    graph, handle = driver.calls("launch")
    assert "block 32,1,1 shared 100000 stream 0x99 attr 4=2,1,1" in graph
    assert "stream 0x1234" in handle


def test_an_empty_operand_launches_nothing(driver, function):
    steps = [kernel(function, [("address", 0, 0)], grid=(("dim", 0, 0), 1, 1))]
    ex = executable(_native.make_program(0, steps, [1]), [operand(1, (0,))])
    driver.reset()
    ex.execute({1: 0})
    assert driver.calls("launch") == []


def test_lower_alignment_runs_the_other_program(driver, function):
    low = _native.make_program(0, [kernel(function, [("address", 0, 0)], grid=(9, 1, 1))], [1])
    high = _native.make_program(0, [kernel(function, [("address", 0, 0)])], [1], needs=[(0, 16)], otherwise=low)
    ex = executable(high, [operand(1)])
    driver.reset(1)
    for address in (0x1000, 0x1004, 0x1010):
        ex.execute({1: address})
    assert ["grid 9" in line for line in driver.calls("launch")] == [False, True, False]
    with pytest.raises(ValueError, match="another for the rest"):
        _native.make_program(0, [], [1], needs=[(0, 16)])


def test_the_context_of_the_device_is_made_current_and_restored(driver, function):
    program = _native.make_program(1, [kernel(function, [("address", 0, 0)])], [1])
    ex = executable(program, [operand(1)], device=(2, 1))
    driver.current = 0x7777
    driver.reset(1)
    ex.execute({1: 0x1000})
    assert driver.calls("context", "launch")[0] == "context 0x1001"
    assert driver.current == 0x7777
    driver.current = 0x1001
    driver.reset(1)
    ex.execute({1: 0x1000})
    assert driver.calls("context") == []  # already current: no call made


def test_bound_calls_run_programs_and_update(driver, function):
    program = _native.make_program(0, [kernel(function, [("address", 0, 0), ("address", 1, 0)])], [1, 1])
    call = executable(program, [operand(1), operand(2, output=True)]).bind({1: 0x1000, 2: 0x2000})
    driver.reset(2)
    call()
    call()
    assert [line.split()[-2:] for line in driver.calls("launch")] == [["p0=1000", "p1=2000"]] * 2


def test_workspace_addresses(driver, function):
    program = _native.make_program(0, [kernel(function, [("address", -1, 256)])], [1])
    ex = executable(program, [operand(1)], workspace=512)
    driver.reset(1)
    ex.execute({1: 0x1000}, workspace=0x80000)
    assert launch_line(driver).endswith("p0=80100")
    with pytest.raises(ValueError, match="workspace_missing"):
        ex.execute({1: 0x1000})


@pytest.mark.parametrize("symbol, result, text", [
    ("cuLaunchKernelEx", 2, r"cuLaunchKernelEx: CUDA_ERROR_OUT_OF_MEMORY \(out of memory\); free device.*step 0"),
    ("cuLaunchKernelEx", 700, "CUDA_ERROR_ILLEGAL_ADDRESS.*restart"),
    ("cuCtxSetCurrent", 999, "cuCtxSetCurrent: CUDA_ERROR_UNKNOWN"),
])  # fmt: skip
def test_driver_errors_name_call_explanation_and_advice(driver, function, symbol, result, text):
    ex = executable(_native.make_program(0, [kernel(function, [("address", 0, 0)])], [1]), [operand(1)])
    driver.fail(symbol, result)
    with pytest.raises(RuntimeError, match=text):
        ex.execute({1: 0x1000})
    ex.execute({1: 0x1000})  # the plan stays usable


def test_a_failing_load_is_explained(driver):
    driver.fail("cuModuleLoadDataEx", 2)
    with pytest.raises(RuntimeError, match="cuModuleLoadDataEx: CUDA_ERROR_OUT_OF_MEMORY"):
        _native.load_module(b"IMAGE", 0)
    driver.fail("cuModuleGetFunction", 400)
    with pytest.raises(RuntimeError, match="CUDA_ERROR_INVALID_HANDLE"):
        _native.get_function(_native.load_module(b"IMAGE", 0), "kernel")


def test_modules_are_unloaded_with_their_last_user(driver, function):
    program = _native.make_program(0, [kernel(function, [("address", 0, 0)])], [1])
    del function
    driver.reset()
    assert driver.calls("unload") == []
    del program


@pytest.mark.parametrize("steps, text", [
    ([dict(kind="what")], "no step of kind 'what'"),
    ([dict(kind="memset", target=5, dims=(4,), strides=(1,), element=4, pattern=0, most=8)], "names no operand"),
    ([dict(kind="memset", target=0, dims=(4,), strides=(0,), element=4, pattern=0, most=8)], "write an element twice"),
    ([dict(kind="memset", target=0, dims=(4,), strides=(2,), element=8, pattern=1, most=8)], "unequal halves"),
    (
        [dict(kind="memset", target=0, dims=(2, 9, 9, 9), strides=(9**6, 9**4, 200, 3), element=1, pattern=0, most=8)],
        "needs 162 memsets",
    ),
])  # fmt: skip
def test_malformed_steps_are_refused_when_built(driver, steps, text):
    with pytest.raises(ValueError, match=text):
        _native.make_program(0, steps, [1])


@pytest.mark.parametrize("expression, text", [
    (("dim", 0, 3), "axis that does not exist"),
    (("dim", 7, 0), "axis that does not exist"),
    (("power", 1, 2), "no operation 'power'"),
])  # fmt: skip
def test_malformed_expressions_are_refused_when_built(driver, function, expression, text):
    with pytest.raises(ValueError, match=text):
        _native.make_program(0, [kernel(function, [("int64", expression)])], [1])


def memset_bytes(lines, size):
    """Applies recorded memsets to `size` bytes from address 0x1000; counts how often each byte was set."""
    counts = np.zeros(size, np.int64)
    for line in lines:
        words = line.split()
        bits = int(words[0].removeprefix("memset2d").removeprefix("memset"))
        item, base = bits // 8, int(words[1], 16) - 0x1000
        if words[0].startswith("memset2d"):
            width, height = map(int, words[6].split("x"))
            pitch = int(words[3])
        else:
            width, height, pitch = int(words[5]), 1, 0
        for row in range(height):
            counts[base + row * pitch : base + row * pitch + width * item] += 1
    return counts


LAYOUTS = [
    ((8,), (1,), 1),
    ((4, 6), (6, 1), 1),
    ((4, 6), (1, 4), 1),
    ((4, 6), (8, 1), 1),
    ((2, 3, 5), (15, 5, 1), 1),
    ((2, 3, 5), (20, 5, 1), 1),
    ((3, 2, 5), (24, 10, 1), 2),
    ((2, 7, 5), (100, 10, 1), 2),
    ((4,), (3,), 1),
    ((2, 4), (30, 3), 2),
    ((1, 4, 1), (99, 1, 7), 1),
    ((0, 4), (4, 1), 0),
]


@pytest.mark.parametrize("element", [1, 2, 4])
@pytest.mark.parametrize("dims, strides, calls", LAYOUTS)
def test_memsets_cover_every_element_once_with_the_fewest_calls(driver, dims, strides, calls, element):
    step = dict(kind="memset", target=0, dims=dims, strides=strides, element=element, pattern=0x7F, most=8)
    program = _native.make_program(0, [step], [1])
    ex = executable(program, [operand(1)])
    driver.reset()
    ex.execute({1: 0x1000})
    lines = driver.calls("memset")
    assert len(lines) == program.step_count == calls
    want = np.zeros(4096, np.int64)
    for index in itertools.product(*(range(d) for d in dims)):
        at = sum(i * s for i, s in zip(index, strides, strict=True)) * element
        want[at : at + element] += 1
    np.testing.assert_array_equal(memset_bytes(lines, 4096), want)


@pytest.mark.parametrize("missing, text", [("cuLaunchKernelEx", "lacks cuLaunchKernelEx"), ("cuInit", "lacks cuInit")])
def test_a_driver_that_lacks_an_entry_point_says_so(library, missing, text):
    code = f"from opgraph import _native; print(_native.use_driver({str(library)!r}), _native.device_count())"
    done = subprocess.run(
        [sys.executable, "-c", code], env={"FAKE_DRIVER_WITHOUT": missing, "PATH": ""}, capture_output=True, text=True
    )
    assert text in done.stdout and done.stdout.strip().endswith("0")


def test_without_a_driver_the_reason_is_told():
    code = "from opgraph import _native; print(_native.use_driver('/nowhere/libcuda.so.1'))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "no CUDA driver" in done.stdout and "/nowhere/libcuda.so.1" in done.stdout
