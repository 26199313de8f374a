"""Shared test set-up: the --without option, markers, and the engines and precisions that conformance runs on."""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys

import pytest


class Blocker(importlib.abc.MetaPathFinder):
    """Makes packages unimportable, as on a machine that does not have them."""

    def __init__(self, names: set[str]) -> None:
        self.names = names

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> None:
        if fullname.partition(".")[0] in self.names:
            raise ModuleNotFoundError(f"No module named {fullname!r} (blocked by --without)", name=fullname)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--without", default="", help="comma-separated packages to make unimportable")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "frameworks: needs torch, JAX or tvm-ffi")
    config.addinivalue_line("markers", "slow: takes more than about ten seconds")
    config.addinivalue_line("markers", "timing: measures time or allocations, which means nothing under a sanitizer")
    names = {name for name in config.getoption("--without").split(",") if name}
    if names:
        loaded = names & set(sys.modules)
        if loaded:
            raise pytest.UsageError(f"--without {loaded}: already imported")
        sys.meta_path.insert(0, Blocker(names))


def has(package: str) -> bool:
    """Whether `package` can be imported here, without importing it."""
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:
        return False


@pytest.fixture
def torch():
    """The torch module; the test is skipped where torch is not installed."""
    module = pytest.importorskip("torch")
    module.set_num_threads(1)  # for tensors as small as a test's, threads cost more than they give
    return module


@pytest.fixture
def jax():
    return pytest.importorskip("jax")


@pytest.fixture
def tvm_ffi():
    return pytest.importorskip("tvm_ffi")


@pytest.fixture
def ml_dtypes():
    return pytest.importorskip("ml_dtypes")


@pytest.fixture(params=["native", "float64"])
def precision(request: pytest.FixtureRequest) -> str:
    """Both precisions of the CPU engine."""
    return request.param
