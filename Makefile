# setup | demo | test | lint | zoo | bench. Everything runs from .venv, which `make setup` builds and every other target needs.
PYTHON ?= python3
VENV ?= .venv
# Extra arguments for pip, such as `--index-url https://download.pytorch.org/whl/cpu` to take torch without CUDA.
TORCH_ARGS ?=
# Processes that run tests, each whole files; 0 for one after the other in pytest's own.
JOBS ?= auto
# Extra arguments for pytest, such as `-k cli -x`.
ARGS ?=

BIN := $(VENV)/bin
STAMP := $(VENV)/.setup-done

.PHONY: help setup demo test lint zoo bench constraints clean

help:
	@echo "make setup | demo | test | lint | zoo | bench | constraints | clean"

setup: $(STAMP)

# torch first: it is the one package whose index a user may want to choose.
$(STAMP): pyproject.toml constraints.txt scripts/install-system.sh
	scripts/install-system.sh $(PYTHON)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt $(TORCH_ARGS) torch
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	touch $(STAMP)

demo: $(STAMP)
	$(BIN)/khtst-compile demo

test: $(STAMP)
	$(BIN)/python -m pytest -n $(JOBS) --maxprocesses 8 --dist loadfile $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Every model of the zoo the whole way: quantized, exported, for x86, for ARM under emulation. MODELS='gsq ssm' takes some and writes no docs.
MODELS ?=
zoo: $(STAMP)
	$(BIN)/python scripts/zoo.py $(or $(MODELS),--docs docs/zoo.md)

# Kernels against the machine's ceiling, then whole models against onnxruntime and torch.
bench: $(STAMP)
	TVM_NUM_THREADS=1 $(BIN)/python benchmarks/gemm.py
	$(BIN)/khtst-compile demo --seconds 10

constraints: $(STAMP)
	scripts/install-smollm2.sh $(BIN)/python
	scripts/freeze.sh $(BIN)/python > constraints.new && mv constraints.new constraints.txt
	touch $(STAMP)

clean:
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis out
