# `make demo` and `make test` do everything on a fresh machine with Python 3.10 to 3.13: they make .venv, install, and run.
PYTHON ?= python3
BIN := .venv/bin

.venv/.done: pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	touch $@

.PHONY: demo test lint bench clean
demo: .venv/.done
	$(BIN)/sglang-eagle3 demo

test: .venv/.done lint
	$(BIN)/python -m pytest

lint: .venv/.done
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf .venv dist build
