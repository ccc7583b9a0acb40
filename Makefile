# `make demo` and `make test` do everything on a fresh machine with Python 3.10 to 3.13: they make .venv, install, and run.
PYTHON ?= python3
BIN := .venv/bin

.venv/.done: pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	touch $@

.PHONY: demo test lint coverage mutations bench clean
demo: .venv/.done
	$(BIN)/sglang-eagle3 demo

test: .venv/.done lint
	$(BIN)/python -m pytest

lint: .venv/.done
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The lines that a serving process runs, by the unit tests and by real engines; most of an hour on 2 cores.
coverage: .venv/.done
	$(BIN)/python tests/coverage/measure.py

# Ten lines broken, one at a time; a test must fail each time.
mutations: .venv/.done
	$(BIN)/python tests/mutations.py

clean:
	rm -rf .venv dist build
