# Each target does its whole set-up from a bare python3 >= 3.11.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test soak lint docs clean

demo: .venv/ready
	$(BIN)/mimicfl demo

test: .venv/ready-dev
	$(BIN)/python -m pytest -n 2

# Random tests of the whole package, for a few minutes or longer: make soak MINUTES=30
MINUTES ?= 3
SEED ?= 0
soak: .venv/ready-dev
	$(BIN)/python -m soak --minutes $(MINUTES) --seed $(SEED)

lint: .venv/ready-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The pictures and tables of README and docs, from runs made on the spot.
docs: .venv/ready-dev
	$(BIN)/python docs/make.py

.venv/bin/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "mimicfl needs Python 3.11 or newer; run: make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv .venv

.venv/ready: pyproject.toml constraints.txt | .venv/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable .
	touch $@

.venv/ready-dev: pyproject.toml constraints.txt | .venv/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $@ .venv/ready

clean:
	rm -rf .venv build dist runs src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
