#!/usr/bin/env bash
# Builds, tests and measures on a machine with an NVIDIA GPU, in one go, and writes result files.
#
#   benchmarks/run_gpu.sh [FOLDER]        default: benchmarks/results/<gpu>
#
# Needs: python3 with torch (CUDA), numpy, nanobind, scikit-build-core, cmake, ninja, apache-tvm-ffi, pytest, hypothesis
# (and cupy, jax where their buffers are to be tested), a C++20 compiler, and the CUDA toolkit's NVRTC. Nothing is
# fetched. The package is built into build/gpu and used from there.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
gpu=$(nvidia-smi --query-gpu=name --format=csv,noheader | head -n 1 | tr 'A-Z ' 'a-z-' | sed 's/nvidia-//')
out=${1:-benchmarks/results/$gpu}
mkdir -p "$out" build/gpu

cmake -G Ninja -S . -B build/gpu/cmake -DPython_EXECUTABLE="$(command -v "$python")" -DCMAKE_BUILD_TYPE=Release >build/gpu/configure.log
cmake --build build/gpu/cmake >build/gpu/build.log || { tail -n 50 build/gpu/build.log; exit 1; }
rm -rf build/gpu/package
mkdir -p build/gpu/package
cp -r src/opgraph build/gpu/package/opgraph
cp build/gpu/cmake/_native*.so build/gpu/package/opgraph/
export PYTHONPATH="$PWD/build/gpu/package:$PWD/tests:${PYTHONPATH:-}" OPGRAPH_CACHE="$PWD/build/gpu/kernels"

status=0
"$python" -m pytest tests/gpu -p no:cacheprovider -q 2>&1 | tee "$out/tests.txt" | tail -n 40 || status=$?
"$python" benchmarks/gpu_host.py --json "$out/gpu_host.json" || status=$?
exit "$status"
