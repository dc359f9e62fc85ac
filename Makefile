# `make demo` tunes and applies on the built-in model; `make test` is what CI runs.
VENV := .venv
BIN := $(VENV)/bin
# The same with the oldest transformers that pyproject.toml allows.
FLOOR := .venv-floor
FLOOR_VERSION := $(shell sed -n 's/.*"transformers>=\([0-9.]*\),.*/\1/p' pyproject.toml)
PYTHON ?= python3

.PHONY: install demo test test-latest test-floor lint types clean

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q -c constraints.txt -e '.[dev]'
	touch $@

$(FLOOR)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(FLOOR)
	sed 's/^transformers==.*/transformers==$(FLOOR_VERSION).*/' constraints.txt > $(FLOOR)/constraints.txt
	$(FLOOR)/bin/pip install -q -c $(FLOOR)/constraints.txt -e '.[dev]'
	touch $@

demo: install
	$(BIN)/clusterprof tune --dataset needle --size 256 -o demo-profile.json
	$(BIN)/clusterprof apply --profile demo-profile.json --prompt-file examples/needle_prompt.txt --compare

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: install
	$(BIN)/mypy

# Both environments side by side, one thread each.
test: lint types $(FLOOR)/.installed
	OMP_NUM_THREADS=1 $(MAKE) -j2 --output-sync=target test-latest test-floor

# Hypothesis's own profile for CI: the same examples every time, so that what fails can be run again.
test-latest: install
	$(BIN)/pytest --hypothesis-profile=ci

# All that runs models; the rest does not depend on transformers' version.
test-floor: $(FLOOR)/.installed
	$(FLOOR)/bin/pytest --hypothesis-profile=ci tests/runtime tests/profiling tests/benchmarking tests/models tests/reference tests/cli/test_apply.py

clean:
	rm -rf $(VENV) $(FLOOR) .mypy_cache .ruff_cache .pytest_cache .hypothesis
