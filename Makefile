SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
MAKEFLAGS += --no-print-directory

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/installed
# Python compiles what is imported, which is a small part of what is installed.
INSTALL := $(BIN)/python -m pip install --no-compile --quiet
PYTHON ?=
ARGS ?=

IS_NEW_ENOUGH := import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))
KEPT_TORCH := import torch; v = torch.__version__; \
	print(v if tuple(map(int, v.split(".")[:2])) >= (2, 11) else "")
FINDS_NVRTC := from cuda.bindings import nvrtc; nvrtc.nvrtcVersion()
OWN_PACKAGES := import sys, sysconfig; sys.prefix != sys.base_prefix and print(sysconfig.get_path("purelib"))

.PHONY: help demo test test-all newest-triton mutants docs lint format clean FORCE

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-13s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo 'PYTHON=/path/to/python builds on that interpreter and keeps its torch, if that is 2.11 or newer.'

demo: $(STAMP) ## Train a small language model, on the GPU if there is one
	@$(BIN)/holdfast train lm --demo

# Where bytecode is not kept, each process of each run makes that of all tests again: some 2 s of one core.
export PYTHONDONTWRITEBYTECODE :=

# Every test is in one of two tiers, by its mark `slow`; tests/test_tiers.py holds the recipes to it.
PYTEST := $(BIN)/python -m pytest -q -n 2 --dist worksteal

test: $(STAMP) ## Run the tests but for the slow ones; ARGS='-k gla' passes options to pytest
	@$(PYTEST) -m 'not slow' $(ARGS) $(MAY_BE_NONE)

# Slow tests also wait, for ranks and for compilers: a third process uses what two leave of two cores.
# Of the tests that ARGS chooses, one tier may have none: status 5.
test-all: MAY_BE_NONE = $(if $(ARGS),|| [ $$? -eq 5 ])
test-all: test ## Run all tests: those of make test, the slow ones, and newest-triton
	@$(PYTEST) -n 3 -m slow $(ARGS) $(MAY_BE_NONE)
	@$(MAKE) newest-triton ARGS=

newest-triton: $(STAMP) ## Compile kernels for sm_90 with the newest Triton, without a GPU
	@$(INSTALL) --no-deps --upgrade --target $(VENV)/newest-triton triton
	@PYTHONPATH=$(VENV)/newest-triton $(BIN)/python -m pytest -q -n auto --dist worksteal tests/kernels -k 'compile and not cuda' -m 'not one_triton' $(ARGS)

mutants: $(STAMP) ## Plant faults on lines changed since main; ARGS='--most 50 FILE ...' for others
	@$(BIN)/python -c 'import cosmic_ray' 2>/dev/null || $(INSTALL) -e '.[mutants]'
	@PYTHONPATH=src $(BIN)/python tests/mutants.py $(ARGS)

docs: $(STAMP) ## Build the documentation's site in build/site; fails for a link to a page that is not there
	@PYTHONPATH=packaging/site $(BIN)/zensical build --strict

lint: $(STAMP) ## Check style and format
	@$(BIN)/python -m ruff check --quiet
	@$(BIN)/python -m ruff format --check

format: $(STAMP) ## Format, and fix what can be fixed
	@$(BIN)/python -m ruff check --fix --quiet
	@$(BIN)/python -m ruff format

clean: ## Remove all that was made, .venv too
	@rm -rf $(VENV) build dist .pytest_cache .ruff_cache .hypothesis
	@find src tests -name __pycache__ -prune -exec rm -rf {} +

# Another interpreter named than the one that .venv was made with: make it again.
ifneq ($(PYTHON),)
ifneq ($(PYTHON),$(shell cat $(STAMP) 2>/dev/null))
$(STAMP): FORCE
endif
endif

# The stamp holds the PYTHON asked for. It is away while an install runs, so that an interrupted one starts afresh.
$(STAMP): pyproject.toml packaging/holdfast-mlx/pyproject.toml constraints.txt
	@set -eu; asked='$(PYTHON)'; python=; \
	for p in $${asked:-python3 python3.13 python3.12 python3.11 python3.14}; do \
	  if "$$p" -c '$(IS_NEW_ENOUGH)' >/dev/null 2>&1; then python=$$p; break; fi; \
	done; \
	if [ -z "$$python" ]; then \
	  echo "$${asked:-python3} is not Python 3.11 or newer with venv and pip: install one" \
	    "(Debian, Ubuntu: apt-get install python3-venv), or name one with PYTHON=/path/to/python." >&2; exit 1; \
	fi; \
	clear=--clear; \
	if [ -f $@ ] && [ "$${asked:-$$(cat $@)}" = "$$(cat $@)" ]; then clear=; asked=$$(cat $@); fi; \
	python=$${asked:-$$python}; \
	torch=$$("$$python" -c '$(KEPT_TORCH)' 2>/dev/null || true); \
	rm -f $@; \
	if [ -n "$$torch" ]; then \
	  echo "Setting up $(VENV) on $$python, keeping its torch $$torch."; \
	  "$$python" -m venv $$clear --system-site-packages $(VENV); \
	  "$$python" -c '$(OWN_PACKAGES)' > "$$($(BIN)/python -c '$(OWN_PACKAGES)')/kept.pth"; \
	  $(INSTALL) -e '.[dev]'; \
	  $(BIN)/python -c '$(FINDS_NVRTC)' 2>/dev/null \
	    || $(INSTALL) --ignore-installed --no-deps nvidia-cuda-nvrtc; \
	else \
	  echo "Setting up $(VENV) on $$python; fetching torch takes some minutes the first time."; \
	  "$$python" -m venv $$clear $(VENV); \
	  $(INSTALL) -c constraints.txt -e '.[dev]'; \
	fi; \
	$(INSTALL) -e packaging/holdfast-mlx \
	  || echo "mlx does not install here: the tests of holdfast.mlx will say that they are skipped." >&2; \
	$(INSTALL) --no-deps --upgrade --target $(VENV)/peers 'fla-core>=0.6' einops \
	  || echo "fla-core does not install here: tests of holdfast.integrations.fla will say that they are skipped." >&2; \
	echo "$$asked" > $@
