# Each target does its whole set-up from a bare python3 >= 3.11.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test quick soak lint docs site dist clean

demo: .venv/ready
	$(BIN)/mimicfl demo

# worksteal: the tests of a file run in one process where possible, and share what the file builds once.
test: .venv/ready-dev
	$(BIN)/python -m pytest -n 2 --dist worksteal

# The fast tests, for every save.
quick: .venv/ready-dev
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not slow"

# Random tests of the whole package, for a few minutes or longer: make soak MINUTES=30
MINUTES ?= 3
SEED ?= 0
soak: .venv/ready-dev
	$(BIN)/python -m soak --minutes $(MINUTES) --seed $(SEED)

lint: .venv/ready-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The figures and tables of README and docs, from runs made on the spot.
docs: .venv/ready-dev
	$(BIN)/python docs/make.py

# The documentation site in build/site; a broken link or a page outside the navigation is an error.
site: .venv/ready-site
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build
	@echo "open build/site/index.html"

# Source distribution and wheel, checked, then installed into an empty environment, where the demo runs. The tools have an environment of
# their own, because they need newer versions of what Flower pins.
dist: build/dist-tools/ready
	rm -rf dist build/lib build/bdist* build/dist-try
	build/dist-tools/bin/python -m build --outdir dist .
	build/dist-tools/bin/python -m twine check --strict dist/*
	build/dist-tools/bin/python .ci/check_dist.py dist
	build/dist-tools/bin/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(PYTHON) -m venv build/dist-try
	build/dist-try/bin/python -I -m pip install --quiet --disable-pip-version-check --constraint constraints.txt dist/*.whl
	cd build/dist-try && unset PYTHONPATH && bin/mimicfl --version && bin/mimicfl demo --out demo && test -s demo/report.html
	@echo "dist is ready:" && ls dist

build/dist-tools/ready: constraints.txt
	$(PYTHON) -m venv build/dist-tools
	build/dist-tools/bin/python -m pip install --quiet --disable-pip-version-check build twine check-jsonschema
	touch $@

.venv/bin/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "mimicfl needs Python 3.11 or newer; run: make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv .venv

.venv/ready: pyproject.toml constraints.txt | .venv/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable .
	touch $@

.venv/ready-dev: pyproject.toml constraints.txt | .venv/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $@ .venv/ready .venv/ready-site

.venv/ready-site: pyproject.toml constraints.txt | .venv/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[site]'
	touch $@ .venv/ready

clean:
	rm -rf .venv build dist runs src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
