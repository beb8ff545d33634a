# make serve    set up .venv and serve the embedded model; flags: make serve ARGS="--port 8080"
# make test     set up what tests need, then lint, types and the fast tests
# make compile-test   without a GPU: compile the steps for an H100 with what pip resolves for a GPU,
#               and check the programs; run the kernels on an emulator; some of it with Triton 3.6
# make docs     build the site into build/site, strictly; make docs-serve shows it while you write
# make slow     the tests that take minutes
# make clean    remove .venv
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
VENV := .venv
COMPILER := .venv-compiler
BIN := $(VENV)/bin
KUBE := build/kube/kubectl
OLDER_TRITON := $(COMPILER)/triton-3.6
OLDER_TRITON_TESTS := imports kernel_records hopper_attention hopper_product streaming_attention \
  expert_launches few_expert_launches recurrent_kernels hopper_blocks loads_first
COMPILE_PIP := $(COMPILER)/bin/python -m pip install --quiet --disable-pip-version-check
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
# The tested versions; CONSTRAINTS= takes the newest that the ranges in pyproject.toml allow.
CONSTRAINTS ?= constraints.txt
PINS := $(if $(CONSTRAINTS),-c $(CONSTRAINTS))
# An NVIDIA driver from 580 on runs CUDA 13, older ones CUDA 12. Without one nvidia-smi says so on
# stdout, in words.
CUDA := $(shell command -v nvidia-smi >/dev/null && nvidia-smi --query-gpu=driver_version \
  --format=csv,noheader 2>/dev/null | head -1 | awk -F. '/^[0-9]/ {print ($$1 >= 580) ? "cuda13" : "cuda12"}')

# pytest keeps what it makes of the tests' source beside it: each process saves ten seconds.
unexport PYTHONDONTWRITEBYTECODE

.DELETE_ON_ERROR:  # an environment without pip is none
.PHONY: serve test types fast-tests compile-test docs docs-serve slow clean

serve: $(VENV)/.serve
	$(BIN)/python -m jaxserve $(ARGS)

test: $(VENV)/.test $(KUBE)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@$(MAKE) --no-print-directory --keep-going -j2 types fast-tests

# basedpyright has one thread, so it runs beside the first tests.
types:
	$(BIN)/basedpyright

fast-tests:
	$(BIN)/python -m pytest -q -n auto --dist loadfile --no-loadscope-reorder $(ARGS)

compile-test: $(COMPILER)/.ready
	$(COMPILER)/bin/python -m pytest -q -n auto --dist worksteal tests/aot tests/emulated
	PYTHONPATH=$(CURDIR)/$(OLDER_TRITON) $(COMPILER)/bin/python -m pytest -q -n auto --dist worksteal \
	  $(addprefix tests/aot/test_, $(addsuffix .py, $(OLDER_TRITON_TESTS)))

docs: $(VENV)/.docs
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet
	@$(BIN)/python scripts/check_site.py
	@echo "built build/site/index.html"

docs-serve: $(VENV)/.docs
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs serve

slow: $(VENV)/.slow
	$(BIN)/python -m pytest -q -m "slow and not gpu" $(ARGS)

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

$(VENV)/.slow: $(VENV)/.test
	@echo "installing Ray Serve"
	@$(PIP) $(PINS) -e '.[test,bench,ray]'
	@touch $@

$(KUBE): scripts/kube_tools.py | $(VENV)/bin/python
	@echo "getting Helm and kubectl, with which deploy/kubernetes is checked (38 MB)"
	@$(BIN)/python scripts/kube_tools.py

$(VENV)/.docs: $(VENV)/.serve
	@echo "installing what the site needs"
	@$(PIP) $(PINS) -e '.[docs]'
	@touch $@

# A separate environment, because jax with the CUDA plugin complains on machines without a GPU. It has
# pip's packages for a GPU, without the CUDA libraries that compiling does not need; and an older Triton.
$(COMPILER)/.ready: Makefile pyproject.toml $(CONSTRAINTS) scripts/resolve.py
	@echo "installing XLA's and Triton's compilers for GPUs into $(COMPILER) (about 1.5 GB)"
	@"$$(scripts/find_python.sh)" -m venv $(COMPILER)
	@$(COMPILE_PIP) $(PINS) -e . pytest pytest-asyncio pytest-timeout pytest-xdist \
	  hypothesis
	@$(COMPILER)/bin/python scripts/resolve.py cuda13 --compile >$(COMPILER)/gpu.txt
	@$(COMPILE_PIP) --no-deps -r $(COMPILER)/gpu.txt
	@$(COMPILE_PIP) --no-deps --upgrade --target $(OLDER_TRITON) triton==3.6.0
	@touch $@

clean:
	rm -rf $(VENV) $(COMPILER)
