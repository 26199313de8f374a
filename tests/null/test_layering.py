"""The structure that docs/design/plans.md promises: imports go one way, and importing the package stays light."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import opgraph

ROOT = Path(opgraph.__file__).parent
# A package may import what stands before it, never after.
LAYERS = ["ir", "ops", "engines", "planning", "graph"]
# Files of the top folder and the layer they belong to.
TOP = {"datatypes": "ir", "_version": "ir"}


def layer(module: str) -> str | None:
    """The layer of a dotted module of this package; None for the native module."""
    parts = module.split(".")
    if len(parts) < 2 or parts[1] in ("_native", ""):
        return None
    return parts[1] if parts[1] in LAYERS else TOP.get(parts[1], "graph")


def imports(path: Path) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            found += [
                f"{node.module}.{alias.name}" if node.module == "opgraph" else node.module for alias in node.names
            ]
    return found


SOURCES = sorted(p for p in ROOT.rglob("*.py") if "interop" not in p.parts)


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_imports_go_one_way(path: Path) -> None:
    own = layer(".".join(("opgraph", *path.relative_to(ROOT).with_suffix("").parts)))
    for module in imports(path):
        if not module.startswith("opgraph"):
            continue
        target = layer(module)
        if own is None or target is None:
            continue
        assert LAYERS.index(target) <= LAYERS.index(own), f"{path.name} ({own}) imports {module} ({target})"


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_no_framework_is_imported_by_the_library(path: Path) -> None:
    for module in imports(path):
        assert module.partition(".")[0] not in {"torch", "jax", "cupy", "tvm_ffi", "triton", "numba"}, module


def test_importing_loads_numpy_and_this_package_only() -> None:
    code = (
        "import sys, numpy; before = set(sys.modules); import opgraph; new = set(sys.modules) - before;"
        "print(sorted(m for m in new if m.partition('.')[0] != 'opgraph'))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    # atexit: the binding library's; importlib.*: the finder of an editable install.
    allowed = {"__future__", "_thread", "atexit"}
    extra = {m for m in ast.literal_eval(out) if m not in allowed and not m.startswith("importlib")}
    assert not extra, f"import opgraph also loads {sorted(extra)}"


def test_every_module_says_what_it_exports() -> None:
    for path in SOURCES:
        if path.name in ("__main__.py", "_version.py"):
            continue
        names = {
            target.id
            for node in ast.parse(path.read_text(encoding="utf-8")).body
            if isinstance(node, ast.Assign)
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        assert "__all__" in names, f"{path.relative_to(ROOT)} has no __all__"
