# Everything from nothing: each target makes the environment that it needs in $(VENV).

VENV ?= .venv
# torch as pip names it; `make test TORCH=torch==2.10.0` tries another.
TORCH ?= torch==2.13.0
# One that can make environments; Debian's own cannot without the package python3-venv.
PYTHON ?= $(shell for python in python3.11 python3.12 python3.13 python3.10 python3 "$$HOME"/.pyenv/versions/3.*/bin/python; do \
	"$$python" -c 'import ensurepip, sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null && echo "$$python" && break; done)

# Python compiles what is imported, once, where this is empty: pip would compile all of torch, which takes longer.
export PYTHONDONTWRITEBYTECODE :=
PIP_INSTALL := -m pip install --quiet --no-compile

# For installations in $(VENV): one architecture and its PTX, which every later card can run. The wheel has them all.
CUDA_ARCHS ?= 75

# Bagua has an environment of its own: its wheel is for one Python, with the CUDA build of torch, some 5 GB on disk.
BAGUA_VENV ?= .venv-bagua
BAGUA_PYTHON ?= $(shell for python in python3.10 "$$HOME"/.pyenv/versions/3.10.*/bin/python; do \
	"$$python" -c 'import ensurepip, sys; sys.exit(sys.version_info[:2] != (3, 10))' 2>/dev/null && echo "$$python" && break; done)
BAGUA_RANKS ?= 2
# Bagua's library is linked against that of NCCL, which it finds by itself only where torch was imported before.
BAGUA_RUN = LD_LIBRARY_PATH="$(abspath $(BAGUA_VENV))/lib/python3.10/site-packages/nvidia/nccl/lib$${LD_LIBRARY_PATH:+:$$LD_LIBRARY_PATH}" \
	$(BAGUA_VENV)/bin/python

BIN := $(VENV)/bin
NATIVE := $(shell find csrc -type f)
EMULATOR := $(shell find tests/exchange tests/ops/emulator benchmarks/gpu -name "*.h" -o -name "*.cpp")
SOURCES := pyproject.toml setup.py $(NATIVE)

# For `make gpu`: one that has a CUDA build of torch; nothing is installed.
GPU_PYTHON ?= python3

.PHONY: help demo test test-slow test-faults bench bench-quick bench-results bench-docs gpu sanitize wheel test-wheel \
	test-installs bagua-env bagua-packages demo-bagua test-bagua lint format docs clean

help:
	@echo 'make demo    train on real data: one process, four synchronized ranks, four unsynchronized; build/demo/'
	@echo 'make test    all tests that run without a GPU'
	@echo 'make test-slow   those that take minutes or much memory'
	@echo 'make test-faults     ranks that diverge or die, also with 3 and 4 ranks'
	@echo 'make bench   what synchronization costs here, and what others would: tables and results.json; build/bench/'
	@echo 'make bench-quick     the same as a first impression, in two minutes'
	@echo 'make bench-results   measures what docs/benchmarks.md shows, on a quiet machine; make bench-docs only writes it'
	@echo 'make gpu     on a machine with an NVIDIA GPU: build, test, check and measure the CUDA kernels: build/gpu/'
	@echo 'make sanitize    the native kernels under AddressSanitizer and UndefinedBehaviorSanitizer, and the emulated ones'
	@echo 'make wheel   the wheel for manylinux and the sdist, checked: dist/'
	@echo 'make test-wheel  tests the wheel beside several versions of Python and torch, and all ways of installing'
	@echo 'make test-installs   all ways of installing: imports and trains after each, in some five minutes'
	@echo 'make demo-bagua  the same training script under the launcher of Bagua; make test-bagua tests on Bagua without a GPU'
	@echo 'make bagua-env   the environment of both: Python 3.10, Bagua and this wheel; downloads some gigabytes'
	@echo 'make lint    formatting, lint and types'
	@echo 'make docs    the documentation as HTML: docs/_build/html/index.html'
	@echo 'make format  apply the formatting'
	@echo 'make clean   remove what the other targets made'

demo: $(VENV)/installed-demo
	$(BIN)/python examples/demo.py

# All of it on the native kernels, and what is marked reference_too once more on the reference ops: in these folders,
# because to collect all tests costs ten seconds.
REFERENCE_TOO := tests/contract tests/layer tests/ops
# Three files at a time, since those with ranks often wait. Threads that wait for work leave the cores to others.
TEST_JOBS ?= 3
PYTEST := OMP_WAIT_POLICY=passive $(BIN)/python -m pytest -n $(TEST_JOBS) --dist loadfile
test: $(VENV)/installed-test
	$(PYTEST) -m 'not gpu and not slow' $(ARGS)
	BAGUA_SYNCBN_KERNELS=reference $(PYTEST) -q -m 'reference_too and not gpu and not slow' $(ARGS) $(REFERENCE_TOO)

# What is left out above: many ranks, the real launcher, the machine code for all cards, tensors of 2^31 values and tens
# of gigabytes.
test-slow: $(VENV)/installed-test
	$(BIN)/python -m pytest -m 'slow and not gpu' $(ARGS)

# The kernels under AddressSanitizer and UndefinedBehaviorSanitizer, with each instruction set of this machine, and those
# for CUDA in the emulator. What is left out takes a third as long again to compile; the first sees a null pointer and
# what is beyond an object too. Memory that nobody has written to is NaN.
SANITIZE := -g1 -Og -fsanitize=address,undefined -fno-sanitize=null,object-size,pointer-overflow,vptr \
	-fno-sanitize-recover=undefined -fno-omit-frame-pointer
SANITIZED = LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libstdc++.so)" \
	ASAN_OPTIONS=detect_leaks=0:detect_stack_use_after_return=0:malloc_fill_byte=255:max_malloc_fill_size=2147483647 \
	PYTHONPATH=build/sanitize/lib OMP_WAIT_POLICY=passive $(BIN)/pytest -q -s -p no:cacheprovider -m 'not slow'
sanitize: $(VENV)/installed-test
	BAGUA_SYNCBN_BUILD=cpu BAGUA_SYNCBN_CXXFLAGS='$(SANITIZE)' $(BIN)/python setup.py -q \
		build --build-lib build/sanitize/lib
	$(MAKE) --no-print-directory -j 3 sanitize-emulated sanitize-avx512 sanitize-avx2 sanitize-baseline

# Each case in one dtype; of those with activations, which take longest, half.
sanitize-emulated:
	$(SANITIZED) tests/ops/test_cuda.py tests/ops/test_values.py tests/ops/test_words.py \
		-k 'test_cuda or (emulated and (float32 or (bfloat16 and not activations)))'

sanitize-%:
	BAGUA_SYNCBN_CPU_CAPABILITY=$* $(SANITIZED) tests/ops/test_native.py tests/ops/test_values.py tests/ops/test_words.py \
		-k 'not emulated and not aten and not instruction_set and not temporaries and not trains_on'

# Ranks that diverge or die: all that is in docs/reliability.md, also with 3 and 4 ranks.
test-faults: $(VENV)/installed-test
	$(BIN)/python -m pytest $(ARGS) tests/faults

bench: $(VENV)/installed-bench
	$(BIN)/python -m benchmarks $(ARGS)

bench-quick: $(VENV)/installed-bench
	$(BIN)/python -m benchmarks --quick $(ARGS)

RESULTS := benchmarks/results
bench-results: $(VENV)/installed-bench
	$(BIN)/python -m benchmarks --sections ops local --output $(RESULTS)/cpu.json
	$(BIN)/python -m benchmarks --sections local --default-malloc --output $(RESULTS)/cpu-default-malloc.json
	$(BIN)/python -m benchmarks --sections stored --output $(RESULTS)/stored.json
	$(BIN)/python -m benchmarks --sections anew --output $(RESULTS)/anew.json
	$(BIN)/python -m benchmarks --sections compiled --ranks 2 --seconds 40 --output $(RESULTS)/compiled.json
	$(BIN)/python -m benchmarks --sections exchange --ranks 2 --output $(RESULTS)/exchange.json
	$(BIN)/python -m benchmarks --sections layers training --output $(RESULTS)/ranks.json
	$(MAKE) bench-docs

