# make serve    set up .venv and serve the embedded model; flags: make serve ARGS="--port 8080"
# make test     set up what tests need, then lint, types and the fast tests
# make slow     the tests that take minutes
# make clean    remove .venv
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
# The tested versions; CONSTRAINTS= takes the newest that the ranges in pyproject.toml allow.
CONSTRAINTS ?= constraints.txt
PINS := $(if $(CONSTRAINTS),-c $(CONSTRAINTS))
# An NVIDIA driver from 580 on runs CUDA 13, older ones CUDA 12.
CUDA := $(shell command -v nvidia-smi >/dev/null && nvidia-smi --query-gpu=driver_version \
  --format=csv,noheader 2>/dev/null | head -1 | awk -F. '{print ($$1 >= 580) ? "cuda13" : "cuda12"}')

.PHONY: serve test slow clean

serve: $(VENV)/.serve
	$(BIN)/python -m jaxserve $(ARGS)

test: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/basedpyright
	$(BIN)/python -m pytest -q $(ARGS)

slow: $(VENV)/.test
	$(BIN)/python -m pytest -q -m slow $(ARGS)

$(VENV)/bin/python:
	@python="$$(scripts/find_python.sh)"; \
	echo "making $(VENV) with $$python"; \
	"$$python" -m venv $(VENV)

$(VENV)/.serve: pyproject.toml $(CONSTRAINTS) | $(VENV)/bin/python
	@echo "installing jaxserve$(if $(CUDA), for $(CUDA)) into $(VENV) (a minute or two the first time)"
	@$(PIP) $(PINS) -e '.$(if $(CUDA),[$(CUDA)])'
	@touch $@

$(VENV)/.test: $(VENV)/.serve
	@echo "installing what the tests need"
	@$(PIP) $(PINS) -e '.[test,bench]'
	@touch $@

clean:
	rm -rf $(VENV)
