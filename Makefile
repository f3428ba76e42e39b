# make demo, make test: from a fresh machine (Debian: python3, python3-venv, g++, make) to text, and to green tests.
# A Python that has torch already is used as it is, and nothing there is replaced; otherwise .venv gets the versions in constraints.txt.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
MODEL ?=
PROMPT ?= Why is the sky blue?
CXX_SOURCES = $(shell find csrc -name '*.h' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh')

.PHONY: demo test test-gpu build lint format clean

demo: build
	@.ci/demo "$(BIN)/python" "$(MODEL)" "$(PROMPT)"

test: build
	$(BIN)/python -m pytest -m "not gpu"

test-gpu: build
	$(BIN)/python -m pytest -m gpu

build: $(READY)
	$(BIN)/python setup.py build_ext --inplace

lint: $(READY)
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m mypy
	$(BIN)/clang-format --dry-run -Werror $(CXX_SOURCES)

format: $(READY)
	$(BIN)/python -m ruff check --fix .
	$(BIN)/python -m ruff format .
	$(BIN)/clang-format -i $(CXX_SOURCES)

clean:
	rm -rf build dist photon_ext/*.so photon_ext/_build_info.py photon_ext.egg-info

$(READY): .ci/setup constraints.txt pyproject.toml
	.ci/setup "$(PYTHON)" "$(VENV)"
	touch $@
