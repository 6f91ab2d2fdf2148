# Every target sets itself up in .venv. `make` alone lists them.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.complete
TORCH := torch==2.13.0
TOOLS := .venv-tools
PEER_VENV := .venv-peer
PEER_BIN := $(PEER_VENV)/bin
PEER_STAMP := $(PEER_VENV)/.complete

.DEFAULT_GOAL := help
.PHONY: help venv test test-models check soak demo bench proto docs lint-deploy matrix

help:  ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' Makefile | expand -t 13

venv: $(STAMP)  ## make .venv with everything in it (again when pyproject.toml changed)

# The stamp is written last: an interrupted set-up is done again.
$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(0 if v >= (3, 10) else "rankscope needs Python 3.10 or newer; this is %d.%d. Name another: make PYTHON=python3.12" % v)'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --upgrade 'pip>=25.1'
	$(BIN)/python -m pip install $(TORCH)
	$(BIN)/python -m pip install --group dev -e '.[agent,collector]'
	@touch $(STAMP)

test: check  ## check, then every test but the minutes-long ones
	$(BIN)/python -m pytest -m "not soak"

check: $(STAMP)  ## lint, format, types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# An environment of its own: what model libraries and msProbe bring must not reach the other tests.
$(PEER_STAMP): $(STAMP)
	$(PYTHON) -m venv $(PEER_VENV)
	$(PEER_BIN)/python -m pip install --upgrade 'pip>=25.1'
	$(PEER_BIN)/python -m pip install $(TORCH)
	$(PEER_BIN)/python -m pip install --group dev --group models --group peer -e '.[agent,collector]'
	@touch $(PEER_STAMP)

test-models: $(PEER_STAMP)  ## models of libraries, and everything that is compared with msProbe's
	$(PEER_BIN)/python -m pytest -m "not soak" tests/models

soak: $(STAMP) $(PEER_STAMP)  ## the minutes-long tests
	$(BIN)/python -m pytest -m soak --ignore=tests/models
	$(PEER_BIN)/python -m pytest tests/models

demo: $(STAMP)  ## two ranks train, a collector watches, a query finds where they differ
	$(BIN)/python deploy/demo/run.py

bench: $(STAMP)  ## cost beside msProbe: make bench PEER=/path/to/its/python
	$(BIN)/python deploy/bench/compare.py $(if $(PEER),--peer $(PEER)) $(if $(CASES),--cases "$(CASES)") $(if $(PAGE),--page $(PAGE))
	$(BIN)/python deploy/bench/tensors.py

proto: $(STAMP)  ## write the Python of the contract again
	$(BIN)/python -m grpc_tools.protoc -Iproto --python_out=proto --pyi_out=proto --grpc_python_out=proto rankscope/v1/collector.proto

# Of the tools alone: nothing of rankscope is imported.
$(TOOLS)/.complete: pyproject.toml
	$(PYTHON) -m venv $(TOOLS)
	$(TOOLS)/bin/python -m pip install --upgrade 'pip>=25.1'
	$(TOOLS)/bin/python -m pip install --group docs --group lint-deploy build
	@touch $@

docs: $(TOOLS)/.complete  ## the documentation as a site in site/, strictly
	$(TOOLS)/bin/mkdocs build --strict

lint-deploy: $(TOOLS)/.complete  ## every file in deploy/ by its own linter
	$(TOOLS)/bin/python deploy/lint.py --all

matrix: $(TOOLS)/.complete  ## install under each Python and protobuf, and try it
	$(TOOLS)/bin/python deploy/matrix.py
