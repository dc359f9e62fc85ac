# `make demo` tunes and applies on the built-in model; `make test` is what CI runs.
VENV := .venv
BIN := $(VENV)/bin
PYTHON ?= python3

.PHONY: install demo test lint types clean

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q -c constraints.txt -e '.[dev]'
	touch $@

demo: install
	$(BIN)/clusterprof tune --dataset needle --size 256 -o demo-profile.json
	$(BIN)/clusterprof apply --profile demo-profile.json --prompt-file examples/needle_prompt.txt --compare

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: install
	$(BIN)/mypy

test: lint types
	$(BIN)/pytest

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis
