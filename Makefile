# Each target creates the environment that it needs in $(VENV).
SHELL := bash

VENV ?= .venv
# pip's requirement for torch; `make test TORCH=torch==2.10.0` tests an older version.
TORCH ?= torch==2.13.0
# A Python that can create environments; Debian's needs the package python3-venv.
PYTHON ?= $(shell for python in python3.11 python3.12 python3.13 python3.10 python3 "$$HOME"/.pyenv/versions/3.*/bin/python; do \
	"$$python" -c 'import ensurepip, sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null && echo "$$python" && break; done)

# Empty, so that Python keeps the compiled modules that it imports. pip would compile all of torch, which takes longer.
export PYTHONDONTWRITEBYTECODE :=
PIP_INSTALL := -m pip install --quiet --no-compile

# CUDA kernels for the cards of this machine; without a card, only CPU kernels. The wheel has kernels for all cards.
CUDA_ARCHS ?= native

BIN := $(VENV)/bin
NATIVE := $(shell find csrc -type f)
EMULATOR := $(shell find tests/exchange tests/ops/emulator -name "*.h" -o -name "*.cpp")
SOURCES := pyproject.toml setup.py $(NATIVE)

.PHONY: help demo test test-slow test-faults sanitize bench bench-quick bench-results bench-docs gpu gpu-test gpu-bench \
	gpu-sanitize gpu-memcheck gpu-racecheck gpu-initcheck lint format docs clean

help: ## list all targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 18

demo: $(VENV)/installed-demo ## train on real data: one process, four synchronized and four unsynchronized ranks; build/demo/
	@echo 'Training three times: a minute on two cores'
	@$(BIN)/python examples/demo.py

# Three tests at a time, because tests with ranks often wait. Idle OpenMP threads must not spin.
TEST_JOBS ?= 3
# `make test MARKS='not gpu and not slow'` also runs rows that repeat a promise with other values.
MARKS ?= not gpu and not slow and not all_rows
test: $(VENV)/installed-test ## tests without a GPU; ARGS='-k masks' selects tests
	OMP_WAIT_POLICY=passive $(BIN)/python -m pytest -n $(TEST_JOBS) --dist worksteal -m '$(MARKS)' $(ARGS)

# Many ranks, drawn cases, the real launcher, machine code for all cards, tensors of 2^31 values and tens of gigabytes.
test-slow: $(VENV)/installed-test ## tests that take minutes or much memory
	$(BIN)/python -m pytest -m 'slow and not gpu' $(ARGS)

# CPU kernels with each instruction set of this machine, and CUDA kernels in the emulator. The excluded checks add a third
# to compile time; AddressSanitizer also detects null pointers and accesses beyond objects. Uninitialized memory is NaN.
SANITIZE := -g1 -Og -fsanitize=address,undefined -fno-sanitize=null,object-size,pointer-overflow,vptr \
	-fno-sanitize-recover=undefined -fno-omit-frame-pointer
SANITIZED = LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libstdc++.so)" \
	ASAN_OPTIONS=detect_leaks=0:detect_stack_use_after_return=0:malloc_fill_byte=255:max_malloc_fill_size=2147483647 \
	PYTHONPATH=build/sanitize/lib OMP_WAIT_POLICY=passive $(BIN)/pytest -q -s -p no:cacheprovider -m 'not slow'
SANITIZED_SETS := avx2 baseline $(if $(shell grep -m 1 avx512vl /proc/cpuinfo),avx512)
sanitize: $(addprefix sanitize-,emulated $(SANITIZED_SETS)) ## kernels under address and undefined sanitizers; use -j 3

# In folders of its own: `make wheel` may run at the same time.
build/sanitize/built: $(VENV)/installed-test $(SOURCES) $(shell find bagua_syncbn -name '*.py')
	BAGUA_SYNCBN_BUILD=cpu BAGUA_SYNCBN_CXXFLAGS='$(SANITIZE)' $(BIN)/python setup.py -q build \
		--build-lib build/sanitize/lib --build-temp build/sanitize/temp
	@touch $@

