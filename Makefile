# The commands of this project. Each sets up what it needs; a second run finds it there.
.DEFAULT_GOAL := help
.PHONY: help up down test test-fast lint format lock environment
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c

PYTHON ?= python3
BIN := .venv/bin
CODE := engine operator tests benchmarks charts
# torch comes in large releases; it moves when somebody moves it here.
TORCH := 2.13.0
UPGRADE ?= --upgrade
UV := .venv/tools/bin/uv
COMPILE := $(UV) pip compile --python-version 3.11 --universal --generate-hashes --no-emit-index-url --no-header \
	--quiet
CLUSTER := PYTHONPATH=tests $(BIN)/python -m cluster
# A stamp's name is a hash of what it stands for, so that no file's time is trusted.
STAMP := .venv/stamps/$(shell cat requirements/dev.txt requirements/build.txt pyproject.toml | sha256sum | cut -c1-16)
# What is quick comes first, so that a mistake is seen soon.
TESTS := $(wildcard tests/engine tests/gpu tests/chart tests/operator tests/cluster tests/e2e)

help: ## what can be done
	@grep -hE '^[a-z-]+:.*##' Makefile | awk -F ':.*## ' '{printf "  make %-10s %s\n", $$1, $$2}'

up: environment ## a Kubernetes, the operator, a small model, and an answer from it
	@$(CLUSTER) up

down: environment ## remove all that `make up` made
	@$(CLUSTER) down

# Two at a time: the tests of the cluster mostly wait, the engine's mostly compute. tests/conftest.py says what may
# run beside what.
test: lint ## everything, end to end included
	@$(CLUSTER) prepare
	$(BIN)/python -m pytest $(TESTS) --numprocesses 2 --dist loadscope --no-loadscope-reorder

test-fast: lint ## what needs no cluster: style, types, layers, unit tests
	$(BIN)/python -m pytest $(TESTS) -m 'not controlplane and not cluster and not image'

lint: environment ## style, types, layers
	$(BIN)/ruff check $(CODE)
	$(BIN)/ruff format --check $(CODE)
	$(BIN)/mypy
	$(BIN)/lint-imports

format: environment ## put the code into its style
	$(BIN)/ruff check --fix $(CODE)
	$(BIN)/ruff format $(CODE)

lock: environment ## choose the newest versions of all dependencies, by hash; UPGRADE= keeps those that fit
	$(COMPILE) $(UPGRADE) pyproject.toml --all-extras --upgrade-package torch==$(TORCH) -o requirements/dev.txt
	$(COMPILE) pyproject.toml -c requirements/dev.txt --extra engine -o requirements/engine.txt
	$(COMPILE) pyproject.toml -c requirements/dev.txt --extra engine --extra demo -o requirements/engine-demo.txt
	$(COMPILE) pyproject.toml -c requirements/dev.txt --extra operator -o requirements/operator.txt
	printf 'editables\nhatchling>=1.27\nuv\n' | $(COMPILE) $(UPGRADE) - -o requirements/build.txt

environment: $(STAMP)

# uv installs everything; it is itself installed by hash, into an environment of its own inside the other.
$(STAMP):
	@echo "Setting up .venv (some gigabytes the first time)"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "error: $(PYTHON) is older than 3.11; name another one: make PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null || apt-get install -y --no-install-recommends python3-venv \
		|| { echo "error: Python's venv is missing; install the package python3-venv" >&2; exit 1; }
	@[ -x $(BIN)/python ] || $(PYTHON) -m venv --without-pip .venv
	@$(PYTHON) -m venv --clear .venv/tools
	@.venv/tools/bin/pip install --quiet --disable-pip-version-check --require-hashes -r requirements/build.txt
	@$(UV) pip sync --python .venv --require-hashes requirements/dev.txt
	@$(UV) pip install --python .venv --no-deps --build-constraints requirements/build.txt --editable .
	@rm -rf .venv/stamps && mkdir .venv/stamps && touch $@
