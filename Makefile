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

.PHONY: demo test lint torch clean

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

# What the tests of capture need, and skip without: torch for the CPU, 0.9 GB (`+cpu` is never the
# build for CUDA, of several GB), from pip's own index or else PyTorch's, and transformers, 0.3 GB.
# Elsewhere than on Linux: `make torch TORCH=torch`.
TORCH := torch==2.13.0+cpu
torch: $(VENV)/.torch

$(VENV)/.torch: pyproject.toml | $(VENV)/.all
	@echo 'installing torch and transformers into $(VENV), once ...'
	@$(BIN)/python -c 'import torch' 2>/dev/null || \
	  $(BIN)/python -m pip install --quiet '$(TORCH)' 2>/dev/null || $(BIN)/python -m pip install \
	  --quiet --extra-index-url https://download.pytorch.org/whl/cpu '$(TORCH)'
	@$(BIN)/python -m pip install --quiet --editable '.[all,capture]'
	@touch $@

clean:
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