# Each case in one dtype; most cases with activations only in float32, because all access memory in the same way.
sanitize-emulated: build/sanitize/built
	$(SANITIZED) tests/ops/test_cuda.py tests/ops/test_values.py tests/ops/test_headers.py \
		-k 'test_cuda or (emulated and (float32 or (torch.float16 and not activations)))'

SANITIZED_CASES := not emulated and not reference and not aten and not instruction_set and not temporaries and \
	not one_process and (float32 or not activations)
$(addprefix sanitize-,$(SANITIZED_SETS)): sanitize-%: build/sanitize/built
	BAGUA_SYNCBN_CPU_CAPABILITY=$* $(SANITIZED) tests/ops/test_native.py tests/ops/test_values.py tests/ops/test_headers.py \
		-k '$(SANITIZED_CASES)'

# All promises of docs/reliability.md.
test-faults: $(VENV)/installed-test ## ranks that diverge or die
	$(BIN)/python -m pytest $(ARGS) tests/faults

bench: $(VENV)/installed-bench ## the cost of synchronization, compared with other packages; build/bench/
	$(BIN)/python -m benchmarks $(ARGS)

bench-quick: $(VENV)/installed-bench ## a subset, in two minutes
	$(BIN)/python -m benchmarks --quick $(ARGS)

RESULTS := benchmarks/results
bench-results: $(VENV)/installed-bench ## measures all results of docs/benchmarks.md; needs a quiet machine
	$(BIN)/python -m benchmarks --sections local --output $(RESULTS)/cpu.json
	$(BIN)/python -m benchmarks --sections stored --output $(RESULTS)/stored.json
	$(BIN)/python -m benchmarks --sections exchange --ranks 2 --output $(RESULTS)/exchange.json
	$(BIN)/python -m benchmarks --sections layers training --output $(RESULTS)/ranks.json
	$(MAKE) bench-docs

