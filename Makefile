# Everything from nothing: each target makes the environment that it needs in $(VENV).

VENV ?= .venv
# torch as pip names it; `make test TORCH=torch==2.10.0` tries another.
TORCH ?= torch==2.13.0
PYTHON ?= $(shell for python in python3.11 python3.12 python3.13 python3.10 python3; do \
	"$$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null && echo "$$python" && break; done)

BIN := $(VENV)/bin
SOURCES := pyproject.toml setup.py

.PHONY: help demo test lint format docs clean

help:
	@echo 'make demo    train on real data: one process, four synchronized ranks, four unsynchronized; build/demo/'
	@echo 'make test    all tests that run without a GPU'
	@echo 'make lint    formatting, lint and types'
	@echo 'make docs    the documentation as HTML: docs/_build/html/index.html'
	@echo 'make format  apply the formatting'
	@echo 'make clean   remove what the other targets made'

demo: $(VENV)/installed-demo
	$(BIN)/python examples/demo.py

test: $(VENV)/installed-test
	$(BIN)/python -m pytest -m 'not gpu and not slow' $(ARGS)

lint: $(VENV)/installed-lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/installed-lint
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(VENV)/installed-docs
	$(BIN)/python -m sphinx -W --keep-going -q -b html docs docs/_build/html

clean:
	rm -rf $(VENV) build dist docs/_build *.egg-info

# torch first: a build that resolved it on its own could take another one.
$(VENV)/bin/python:
	@test -n '$(PYTHON)' || { echo 'make: Python 3.10 or later is needed; name one: make PYTHON=/path/to/python3.11' >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/installed-torch: $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --upgrade pip 'setuptools>=77' wheel
	$(BIN)/python -m pip install --quiet '$(TORCH)'
	@touch $@

$(VENV)/installed-%: $(VENV)/installed-torch $(SOURCES)
	$(BIN)/python -m pip install --quiet --no-build-isolation --editable '.[$*]'
	@touch $@
