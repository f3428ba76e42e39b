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

# What runs on the CUDA kernels without a GPU: the ops, a decoder, graphs on the host and an
# engine at depth 2. Of the models, those tests alone that an emulated kernel can change.
EMULATED_OPS := $(addprefix tests/ops/test_,attention.py batch_attention.py batch_linear.py \
	chunk_attention.py embedding.py errors.py even_attention.py fused_linear.py linear.py \
	mixed_attention.py mlp.py norm.py opcheck.py filter.py minimum_tokens.py logprobs.py \
	penalties.py lora.py lora_link.py automata.py sample.py split_attention.py step.py)
EMULATED_MODELS := tests/models/test_decoder_fast.py tests/models/test_decoder_lora.py \
	tests/engine/test_engine_fast.py tests/models/test_decoder.py tests/runtime/test_replay.py \
	tests/engine/test_engine_models.py tests/testing/test_conformance.py
EMULATED_CASES := test_decoder_fast or test_decoder_lora or alone_batched or among_more_rows \
	or preempted or half or (bitwise and not scaled) or pinned_memory or eager_steps \
	or sampled_tokens or real_runtime or are_the_ops
# Sizes that deal work out otherwise where there are 3 or 8 SMs.
UNEVEN_CASES := any_number or more_tokens_than_a_launch or many_tokens or not_finite \
	or around_the_groups
SEEDS ?= 2
SEARCH ?= 20
# About half of the time that the tests take; what reads SmolLM2 or transformers is here.
BESIDE := $(addprefix tests/,benchmarks cli engine examples models observe test_readme.py)
# Compiles most of the CUDA sources once more.
PTX := $(addprefix tests/test_portable_code.py::,\
	test_no_kernel_holds_a_trap_for_older_devices_or_reads_by_the_read_only_cache)
# Engines beside ours, a process each.
PEERS := tests/benchmarks/test_peers.py
EMULATED := PHOTON_OPS_LIBRARY=build/emulated/_ops.abi3.so

.PHONY: demo test test-emulated test-ptx test-peers test-search test-gpu gpu sanitize bench-gpu \
	build emulator lint format clean

demo: build
	@.ci/demo "$(BIN)/python" "$(MODEL)"

# Two processes side by side: one alone leaves half of two cores idle. What the second has said
# comes after the first. Some tests start a process each: without bytecode, which an environment may
# have switched off, each of them would compile the modules of torch again.
test test-emulated: export PYTHONDONTWRITEBYTECODE =
test test-emulated: export PYTHONPYCACHEPREFIX = $(CURDIR)/build/bytecode
# glibc keeps the memory of large tensors: to get its pages anew took a quarter of some tests' time.
test test-emulated: export MALLOC_MMAP_MAX_ = 0
test test-emulated: export MALLOC_TRIM_THRESHOLD_ = 4000000000
test: build emulator
	@$(BIN)/python -m pytest -m "not gpu" -p no:cacheprovider $(BESIDE) --ignore=$(PEERS) \
	  > build/beside.log 2>&1 & \
	beside=$$!; status=0; \
	$(BIN)/python -m pytest -m "not gpu" $(addprefix --ignore=,$(BESIDE)) --deselect $(PTX) \
	  || status=$$?; \
	wait $$beside || status=$$?; cat build/beside.log; exit $$status

# Of the fused linears, which have many cases, bfloat16 alone. Seed 0 is round robin, any other
# number a random order of threads: make test-emulated SEEDS="0 1 2 3".
test-emulated: emulator
	for seed in $(SEEDS); do \
	  $(EMULATED) PHOTON_EMULATOR_SEED=$$seed $(BIN)/python -m pytest -q -m "not gpu" \
	  $(EMULATED_OPS) -k "not test_cpu_results and \
	  not (test_fused_linear and (torch.float16 or torch.float32))" || exit 1; \
	done
	for count in 3 8; do \
	  $(EMULATED) PHOTON_EMULATOR_SMS=$$count $(BIN)/python -m pytest -q -m "not gpu" \
	  tests/ops/test_fused_linear.py -k "$(UNEVEN_CASES)" || exit 1; \
	done
	$(EMULATED) $(BIN)/python -m pytest -q -m "not gpu" $(EMULATED_MODELS) -k "$(EMULATED_CASES)"

test-ptx: build
	$(BIN)/python -m pytest -q $(PTX)

test-peers: build
	$(BIN)/python -m pytest -q -m "not gpu" $(PEERS)

# Searches for what goes wrong, with SEARCH times as many examples as `make test` gives them.
test-search: build
	PHOTON_EXAMPLES=$(SEARCH) $(BIN)/python -m pytest -q -m "not gpu" \
	  tests/runtime/test_state_machine.py tests/runtime/test_plans.py \
	  tests/engine/test_readers.py tests/engine/test_paging.py tests/engine/test_adapter_slots.py \
	  tests/engine/test_prefill_modes.py

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
