"""A call allocates nothing and keeps nothing: counted by a malloc hook, over 100,000 calls of every form."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.timing

HERE = Path(__file__).parent
SOURCE = HERE.parent / "native" / "malloc_count.c"
CALLS = 100_000
FORMS = ("mapping_form", "mapping_by_name", "ordered_form", "overrides", "bound")


@pytest.fixture(scope="module")
def hook(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The malloc hook, built here."""
    if platform.libc_ver()[0] != "glibc":
        pytest.skip("the malloc hook is written for glibc")
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if not compiler:
        pytest.skip("no C compiler")
    library = tmp_path_factory.mktemp("malloc") / "malloc_count.so"
    subprocess.run([compiler, "-O2", "-shared", "-fPIC", "-o", str(library), str(SOURCE)], check=True)
    return library


def probe(hook: Path, kind: str) -> dict[str, Any]:
    # Python's own allocator takes from malloc in blocks: switched off, so that every object counts.
    environment = {**os.environ, "LD_PRELOAD": str(hook), "PYTHONMALLOC": "malloc"}
    command = [sys.executable, str(HERE / "allocation_probe.py"), str(hook), kind]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)


def check(result: dict[str, Any]) -> None:
    made, none, _ = result["allocating"]
    assert made >= none + CALLS, "the hook does not count"
    for form in FORMS:
        made, none, changes = result[form]
        assert made <= none, f"{form}: {made - none} allocations in {CALLS} calls"
        assert not any(changes), f"{form}: reference counts changed by {changes}"


@pytest.mark.skipif("LD_PRELOAD" in os.environ, reason="another library is preloaded")
class TestACallAllocatesNothing:
    def test_on_numpy_buffers(self, hook):
        check(probe(hook, "numpy"))

    @pytest.mark.frameworks
    @pytest.mark.usefixtures("torch")
    def test_on_torch_buffers(self, hook):
        check(probe(hook, "torch"))