bench-docs: $(VENV)/installed-bench ## updates docs/benchmarks.md from recorded results
	$(BIN)/python -m benchmarks.report $(wildcard $(RESULTS)/*.json) --into docs/benchmarks.md README.md \
		--charts docs/charts

# On a machine with an NVIDIA GPU, with a Python that has a CUDA build of torch. Nothing is installed: the machine may have
# no network. The kernels are built outside the checkout, for the cards of the machine.
GPU_PYTHON ?= python3
GPU_NEEDS := 'torch>=2.10' 'setuptools>=77' pytest 'pytest-timeout>=2.3'
GPU_LIB := $(CURDIR)/build/gpu/lib
# Runs in a folder with the built package but without its sources. Turns off TF32, whose errors exceed the tolerances. NCCL and
# gloo use the loopback interface.
GPU_RUN = cd $(GPU_LIB) && PYTHONPATH=$(GPU_LIB):$(CURDIR) FAIL_WITHOUT_CUDA=1 NVIDIA_TF32_OVERRIDE=0 \
	NCCL_SOCKET_IFNAME=lo GLOO_SOCKET_IFNAME=lo MASTER_ADDR=127.0.0.1
GPU_PYTEST := $(GPU_PYTHON) -m pytest -m gpu -p no:cacheprovider $(ARGS)

gpu: ## gpu-test, gpu-sanitize and gpu-bench, each under eight minutes, on a machine with an NVIDIA GPU
	$(MAKE) gpu-test
	$(MAKE) gpu-sanitize
	$(MAKE) gpu-bench

gpu-test: $(GPU_LIB)/built ## tests that need a GPU
	$(GPU_RUN) $(GPU_PYTEST) --timeout 120 --session-timeout 300 $(addprefix $(CURDIR)/tests/,gpu data_parallel bagua_job)

gpu-bench: $(GPU_LIB)/built ## ops against copies and ATen, layers against torch's SyncBatchNorm; build/bench/gpu.json
	$(GPU_RUN) timeout 450 $(GPU_PYTHON) -m benchmarks --sections gpu --device cuda --output $(CURDIR)/build/bench/gpu.json $(ARGS)

# Every kernel on small inputs of two dtypes; racecheck: of all. Each tensor has its own allocation, so that accesses beyond
# its end are detected. Driver calls of torch that fail are not errors of the kernels.
gpu-sanitize: gpu-memcheck gpu-racecheck gpu-initcheck ## the kernels under compute-sanitizer
GPU_SANITIZER = $(GPU_RUN) PYTORCH_NO_CUDA_MEMORY_CACHING=1 timeout 155 compute-sanitizer --report-api-errors no
GPU_SMALL = $(GPU_PYTEST) $(CURDIR)/tests/gpu/test_gpu_ops.py -k 'every_kernel and $(GPU_DTYPES)'
GPU_DTYPES = (torch.float32 or torch.float16)
gpu-racecheck: GPU_DTYPES = torch
gpu-memcheck gpu-racecheck: gpu-%: $(GPU_LIB)/built
	$(GPU_SANITIZER) --tool $* --kernel-name kns=bagua_syncbn --error-exitcode 9 $(GPU_SMALL)

# initcheck must also see the writes of torch's kernels, and so reports their reads; only reports for our kernels count.
gpu-initcheck: $(GPU_LIB)/built
	$(GPU_SANITIZER) --tool initcheck --check-api-memory-access no $(GPU_SMALL) >$(GPU_LIB)/initcheck.txt 2>&1 \
		|| { tail -30 $(GPU_LIB)/initcheck.txt; exit 1; }
	! grep -A 3 Uninitialized $(GPU_LIB)/initcheck.txt | grep bagua_syncbn

$(GPU_LIB)/built: $(SOURCES) $(shell find bagua_syncbn -name '*.py')
	@$(GPU_PYTHON) -m pip install --dry-run --quiet --no-index $(GPU_NEEDS)
	BAGUA_SYNCBN_BUILD=cuda BAGUA_SYNCBN_CUDA_ARCHS=native $(GPU_PYTHON) setup.py -q build --build-lib $(GPU_LIB)
	@touch $@

lint: $(VENV)/installed-lint ## check formatting, lint and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run --Werror $(NATIVE) $(EMULATOR)
	$(BIN)/pyrefly check --python-interpreter-path $(BIN)/python

format: $(VENV)/installed-lint ## apply formatting
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(NATIVE) $(EMULATOR)

docs: $(VENV)/installed-docs ## the documentation as HTML: docs/_build/html/index.html
	$(BIN)/python -m sphinx -W --keep-going -q -b html docs docs/_build/html

clean: ## removes the results of all targets
	rm -rf $(VENV) $(BAGUA_VENV) build dist docs/_build *.egg-info bagua_syncbn/*.so bagua_syncbn/build_info.json

# torch first: a build could resolve another version.
$(VENV)/bin/python:
	@test -n '$(PYTHON)' || { echo 'make: Python 3.10 or later is needed; name one: make PYTHON=/path/to/python3.11' >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/installed-torch: $(VENV)/bin/python
	@echo 'Installing $(TORCH) in $(VENV): half a minute, downloads aside'
	@$(BIN)/python $(PIP_INSTALL) --upgrade pip 'setuptools>=77' wheel
	@$(BIN)/python $(PIP_INSTALL) '$(TORCH)'
	@touch $@

$(VENV)/installed: $(VENV)/installed-torch $(SOURCES)
	@echo 'Building the native kernels: a minute on two cores, two more where there is a CUDA card'
	@set -o pipefail; BAGUA_SYNCBN_CUDA_ARCHS='$(CUDA_ARCHS)' $(BIN)/python -m pip install --verbose --no-compile \
		--no-build-isolation --editable . 2>&1 | tee $(VENV)/install.log | sed -un 's/.*bagua_syncbn: compiled/compiled/p' \
		|| { cat $(VENV)/install.log; exit 1; }
	@touch $@

# These tools need no kernels, and do not wait for the build.
$(addprefix $(VENV)/installed-,lint wheel docs): $(VENV)/installed-%: pyproject.toml | $(VENV)/installed-torch
	@$(BIN)/python $(PIP_INSTALL) --group $*
	@touch $@

# The packages of an extra. Installed packages satisfy all other requirements, so nothing is rebuilt.
$(VENV)/installed-%: pyproject.toml | $(VENV)/installed
	@echo 'Installing the packages of bagua_syncbn[$*]'
	@$(BIN)/python $(PIP_INSTALL) 'bagua_syncbn[$*]'
	@touch $@

include .ci/release.mk
