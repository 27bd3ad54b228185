# Two commands from nothing but Python 3.11 or newer: `make demo` and `make test`.
# Another interpreter: `make test PYTHON=/path/to/python`; a few tests: `PYTEST_ARGS=tests/test_cost.py`.
VENV := .venv
BIN := $(VENV)/bin
export PIP_DISABLE_PIP_VERSION_CHECK := 1

# The first one that runs (the launchers of version managers may stand there and fail), is new
# enough, and can make an environment (Debian ships `ensurepip` apart).
CANDIDATES := python3.13 python3.12 python3.11 python3 python
SUITABLE := import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))
PYTHON ?= $(shell for p in $(CANDIDATES); do \
	if $$p -c '$(SUITABLE)' >/dev/null 2>&1; then echo $$p; break; fi; done)

.PHONY: demo test lint clean

demo: $(VENV)/.all
	@$(BIN)/moejax run sweeps/quickstart.py $(DEMO_ARGS)

test: $(VENV)/.all
	@$(BIN)/python -m pytest --numprocesses=2 --dist=loadfile $(PYTEST_ARGS)

lint: $(VENV)/.dev
	@$(BIN)/ruff check --quiet .
	@$(BIN)/ruff format --check --quiet . || { echo 'to fix: $(BIN)/ruff format .' >&2; exit 1; }
	@$(BIN)/pyright

$(BIN)/python:
	@python='$(PYTHON)'; "$${python:-false}" -c '$(SUITABLE)' >/dev/null 2>&1 || { echo \
	  "no Python >= 3.11 with venv$${python:+ at $$python}" \
	  "(Debian, Ubuntu: apt install python3-venv; elsewhere: make PYTHON=/path/to/python)" >&2; \
	  exit 1; }; "$$python" -m venv --clear $(VENV)

# One stamp for each set of extras: only a changed pyproject.toml installs again.
$(VENV)/.all $(VENV)/.dev: pyproject.toml | $(BIN)/python
	@echo 'installing moejax[$(@:$(VENV)/.%=%)] into $(VENV), once ...'
	@$(BIN)/python -m pip install --quiet --editable '.[$(@:$(VENV)/.%=%)]'
	@touch $@ $(VENV)/.all

clean:
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
