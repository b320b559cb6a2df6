# A fresh clone needs only make and Python 3.11 or newer: `make demo`, `make test`.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
# torch's version, as constraints.txt pins it; torch goes first, so that no other package chooses its build.
TORCH := $(shell grep '^torch==' constraints.txt)
.PHONY: help env dev demo test lint bench tables clean

help:
	@echo 'make demo    install and run the demo'
	@echo 'make test    install and run every check: ruff, mypy, pytest'
	@echo 'make lint    ruff and mypy only'
	@echo 'make bench   run the benchmarks, then rewrite the tables of README.md'
	@echo 'make tables  rewrite the tables of README.md from the stored results'
	@echo 'make env     install paceline into $(VENV); make dev adds what the tests need'
	@echo 'make clean   remove $(VENV), caches and build output'

env: $(VENV)/.env-ready
dev: $(VENV)/.dev-ready

$(VENV)/.env-ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("paceline needs Python 3.11 or newer, got " + sys.version.split()[0] + "; try make PYTHON=python3.12")'
	@echo 'installing paceline into $(VENV) (a minute or two, once)'
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) $(TORCH)
	$(INSTALL) --editable '.[all]'
	@touch $@

# z-lab's dflash is the oracle of the tests; without its dependencies, since it pins its own torch and transformers.
$(VENV)/.dev-ready: $(VENV)/.env-ready
	@echo 'installing what the tests need'
	$(INSTALL) --editable '.[dev]'
	$(INSTALL) --no-deps dflash
	@touch $@

demo: env
	$(BIN)/paceline demo

lint: dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

# A process and a thread for every core; idle threads sleep instead of spinning. Nothing is timed in the tests.
test: export OMP_NUM_THREADS ?= 1
test: export OMP_WAIT_POLICY ?= PASSIVE
test: lint
	$(BIN)/pytest --numprocesses auto --dist loadfile

# bfloat16 is compared for its tokens only: many processors have no matrix products for it.
bench: dev
	$(BIN)/python benchmarks/decode.py
	$(BIN)/python benchmarks/decode.py --dtype bfloat16 --only-tokens
	$(BIN)/python benchmarks/train_speed.py
	$(BIN)/python benchmarks/sampling.py
	$(BIN)/python benchmarks/row_invariance.py
	$(BIN)/python benchmarks/exactness.py
	$(BIN)/python benchmarks/readme_tables.py

tables: env
	$(BIN)/python benchmarks/readme_tables.py

clean:
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find src tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