bench-docs: $(VENV)/installed-bench
	$(BIN)/python -m benchmarks.report $(wildcard $(RESULTS)/*.json) --into docs/benchmarks.md README.md \
		--charts docs/charts

# No environment is made: a machine with a GPU may have no network. Says what is missing.
gpu:
	$(GPU_PYTHON) benchmarks/gpu/prove.py --output "$${OUT:-build/gpu}" $(ARGS)

# One file for every Python from 3.10 on and every torch from 2.10 on, with and without CUDA. torch's libraries stay out
# of it: they are those of the torch that imports it.
wheel: dist/checked
dist/checked: $(VENV)/installed-wheel $(SOURCES) README.md $(shell find bagua_syncbn -name '*.py')
	rm -rf dist build/lib* build/bdist* build/wheel *.egg-info
	BAGUA_SYNCBN_CUDA_ARCHS="$${BAGUA_SYNCBN_CUDA_ARCHS:-all}" \
		$(BIN)/python -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir build/wheel .
	PATH="$(abspath $(BIN)):$$PATH" auditwheel repair --exclude 'libtorch*' --wheel-dir dist build/wheel/*.whl
	$(BIN)/python setup.py -q sdist
	$(BIN)/python tests/tools/check_wheel.py dist/*.whl dist/*.tar.gz
	@touch $@

# Installs it beside each Python and torch that is named, and tests it there.
WHEEL_ENVIRONMENTS ?= python3.11:torch==2.13.0 python3.10:torch==2.10.0 python3.13:torch==2.13.0
test-wheel: test-installs
	tests/tools/wheel_environments.sh dist/*.whl $(WHEEL_ENVIRONMENTS)

test-installs: wheel
	$(BIN)/python tests/tools/installs.py $(INSTALLS)

bagua-env: $(BAGUA_VENV)/installed
bagua-packages: $(BAGUA_VENV)/packages

demo-bagua: bagua-env
	$(BAGUA_RUN) -m bagua.distributed.launch --nproc_per_node=$(BAGUA_RANKS) examples/train_digits.py $(ARGS)

# pytest's own program, which does not import from the checkout: what is tested is the wheel.
test-bagua: bagua-env
	$(BAGUA_RUN) $(BAGUA_VENV)/bin/pytest -m 'not gpu and not slow' $(ARGS) tests/bagua_job

$(BAGUA_VENV)/bin/python:
	@test -n '$(BAGUA_PYTHON)' || { echo 'make: Python 3.10 is needed, the only one that Bagua has a wheel for; name it:' \
		'make BAGUA_PYTHON=/path/to/python3.10' >&2; exit 1; }
	$(BAGUA_PYTHON) -m venv $(BAGUA_VENV)

# With a copy of the package without kernels, whose place the wheel takes: so that nobody waits for the wheel.
$(BAGUA_VENV)/packages: $(BAGUA_VENV)/bin/python pyproject.toml
	mkdir -p build/bagua
	cp -r pyproject.toml setup.py README.md LICENSE bagua_syncbn build/bagua
	BAGUA_SYNCBN_BUILD=python $(BAGUA_VENV)/bin/python $(PIP_INSTALL) 'build/bagua[bagua,test]'
	@touch $@

$(BAGUA_VENV)/installed: $(BAGUA_VENV)/packages dist/checked
	$(BAGUA_VENV)/bin/python $(PIP_INSTALL) --no-deps --force-reinstall dist/*.whl
	@touch $@

lint: $(VENV)/installed-lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run --Werror $(NATIVE) $(EMULATOR)
	$(BIN)/mypy

format: $(VENV)/installed-lint
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(NATIVE) $(EMULATOR)

docs: $(VENV)/installed-docs
	$(BIN)/python -m sphinx -W --keep-going -q -b html docs docs/_build/html

clean:
	rm -rf $(VENV) $(BAGUA_VENV) build dist docs/_build *.egg-info

# torch first: a build that resolved it on its own could take another one.
$(VENV)/bin/python:
	@test -n '$(PYTHON)' || { echo 'make: Python 3.10 or later is needed; name one: make PYTHON=/path/to/python3.11' >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/installed-torch: $(VENV)/bin/python
	$(BIN)/python $(PIP_INSTALL) --upgrade pip 'setuptools>=77' wheel
	$(BIN)/python $(PIP_INSTALL) '$(TORCH)'
	@touch $@

$(VENV)/installed: $(VENV)/installed-torch $(SOURCES)
	BAGUA_SYNCBN_CUDA_ARCHS='$(CUDA_ARCHS)' $(BIN)/python $(PIP_INSTALL) --no-build-isolation --editable .
	@touch $@

# The packages that an extra names. What is installed already satisfies the rest, so that nothing is built again.
$(VENV)/installed-%: pyproject.toml | $(VENV)/installed
	$(BIN)/python $(PIP_INSTALL) 'bagua_syncbn[$*]'
	@touch $@
