# Releases and Bagua's environment; included by the Makefile.

.PHONY: wheel test-wheel test-installs test-commands bagua-env demo-bagua test-bagua

# One file for every Python from 3.10 on and every torch from 2.10 on, with and without CUDA, without torch's libraries.
wheel: dist/checked ## build and check the manylinux wheel and the sdist: dist/
dist/checked: $(VENV)/installed-wheel $(SOURCES) README.md $(shell find bagua_syncbn -name '*.py')
	rm -rf dist build/lib* build/bdist* build/wheel *.egg-info
	BAGUA_SYNCBN_CUDA_ARCHS="$${BAGUA_SYNCBN_CUDA_ARCHS:-all}" \
		$(BIN)/python -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir build/wheel .
	PATH="$(abspath $(BIN)):$$PATH" auditwheel repair --exclude 'libtorch*' --wheel-dir dist build/wheel/*.whl
	$(BIN)/python setup.py -q sdist
	$(BIN)/python .ci/check_wheel.py dist/*.whl dist/*.tar.gz
	@touch $@

WHEEL_ENVIRONMENTS ?= python3.11:torch==2.13.0 python3.10:torch==2.10.0 python3.13:torch==2.14.0
test-wheel: test-installs ## test the wheel with several versions of Python and torch, and all ways of installing
	.ci/wheel_environments.sh dist/*.whl $(WHEEL_ENVIRONMENTS)

test-installs: wheel ## install in all ways, import and train, five minutes; INSTALLS='wheel cuda' selects
	$(BIN)/python .ci/installs.py $(INSTALLS)

test-commands: $(VENV)/installed-demo ## run the commands of the documentation
	$(BIN)/python .ci/commands.py

# Bagua's wheel needs Python 3.10 and a CUDA build of torch: some 5 GB on disk.
BAGUA_VENV ?= .venv-bagua
BAGUA_PYTHON ?= $(shell for python in python3.10 "$$HOME"/.pyenv/versions/3.10.*/bin/python; do \
	"$$python" -c 'import ensurepip, sys; sys.exit(sys.version_info[:2] != (3, 10))' 2>/dev/null && echo "$$python" && break; done)
BAGUA_RANKS ?= 2
# Bagua's library needs NCCL. Without this path, it finds NCCL only if torch was imported first.
BAGUA_RUN = LD_LIBRARY_PATH="$(abspath $(BAGUA_VENV))/lib/python3.10/site-packages/nvidia/nccl/lib$${LD_LIBRARY_PATH:+:$$LD_LIBRARY_PATH}" \
	$(abspath $(BAGUA_VENV))/bin/python

bagua-env: $(BAGUA_VENV)/installed ## create an environment with Python 3.10, Bagua and the wheel; downloads some gigabytes

demo-bagua: bagua-env ## train the demo with Bagua's launcher
	$(BAGUA_RUN) -m bagua.distributed.launch --nproc_per_node=$(BAGUA_RANKS) examples/train_digits.py $(ARGS)

# In a copy without the package, so that the wheel is tested. The copy's folder comes first: Bagua installs a package "tests".
test-bagua: bagua-env ## tests with Bagua that need no GPU
	rm -rf build/bagua-tests && mkdir -p build/bagua-tests
	cp -r pyproject.toml README.md benchmarks docs examples tests build/bagua-tests
	cd build/bagua-tests && $(BAGUA_RUN) -m pytest -m 'not gpu and not slow' $(ARGS) tests/bagua_job

# With uv, which installs Bagua's packages in 20 seconds; pip takes more than a minute.
$(BIN)/uv: $(BIN)/python
	@$(BIN)/python $(PIP_INSTALL) 'uv>=0.9'

$(BAGUA_VENV)/installed: dist/checked | $(BIN)/uv
	@test -n '$(BAGUA_PYTHON)' || { echo 'make: Python 3.10 is needed, the only one that Bagua has a wheel for; name it:' \
		'make BAGUA_PYTHON=/path/to/python3.10' >&2; exit 1; }
	$(BIN)/uv venv --quiet --clear --python $(BAGUA_PYTHON) $(BAGUA_VENV)
	$(BIN)/uv pip install --quiet --python $(BAGUA_VENV)/bin/python "$$(echo dist/*.whl)[bagua,test]"
	@touch $@
