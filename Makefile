# What a person, pre-commit and CI all run. Needs Python 3.11 or newer and make, nothing else:
# every target first sets up .venv, once, with the exact versions of constraints.txt. Another set of
# versions goes into a folder of its own: make test VENV=.venv-oldest CONSTRAINTS=constraints.oldest.txt

PYTHON ?= python3
VENV ?= .venv
CONSTRAINTS ?= constraints.txt
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
# One process per core, at most four: each holds a torch of its own.
PYTEST_FLAGS ?= --numprocesses=auto --maxprocesses=4
# Another interpreter than the one that made the environment would silently not be used.
ifeq ($(origin PYTHON),command line)
ifneq ($(wildcard $(BIN)/python),)
VERSION := -c 'import sys; print(*sys.version_info[:3], sep=".")'
MADE_WITH := $(shell $(BIN)/python $(VERSION))
ASKED_FOR := $(shell $(PYTHON) $(VERSION))
ifneq ($(MADE_WITH),$(ASKED_FOR))
ifneq ($(MAKECMDGOALS),clean)
$(error $(VENV) is of Python $(MADE_WITH), $(PYTHON) is $(or $(ASKED_FOR),missing): name another folder, as VENV=.venv-other, or run make clean)
endif
endif
endif
endif

.PHONY: help demo test check bench setup format lint types imports clean

help:
	@echo "make demo    decode real prompts with the bundled models under several policies"
	@echo "make test    run the tests"
	@echo "make check   format, lint, types, import contracts, tests: what CI runs"
	@echo "make bench   run the benchmarks"
	@echo "make format  put the code into shape, as far as ruff can"
	@echo "make clean   remove .venv and the tools' caches"

demo: $(INSTALLED)
	@echo "==> demo: the bundled models under several policies (experiments/demo.yaml)"
	@$(BIN)/sdcontrol ab experiments/demo.yaml --output runs --overwrite

test: $(INSTALLED)
	@echo "==> tests"
	@$(BIN)/python -m pytest $(PYTEST_FLAGS)

check: lint types imports test

bench: $(INSTALLED)
	@echo "==> benchmarks"
	@$(BIN)/python -m benchmarks

setup: $(INSTALLED)

format: $(INSTALLED)
	@echo "==> ruff format, ruff check --fix"
	@$(BIN)/ruff format --quiet .
	@$(BIN)/ruff check --fix .

lint: $(INSTALLED)
	@echo "==> format and lint"
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .

types: $(INSTALLED)
	@echo "==> types (mypy --strict)"
	@$(BIN)/mypy

imports: $(INSTALLED)
	@echo "==> import contracts"
	@PYTHONPATH=. $(BIN)/lint-imports

clean:
	@echo "==> removing .venv and caches"
	@find . -name __pycache__ -prune -exec rm -rf {} +
	@rm -rf .venv .venv-* .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache build

$(INSTALLED): pyproject.toml $(CONSTRAINTS)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	    echo "Python 3.11 or newer is needed; $(PYTHON) is" \
	         "$$($(PYTHON) --version 2>/dev/null || echo missing)." \
	         "Name another one: make PYTHON=python3.11 $(MAKECMDGOALS)"; exit 1; }
	@echo "==> setup: installing into $(VENV) (once; minutes, and gigabytes where torch comes with CUDA)"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check \
	    --constraint $(CONSTRAINTS) --editable '.[dev,learned,traces]'
	@echo "==> setup: compiling the planner (once; one to two minutes)"
	@$(BIN)/python -c 'import logging; logging.disable(); import sdcontrol.controller, sdcontrol.engine.drafters.ngram'
	@touch $@
	@echo "==> setup: done, with $$($(BIN)/python --version) and torch $$($(BIN)/python -c \
	    'from importlib.metadata import version; print(version("torch"))')"
