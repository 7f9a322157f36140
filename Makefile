# make demo             install into .venv and run the demo (built-in data, under two minutes; writes an HTML report)
# make quick            run the unit tests, and contract and oracle tests of six methods (about a minute)
# make test             run everything that CI runs: lint, types, all tests and the built package, the GPU kernels on the CPU
# make test-kernels     run the GPU kernels on the CPU, in Triton's interpreter, against torch (part of make test)
# make test-federation  start real federations on this machine and inject faults (about 15 minutes)
# make fuzz             fuzz experiment files, overrides, command lines, data, run folders and messages (about 10 minutes)
# make coverage         run the tests with line coverage; print the total and the ten least covered files
# make bench            measure the time per round, next to a plain PyTorch loop and Flower's simulation, and how it scales
# make docs             build the documentation site into site/ (open site/index.html); a broken link is an error
# make reproduce        run every table and figure of the papers in full (days on one GPU); repeat it to resume
# make format           format the code and fix what ruff can fix
# make clean            delete the environments and everything else that was built
PYTHON ?= python3
VENV   ?= .venv
PIP_ARGS ?=
# non-empty: the tests measure coverage (Python before 3.12: nearly twice the CPU time)
COVERAGE ?=
# the tests that `make unit` runs
MARKERS ?= not package and not federation
QUICK_METHODS ?= fedavg,fedntd,scaffold,fedka,flashback,fedcurv
TRITON ?= 3.9.0
FUZZ   ?=
# make reproduce: which tables (all), more options such as --seeds 1, and where the runs and the small files of them go
TABLES ?=
REPRODUCE ?=
RUNS   ?= runs/reproduce
KEEP   ?= runs/kept
BIN    := $(VENV)/bin
COMMA  := ,
# each of two workers takes half of the tests in their order, so that what tests share is made once; then the rest of
# the other's
PYTEST_2 := -m pytest -n 2 --dist worksteal
# sys.monitoring, where Python has it, is the cheaper way to measure coverage
COVERAGE_CORE = $(shell $(BIN)/python -c 'import sys; print("sysmon" if sys.version_info >= (3, 12) else "ctrace")')
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS)

.PHONY: help setup demo quick test lint types unit coverage package triton test-kernels test-federation fuzz bench bench-flower docs reproduce format clean

help:
	@sed -n 's/^# make/make/p' Makefile

$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "fedkeep needs Python 3.11 or newer; set PYTHON=python3.x")'
	$(PYTHON) -m venv $(VENV)
	$(PIP_INSTALL) -c constraints.txt -e '.[dev]'
	touch $@

setup: $(VENV)/.ready

demo: setup
	$(BIN)/fedkeep demo

quick: setup
	OMP_NUM_THREADS=1 $(BIN)/python $(PYTEST_2) --methods $(QUICK_METHODS) tests/unit tests/contract

# Triton is installed while mypy runs; the package is built and installed by one worker while the other runs tests
test: setup
	$(MAKE) -j 2 lint types triton
	$(MAKE) unit MARKERS='not federation'
	$(MAKE) test-kernels

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup
	$(BIN)/mypy

unit: setup
	OMP_NUM_THREADS=1 $(if $(COVERAGE),COVERAGE_CORE=$(COVERAGE_CORE)) $(BIN)/python $(PYTEST_2) -m '$(MARKERS)' $(if $(COVERAGE),--cov --cov-report=)
	$(if $(COVERAGE),$(BIN)/coverage report --sort=cover | sed -n -e 1$(COMMA)12p -e '$$p')

coverage:
	$(MAKE) unit COVERAGE=1

package: setup
	$(BIN)/python -m pytest -m package tests/integration/test_package.py

# Triton is large and is only needed here, so it has a folder of its own, next to the packages of $(VENV)
.triton/$(TRITON).ready: | $(VENV)/.ready
	rm -rf .triton
	$(PIP_INSTALL) --no-deps --target .triton triton==$(TRITON)
	touch $@

triton: setup
	@$(MAKE) --no-print-directory .triton/$(TRITON).ready || \
	echo "test-kernels: SKIPPED, because Triton $(TRITON) could not be installed (the reason is above)"

test-kernels: triton
	@if [ -e .triton/$(TRITON).ready ]; then set -x; \
	PYTHONPATH=.triton TRITON_INTERPRET=1 OMP_NUM_THREADS=1 $(BIN)/python $(PYTEST_2) tests/gpu/test_kernels_interpreted.py; fi

test-federation: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -v -m federation --durations=0 tests/federation/test_federation.py

# 2 GiB and 20 s of processor time per try; FUZZ="toml --seed 7 --tries 1" repeats one
fuzz: setup
	OMP_NUM_THREADS=1 PYTHONPATH=tests $(BIN)/python -m fuzz $(FUZZ)

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

$(VENV)/.docs-ready: $(VENV)/.ready
	$(PIP_INSTALL) -c constraints.txt -e '.[docs]'
	touch $@

docs: $(VENV)/.docs-ready
	$(BIN)/python website/build_site.py

# a table that fails does not stop the others; a signal does
reproduce: setup
	@failed=; for name in $(or $(TABLES),$$($(BIN)/python -c 'from fedkeep.reproduce import spec; print(*spec.names())')); do \
	$(BIN)/fedkeep reproduce $$name --runs $(RUNS) --keep $(KEEP) $(REPRODUCE); code=$$?; \
	if [ $$code -ge 128 ]; then exit $$code; elif [ $$code -ne 0 ]; then failed="$$failed $$name"; fi; done; \
	$(BIN)/fedkeep reproduce --ledger --runs $(KEEP) || exit 1; \
	if [ -n "$$failed" ]; then echo "failed or not run:$$failed"; exit 1; fi

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) .venv-flower .triton fedkeep-demo.html build dist site *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis .coverage*
