# Everything that is done with this repository. `make help` lists it.
# Needs make and Python 3.11 or newer, nothing else.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

# Pinned first and alone, so that no range can pull another build. Where the indexes that pip knows
# have a CPU build of this version ("2.13.0+cpu"), pip prefers it; else set PIP_EXTRA_INDEX_URL to one,
# or it takes the default build, which on Linux brings CUDA and several gigabytes.
TORCH ?= torch==2.13.0

PIP    := $(BIN)/python -m pip --disable-pip-version-check
# One thread per process: several ranks share the cores.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest
PROJECTS := pyproject.toml plugins/torch_backend/pyproject.toml plugins/jax_backend/pyproject.toml

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-all lint format coverage bench changelog clean

help: ## list the targets
	@awk -F':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP) ## make .venv with the core, both plugins (editable) and all tools

$(STAMP): $(PROJECTS) constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "meshcore needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version 2>&1)."; \
	  echo "Say which one to take: make $(MAKECMDGOALS) PYTHON=python3.12"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(PIP) install -q -c constraints.txt hatchling editables
	@echo "installing $(TORCH), the largest part"
	$(PIP) install -q -c constraints.txt '$(TORCH)'
	$(PIP) install -q -c constraints.txt --no-build-isolation \
	  -e '.[dev]' -e plugins/torch_backend -e plugins/jax_backend
	@touch $@
	@echo "ready: $(BIN)/meshcore backends"

demo: setup ## train a small GPT unsharded, on 2 torch ranks and on 4 jax devices, and compare
	$(BIN)/python examples/demo.py

test: setup ## the fast and normal tests
	$(PYTEST) -m "not slow"

test-all: setup ## all tests, the slow ones too
	$(PYTEST)

lint: setup ## ruff, ruff format, mypy strict
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: setup ## let ruff repair what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

coverage: setup ## branch coverage of the core by its own tests
	$(PYTEST) -m "not slow" --cov=meshcore --cov-branch --cov-report=term-missing:skip-covered

bench: setup ## cost of the core over bare collectives, and of the planner
	$(BIN)/python benchmarks/chunk_ops.py
	$(BIN)/python benchmarks/planner.py

changelog: setup ## show the notes of the next release
	$(BIN)/towncrier build --draft --version "$${VERSION:-next}"

clean: ## remove everything that can be made again
	rm -rf $(VENV) build dist demo-out .mypy_cache .ruff_cache .pytest_cache .hypothesis .coverage htmlcov
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
