# Every target makes the environment it needs. PYTHON chooses the interpreter, VENV the place.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help demo test lint type check bench zoo clean

help: ## Show this list
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 10

demo: $(BIN)/.installed ## Run the bundled model on the bundled cat
	$(BIN)/hookscope demo $(ARGS)

test: $(BIN)/.installed-dev ## Run the whole test suite (ARGS go to pytest)
	$(BIN)/python -m pytest $(ARGS)

lint: $(BIN)/.installed-dev ## Check style
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

type: $(BIN)/.installed-dev ## Check types
	$(BIN)/mypy

check: lint type test ## Lint, types and tests: what CI runs

bench: $(BIN)/.installed-bench ## Measure speed and memory against the floor and the peers
	$(BIN)/python tests/bench.py $(ARGS)

zoo: $(BIN)/.installed-dev ## Check every torchvision classifier, one at a time
	$(BIN)/python tests/zoo.py $(ARGS)

clean: ## Remove environments, caches and results
	rm -rf $(VENV) build dist hookscope-out *.egg-info .mypy_cache .pytest_cache .ruff_cache

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(BIN)/.installed: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e .
	touch $@

$(BIN)/.installed-dev: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	touch $@

$(BIN)/.installed-bench: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[bench]'
	touch $@
