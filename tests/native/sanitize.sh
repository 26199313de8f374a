#!/usr/bin/env bash
# Address and undefined-behaviour sanitizers over the native core: first its own C++ tests, then the Python tests that
# drive it with hostile buffers, on a sanitized build of the extension. Called by `make sanitize`; needs VENV.
set -euo pipefail
cd "$(dirname "$0")/../.."
py="$VENV/bin/python"
out=build/sanitize
mkdir -p "$out/package"

dlpack=$("$py" -c "import importlib.util, pathlib; print(pathlib.Path(importlib.util.find_spec('tvm_ffi').origin).parent / 'include')")
flags="-std=c++20 -O1 -g -fsanitize=address,undefined -fno-sanitize-recover=all -Wall -Wextra -Werror"
# shellcheck disable=SC2086
${CXX:-g++} $flags -Inative -isystem "$dlpack" tests/native/test_layout.cpp native/pack/layout.cpp -o "$out/test_layout"
"$out/test_layout"

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
# Leaks are looked for elsewhere: the interpreter keeps memory at exit on purpose.
LD_PRELOAD="$asan $ubsan" ASAN_OPTIONS=detect_leaks=0:halt_on_error=1 UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 \
  PYTHONPATH="$out/package:$site" PYTHONMALLOC=malloc "$py" -S -m pytest -p no:cacheprovider tests/null tests/cpu -m "not slow and not frameworks"
