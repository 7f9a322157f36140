# make demo   sets up a virtual environment and runs the demonstration (embedded data, under two minutes; writes a page)
# make bench  prints the speed of a round beside a plain script's and Flower's simulation, and how it grows
# make test   sets it up and runs lint, types, tests, and the packaged wheel in an environment of its own
# make test-federation  starts real federations on this machine and breaks them (about a quarter of an hour)
PYTHON ?= python3
VENV   ?= .venv
PIP_ARGS ?=
BIN    := $(VENV)/bin

.PHONY: help setup demo test lint types unit package test-federation bench bench-flower format clean

help:
	@sed -n 's/^# make/make/p' Makefile

$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "fedkeep needs Python 3.11 or newer; set PYTHON=python3.x")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) -c constraints.txt -e '.[dev]'
	touch $@

setup: $(VENV)/.ready

demo: setup
	$(BIN)/fedkeep demo

test: lint types unit package

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup
	$(BIN)/mypy

unit: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -m 'not package and not federation'

package: setup
	$(BIN)/python -m pytest -m package

test-federation: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -v -m federation --durations=0 tests/federation/test_federation.py

bench: setup
	$(BIN)/python benchmarks/rounds.py
	$(BIN)/python benchmarks/growth.py
	$(BIN)/python benchmarks/population.py
	$(MAKE) bench-flower

# Flower pins packages that fedkeep uses too, so it has an environment of its own
.venv-flower/.ready: constraints.txt
	$(PYTHON) -m venv .venv-flower
	.venv-flower/bin/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) -c constraints.txt 'flwr[simulation]>=1.41,<1.43' torch
	touch $@

bench-flower: setup .venv-flower/.ready
	$(BIN)/python benchmarks/flower_simulation.py --flower-python .venv-flower/bin/python

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) fedkeep-demo.html build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
