"""A small part of the fuzzing, in a process of its own: a byte touched outside a buffer would end this one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

FUZZ = Path(__file__).parent / "fuzz_contract.py"
# Every one of these has to be met, or the draws have drifted and test less than they seem to.
MET = {
    "accepted", "bytes", "layout", "negative_stride", "self_overlap", "dtype", "device", "read_only", "null_address",
    "override_geometry", "overlap", "workspace_missing", "workspace_small", "workspace_strided", "workspace_overlap",
    "subbyte", "overridden",
}  # fmt: skip


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(FUZZ), *arguments], capture_output=True, text=True, timeout=300)


@pytest.mark.slow
@pytest.mark.frameworks
def test_twenty_thousand_buffers() -> None:
    done = run("--buffers", "20000", "--seed", "1")
    assert done.returncode == 0, done.stdout + done.stderr
    counted = {line.split(None, 1)[1] for line in done.stdout.splitlines()}
    assert not MET - counted


def test_a_few_buffers_without_frameworks() -> None:
    done = run("--buffers", "2000", "--seed", "2", "--plain")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "by torch" not in done.stdout and "by jax" not in done.stdout


def test_a_byte_behind_a_buffer_is_noticed() -> None:
    """The guard works, and the parent tells where its child died."""
    done = run("--buffers", "400", "--seed", "3", "--plain", "--trespass")
    assert done.returncode == 1
    assert "signal 11 in graph 0" in done.stderr and "--seed 3 --graph 0" in done.stderr
