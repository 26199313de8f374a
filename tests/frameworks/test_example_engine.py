"""The example engine, installed by pip into a folder of its own and used by a process that finds it there."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.frameworks

HERE = Path(__file__).resolve().parent
EXAMPLE = HERE.parents[1] / "examples" / "engine_tvm_ffi"
CHECKS = re.findall(r"^def (check_\w+)", (HERE / "example_engine_checks.py").read_text(), re.MULTILINE)


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What each check reported: nothing, or a traceback."""
    for package in ("torch", "jax", "tvm_ffi", "ml_dtypes", "setuptools"):
        pytest.importorskip(package)
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    if shutil.which("c++", path=path) is None or shutil.which("ninja", path=path) is None:
        pytest.skip("tvm-ffi compiles the example with c++ and ninja")
    place = tmp_path_factory.mktemp("example")
    source = shutil.copytree(EXAMPLE, place / "source")  # building leaves files beside the sources
    subprocess.run(
        [
            sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps",
            "--no-index", "--no-build-isolation", "--target", str(place / "site"), str(source),
        ],
        check=True,
    )  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", str(HERE / "example_engine_checks.py")],
        env={
            **os.environ,
            "PATH": path,
            "PYTHONPATH": os.pathsep.join([str(place / "site"), str(HERE.parent)]),
            "TVM_FFI_CACHE_DIR": str(place / "cache"),
        },
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return dict(json.loads(line) for line in done.stdout.splitlines() if line.startswith("["))


@pytest.mark.parametrize("check", CHECKS)
def test_example_engine(check: str, reports: dict[str, str]):
    assert reports[check] == "", reports[check]
