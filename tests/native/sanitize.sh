#!/usr/bin/env bash
# Sanitizers over the native core: first its own C++ tests (address and undefined behaviour; threads under the thread
# sanitizer, and for leaks), then the Python tests that drive it with hostile buffers, on a sanitized build of the
# extension. Called by `make sanitize`; needs VENV.
set -euo pipefail
cd "$(dirname "$0")/../.."
py="$VENV/bin/python"
out=build/sanitize
mkdir -p "$out/package"

dlpack=$("$py" -c "import importlib.util, pathlib; print(pathlib.Path(importlib.util.find_spec('tvm_ffi').origin).parent / 'include')")
flags="-std=c++20 -O1 -g -fno-sanitize-recover=all -Wall -Wextra -Wno-missing-field-initializers -Werror"
native_test() { # sanitizers, name, sources: builds and runs a test without Python
  local name=$2-${1//,/-}
  # shellcheck disable=SC2086
  ${CXX:-g++} $flags -fsanitize="$1" -Inative -isystem "$dlpack" "tests/native/$2.cpp" "${@:3}" -pthread -ldl -o "$out/$name"
  ASAN_OPTIONS=detect_leaks=1 TSAN_OPTIONS=halt_on_error=1 "$out/$name"
}
threads=(native/pack/layout.cpp native/program/program.cpp native/cuda/driver.cpp)
native_test address,undefined test_layout native/pack/layout.cpp
native_test thread test_threads "${threads[@]}"
native_test address,undefined test_threads "${threads[@]}"

export PATH="$VENV/bin:$PATH"
cmake -G Ninja -S . -B "$out/build" -DPython_EXECUTABLE="$py" -DCMAKE_BUILD_TYPE=RelWithDebInfo \
  -DCMAKE_CXX_FLAGS_RELWITHDEBINFO="-O1 -g" -DOPGRAPH_SANITIZE=address,undefined -DOPGRAPH_WERROR=ON >"$out/configure.log"
cmake --build "$out/build" -j2 >"$out/build.log" || { tail -50 "$out/build.log"; exit 1; }

# The package's sources beside the sanitized module; -S keeps the editable install's finder away.
rm -rf "$out/package/opgraph"
cp -r src/opgraph "$out/package/opgraph"
cp "$out"/build/_native*.so "$out/package/opgraph/"
site=$("$py" -c "import sysconfig; print(sysconfig.get_paths()['purelib'])")
asan=$(${CXX:-g++} -print-file-name=libasan.so)
ubsan=$(${CXX:-g++} -print-file-name=libubsan.so)
# Leaks are looked for in the native tests: the interpreter keeps memory at exit on purpose.
LD_PRELOAD="$asan $ubsan" ASAN_OPTIONS=detect_leaks=0:halt_on_error=1 UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 \
  PYTHONPATH="$out/package:$site" PYTHONMALLOC=malloc "$py" -S -m pytest -p no:cacheprovider tests/null tests/cpu/test_fields*.py \
  tests/cpu/test_hostile_buffers.py tests/cpu/test_graph.py tests/cpu/test_engine.py tests/cpu/test_wrapper.py \
  -m "not slow and not frameworks and not timing"
