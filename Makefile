# Burstline's commands. Every target makes what it needs; a second run starts at once.
#
#   make demo    set up, start the whole line on this machine, hold a chat, stop clean
#                MODEL=smollm2: with a public model, fetched once (`burstline model list`)
#   make test    set up, then every test
#   make up      set up, then `burstline up`: the stack, kept running
#
# PYTHON=/path/to/python3.12 chooses the interpreter (3.11 or newer) for a new .venv. ARGS= is passed on.
.POSIX:
.PHONY: help setup setup-demo demo up test test-unit test-services check lint types imports fmt golden clean

PYTHON =
ARGS =
MODEL =
BIN = .venv/bin
# Tests share two slow cores with the servers they start: one thread each for numeric libraries.
PYTEST = OMP_NUM_THREADS=1 $(BIN)/python -m pytest

help:
	@sed -n '3,9s/^# \{0,1\}//p' Makefile

setup:
	@PYTHON='$(PYTHON)' ./scripts/setup dev

setup-demo:
	@PYTHON='$(PYTHON)' ./scripts/setup demo

demo:
	@started=$$(date +%s) && PYTHON='$(PYTHON)' ./scripts/setup demo && \
	exec $(BIN)/burstline demo --started "$$started" $(MODEL:%=--model %) $(ARGS)

up: setup-demo
	@exec $(BIN)/burstline up $(MODEL:%=--model %) $(ARGS)

test: test-unit test-services

# In two processes, as tests/spread.py says: a file stays in one of them, with its fixtures.
test-unit: setup
	$(PYTEST) -n 2 --dist loadfile tests/unit tests/property tests/golden $(ARGS)

# These start, stop and kill servers, and wait for them: each process has its own.
test-services: setup
	$(PYTEST) -n 2 --dist loadfile tests/contract tests/integration tests/e2e $(ARGS)

check: lint types imports

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup
	$(BIN)/mypy

imports: setup
	$(BIN)/lint-imports

fmt: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

golden: setup
	BURSTLINE_GOLDEN=1 $(PYTEST) tests/golden $(ARGS)
	@git status --short tests/golden

clean:
	rm -rf .burstline build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -not -path './.venv/*' -prune -exec rm -rf {} +
