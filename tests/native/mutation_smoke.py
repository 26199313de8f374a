"""Do the native tests notice a broken rule? Each mutant changes one line of the layout check and has to be caught.

Works on a copy of the sources; builds `test_layout.cpp` (and `test_threads.cpp` for the records) once for each mutant.
Called by `make mutants`; takes about half a minute.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
SOURCES = {
    "test_layout": ["native/pack/layout.cpp"],
    "test_threads": ["native/pack/layout.cpp", "native/program/program.cpp", "native/cuda/driver.cpp"],
}


class Mutant(NamedTuple):
    """`line` becomes `broken` in `file`, where it stands once; `test` has to fail then."""

    what: str
    line: str
    broken: str
    file: str = "native/pack/layout.cpp"
    test: str = "test_layout"
    flags: tuple[str, ...] = ()


RECORDS = "native/pack/publish.h"
MUTANTS = (
    Mutant("products wrap", "if (a != 0 && b > kMax / a) return kMax;", "if (a == 0) return 0;",
           flags=("-fsanitize=undefined", "-fno-sanitize-recover=all")),
    Mutant("extent-1 axes count", "if (dims[i] != 1) out.axis[out.n++]", "if (dims[i] != -1) out.axis[out.n++]"),
    Mutant("equal strides lose their order", "axes.axis[k - 1].stride < a.stride; k--)",
           "axes.axis[k - 1].stride <= a.stride; k--)"),
    Mutant("any axis may be longer", "!(i == w && have.axis[i].extent > want.axis[i].extent)",
           "!(have.axis[i].extent > want.axis[i].extent)"),
    Mutant("merges across gaps", "    if (fine.axis[i].stride != stride) return -1;",
           "    if (fine.axis[i].stride < stride) return -1;"),
    Mutant("splits that are not filled", "return longer && held > wanted && wanted % inner == 0;",
           "return longer && held > wanted;"),
    Mutant("one dense axis may be strided", "(have.n == 1 && have.axis[0].stride == 1)", "have.n == 1"),
    Mutant("negative strides pass", "if (b.dims[i] > 1 && b.strides[i] < 0) return Rule::negative_stride;", ""),
    Mutant("bytes are not counted", "  if (*bytes < spec.span_bytes) return Rule::bytes;\n  if (same_axes",
           "  if (same_axes"),
    Mutant("outputs may overlap themselves", "    if (axes.axis[i].stride < span) return false;",
           "    if (axes.axis[i].stride < 1) return false;"),
    Mutant("ragged rows of another step", "if (same_storage(row, have, false)) return true;  // one row",
           "if (same_storage(row, have, true)) return true;"),
    Mutant("records shown before they are written", "place.store(kept, std::memory_order_release);",
           "place.store(kept, std::memory_order_relaxed);", RECORDS, "test_threads", ("-fsanitize=thread",)),
    Mutant("records written side by side", "  std::lock_guard<std::mutex> lock(mutex);\n", "  (void)mutex;\n",
           RECORDS, "test_threads", ("-fsanitize=address",)),
    Mutant("a record of another shape", "if (s->rank != b.rank) continue;", "", RECORDS, "test_threads"),
)  # fmt: skip


def include_dir() -> Path:
    """Where the DLPack header is, found without importing (and so loading) its package."""
    spec = importlib.util.find_spec("tvm_ffi")
    if spec is None or spec.origin is None:
        raise SystemExit("apache-tvm-ffi, which carries the DLPack header, is not installed")
    return Path(spec.origin).parent / "include"


def outcome(tree: Path, mutant: Mutant) -> str:
    """Whether the mutant was `caught` or `survived`, or what went wrong with the build."""
    binary = tree / mutant.test
    command = [os.environ.get("CXX", "g++"), "-std=c++20", "-O1", "-g", *mutant.flags]
    command += ["-Inative", "-isystem", str(include_dir())]
    command += [f"tests/native/{mutant.test}.cpp", *SOURCES[mutant.test], "-pthread", "-ldl", "-o", str(binary)]
    built = subprocess.run(command, cwd=tree, capture_output=True, text=True)
    if built.returncode:
        return "does not build: " + built.stderr[:500]
    environment = {**os.environ, "ASAN_OPTIONS": "detect_leaks=1", "TSAN_OPTIONS": "halt_on_error=1"}
    try:
        code = subprocess.run([binary], env=environment, capture_output=True, timeout=120).returncode
    except subprocess.TimeoutExpired:
        return "caught"
    return "caught" if code else "survived"


def main() -> int:
    bad = 0
    with tempfile.TemporaryDirectory() as scratch:
        tree = Path(scratch)
        shutil.copytree(ROOT / "native", tree / "native")
        (tree / "tests").mkdir()
        shutil.copytree(ROOT / "tests" / "native", tree / "tests" / "native")
        for test in SOURCES:
            if (got := outcome(tree, Mutant("none", "", "", test=test))) != "survived":
                print(f"{test} fails on the unchanged sources: {got}")
                return 1
        for mutant in MUTANTS:
            path = tree / mutant.file
            text = path.read_text()
            if text.count(mutant.line) != 1:
                got = f"its line stands {text.count(mutant.line)} times in {mutant.file}: bring the mutant up to date"
            else:
                path.write_text(text.replace(mutant.line, mutant.broken))
                got = outcome(tree, mutant)
                path.write_text(text)
            print(f"{got:9s} {mutant.test}: {mutant.what}", flush=True)
            bad += got != "caught"
    print(f"{len(MUTANTS) - bad} of {len(MUTANTS)} mutants caught")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
