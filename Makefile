# Both commands work on a fresh machine with Python >= 3.11 and make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Two cores are enough for the suite, and more processes than cores only slow it down.
TEST_JOBS ?= 2

.PHONY: demo test gpu check format clean
.DEFAULT_GOAL := demo

demo: $(VENV)/.demo  ## run real attention on four ranks and verify it
	$(BIN)/ringrt run examples/quickstart.yaml

test: $(VENV)/.dev  ## pass the tests
	$(BIN)/python -m pytest -n $(TEST_JOBS)

gpu:  ## accept the path on CUDA GPUs (docs/gpu.md), with what is installed
	$(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON)) benchmarks/gpu_acceptance.py --json gpu.json $(GPU_OPTIONS)

check: $(VENV)/.dev  ## lint and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

$(VENV)/.demo: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable '.[cpu,mpi]'
	touch $@

$(VENV)/.dev: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	touch $@ $(VENV)/.demo

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis
