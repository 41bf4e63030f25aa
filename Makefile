# The commands of this project. Each command installs what it needs; a second run reuses it.
.DEFAULT_GOAL := help
.PHONY: help up programs object-store prepared down test test-fast versions docs browser lint style types imports format generate operator fuzz lock environment
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c

PYTHON ?= python3
BIN := .venv/bin
CODE := engine operator gateway tests benchmarks charts
# torch releases are large, so `make lock` keeps this version; change it here.
TORCH := 2.13.0
# Versions that GPU machines have, tested by `make versions`: Python, and the packages that differ from the newest ones.
PYTHON312 ?= python3.12
GPU_PACKAGES := torch==2.11.0 triton==3.6.0 transformers==5.17.0
UPGRADE ?= --upgrade
MINUTES ?= 60
FUZZ ?= tests/engine/model/test_damaged_files.py
UV := .venv/tools/bin/uv
LOCKED := --universal --generate-hashes --no-emit-index-url --no-header --quiet
COMPILE := $(UV) pip compile --python-version 3.11 $(LOCKED)
# xds-protos brings an older copy of OpenTelemetry's messages, in the same files: the package that has them comes last.
LAST := --no-deps --reinstall-package opentelemetry-proto
CLUSTER := PYTHONPATH=tests $(BIN)/python -m cluster
# Processes of tests and pods import torch and transformers. Without cached bytecode, each process compiles them again,
# which takes many seconds. Pods cannot write to .venv, so what they import is compiled beforehand. The packages below are
# compiled when a process of this machine first imports them.
unexport PYTHONDONTWRITEBYTECODE
COMPILED_LATER := site-packages/(fontTools|kubernetes|langchain_core|langsmith|litellm|matplotlib|mypy|networkx|openai|pygments|schemathesis|sympy)/|transformers/models/
# The stamp's name is a hash of its inputs, so file times do not matter.
STAMP := .venv/stamps/$(shell cat requirements/dev.txt requirements/build.txt pyproject.toml | sha256sum | cut -c1-16)
GPU_STAMP := .venv-3.12/stamps/$(shell cat requirements/gpu.txt requirements/build.txt pyproject.toml | sha256sum | cut -c1-16)
# Fast tests come first, so that mistakes show early.
TESTS := $(wildcard tests/engine tests/gpu tests/gateway tests/chart tests/operator tests/cluster tests/e2e)

help: ## list the commands
	@grep -hE '^[a-z-]+:.*##' Makefile | awk -F ':.*## ' '{printf "  make %-10s %s\n", $$1, $$2}'

up: ## start a one-node Kubernetes, the operator, the gateway and a small model, and ask it a question
	@$(MAKE) --no-print-directory --jobs 2 prepared programs
	@$(CLUSTER) up

# Runs beside `prepared`: the build of Kubernetes takes longest, and depends on nothing else.
programs:
	@PYTHONPATH=tests $(PYTHON) -m cluster.programs

# A test that had to build it would wait for minutes, within its time limit.
object-store:
	@PYTHONPATH=tests $(PYTHON) -m cluster.gotools

prepared: environment
	@$(CLUSTER) prepare

down: environment ## remove everything that `make up` created
	@$(CLUSTER) down

# Three processes on two cores: one waits for the node, one for a control plane, and one computes. See
# tests/support/groups.py.
test: lint browser ## run all tests, end to end included
	@$(MAKE) --no-print-directory --jobs 2 prepared programs object-store
	$(BIN)/python -m pytest $(TESTS) --numprocesses 3 --dist loadscope --no-loadscope-reorder --durations 10

browser:
	@command -v chromium-headless-shell >/dev/null || command -v chromium >/dev/null \
		|| { apt-get update -qq && apt-get install -qq -y --no-install-recommends chromium-headless-shell >/dev/null; } \
		|| { echo "error: Chromium is missing; install the package chromium-headless-shell" >&2; exit 1; }

test-fast: lint ## run the fast tests, which need no control plane, node or image
	$(BIN)/python -m pytest $(TESTS) -m 'not (controlplane or cluster or image or slow)' --numprocesses 3 \
		--dist loadscope --no-loadscope-reorder

versions: $(GPU_STAMP) ## run the engine's tests with the Python and packages of GPU machines
	.venv-3.12/bin/python -m pytest tests/engine tests/gpu -m 'not (controlplane or cluster or image)' \
		--numprocesses 2 --dist loadscope --no-loadscope-reorder

docs: environment ## build the documentation into site/
	$(BIN)/mkdocs build

lint: environment ## check style, types and import contracts
	@$(MAKE) --no-print-directory --jobs --output-sync style types imports

style types imports: environment

style:
	$(BIN)/ruff check $(CODE)
	$(BIN)/ruff format --check $(CODE)

types:
	$(BIN)/mypy

imports:
	$(BIN)/lint-imports --no-cache

format: environment ## format the code
	$(BIN)/ruff check --fix $(CODE)
	$(BIN)/ruff format $(CODE)

generate: environment ## rewrite the CRD, the reference pages, the dashboards and install.yaml
	$(BIN)/python -m fastgen_operator.api.crd --write
	$(BIN)/python -m fastgen_operator.api.reference --write
	$(BIN)/python -m fastgen.commands.reference --write
	$(BIN)/python -m fastgen_operator.plugin.reference --write
	cd charts && ../$(BIN)/python -m dashboards
	PYTHONPATH=tests:charts $(BIN)/python -m chart_files

ENGINE_IMAGE ?= docker.io/library/fastgen-engine:dev
ARGUMENTS ?=
operator: environment ## run the operator on this machine against the current kubeconfig
	@echo "Apply crds/ first. Scale down an operator that already runs in the cluster: two would both write."
	$(BIN)/python -m fastgen_operator.main --engine-image $(ENGINE_IMAGE) --no-leader-elect --verbose $(ARGUMENTS)

fuzz: environment ## run the properties of FUZZ, by default damaged model files, with other examples for MINUTES (60)
	@end=$$(( $$(date +%s) + 60 * $(MINUTES) )); round=0; while [ $$(date +%s) -lt $$end ]; do round=$$(( round + 1 )); \
		$(BIN)/python -m pytest -q -m "not slow" --hypothesis-profile=fuzz --hypothesis-seed=$$(date +%s) --timeout 0 \
			$(FUZZ) || exit 1; \
	done; echo "no failure in $$round rounds, $(MINUTES) minutes"

lock: environment ## pin the newest versions of all dependencies; UPGRADE= keeps the pinned ones that fit
	$(COMPILE) $(UPGRADE) pyproject.toml --all-extras --upgrade-package torch==$(TORCH) -o requirements/dev.txt
	$(COMPILE) pyproject.toml -c requirements/dev.txt --extra engine -o requirements/engine.txt
	$(COMPILE) pyproject.toml -c requirements/dev.txt --extra engine --extra demo -o requirements/engine-demo.txt
	$(COMPILE) pyproject.toml -c requirements/dev.txt --extra operator -o requirements/operator.txt
	$(COMPILE) pyproject.toml -c requirements/dev.txt --extra gateway -o requirements/gateway.txt
	cp requirements/dev.txt requirements/gpu.txt
	$(UV) pip compile --python-version 3.12 $(LOCKED) pyproject.toml --all-extras \
		$(GPU_PACKAGES:%=--upgrade-package %) -o requirements/gpu.txt
	printf 'editables\nhatchling>=1.27\nuv\n' | $(COMPILE) $(UPGRADE) - -o requirements/build.txt

environment: $(STAMP)

# uv installs everything. uv itself is installed, pinned by hash, into its own environment inside .venv.
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
	@$(UV) pip install --python .venv --require-hashes -r requirements/dev.txt $(LAST)
	@$(BIN)/python -m compileall -qq -j 0 -x '$(COMPILED_LATER)' .venv/lib || true
	@$(UV) pip install --python .venv --no-deps --build-constraints requirements/build.txt --editable .
	@rm -rf .venv/stamps && mkdir .venv/stamps && touch $@

# A second environment beside .venv, installed by the uv of .venv.
$(GPU_STAMP): | environment
	@echo "Setting up .venv-3.12 (some gigabytes the first time)"
	@$(PYTHON312) -c 'import sys; sys.exit("%d.%d" % sys.version_info[:2] != "3.12")' \
		|| { echo "error: no Python 3.12: make versions PYTHON312=/path/to/python3.12" >&2; exit 1; }
	@[ -x .venv-3.12/bin/python ] || $(PYTHON312) -m venv --without-pip .venv-3.12
	@$(UV) pip sync --python .venv-3.12 --require-hashes --compile-bytecode requirements/gpu.txt
	@$(UV) pip install --python .venv-3.12 --require-hashes -r requirements/gpu.txt $(LAST)
	@$(UV) pip install --python .venv-3.12 --no-deps --build-constraints requirements/build.txt --editable .
	@rm -rf .venv-3.12/stamps && mkdir .venv-3.12/stamps && touch $@
