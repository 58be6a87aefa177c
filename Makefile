# SPDX-License-Identifier: Apache-2.0
# PYTHON names the interpreter that .venv is made from; MACHINE=cpu or cuda overrides what set-up finds out.
PYTHON ?= python3
export PYTHON MACHINE
RUN := .venv/bin/python

.PHONY: help setup demo-pair demo test test-all test-v2 lint check-cuda sanitize fuzz soak bench-demo bench-ops bench-metrics \
	bench-block-length dashboard-picture gpu-check
.DEFAULT_GOAL := help

help:
	@echo "make demo       serve a small real model with its drafter and without, and compare"
	@echo "make test       the tests (test-all: with the long ones)"
	@echo "make test-v2    vLLM's V2 runner, interpreted on a CPU, and several ranks"
	@echo "make lint       ruff and mypy"
	@echo "make setup      .venv with vLLM and this package, built"
	@echo "make demo-pair  .demo/target and .demo/drafter"
	@echo "make check-cuda nvcc compiles the CUDA part for every architecture, nothing spilled (no GPU needed)"
	@echo "make sanitize   native code and emulated CUDA kernels under AddressSanitizer and UBSan, random shapes"
	@echo "make fuzz       hostile checkpoints, many (minutes)"
	@echo "make bench-demo vllm-dflash bench on the demo pair, a small matrix"
	@echo "make bench-block-length  block_length auto against plain decoding and all drafts, on the demo pair"
	@echo "make bench-ops  the operations against vLLM's own, on this machine's processors"
	@echo "make bench-metrics  what the metrics cost a step of the demo pair"
	@echo "make soak       15,000 steps of random traffic on V1 and 1,500 on V2, every step checked (SOAK_ARGS)"
	@echo "make dashboard-picture  docs/dashboard.png anew, from a run of the demo pair under Prometheus (as root)"
	@echo "make gpu-check  the operations on an NVIDIA GPU: tests, graph replays, times"

setup:
	@sh scripts/setup.sh

demo-pair: setup
	@$(RUN) -m examples.smollm2.target --out .demo/target
	@ln -sfn ../examples/smollm2/drafter .demo/drafter

demo: demo-pair
	@$(RUN) -m examples.demo $(DEMO_ARGS)

# Two at once, a file of tests on one of them: most of the time an engine of one thread, or nothing but its start, is
# waited for. PYTEST_ARGS="-n 0" runs one after the other.
test: demo-pair
	@$(RUN) -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m "not slow and not gpu" $(PYTEST_ARGS)

test-all: demo-pair
	@$(RUN) -m pytest $(PYTEST_ARGS)

# What runs on V2 alone, then of the suites of both runners what V2 can tell: the interpreter takes a tenth of a second
# a token.
test-v2: demo-pair
	@$(RUN) -m pytest tests/engine/test_v2_runner.py tests/engine/test_distributed.py tests/engine/test_against_stock.py \
		-k "not demo" $(PYTEST_ARGS)
	@$(RUN) -m pytest --runner v2 @tests/engine/v2_tests.txt $(PYTEST_ARGS)
	@$(RUN) -m pytest --runner v2 --asynchronous @tests/engine/v2_asynchronous_tests.txt $(PYTEST_ARGS)

lint: setup
	@$(RUN) -m ruff check .
	@$(RUN) -m mypy

check-cuda: setup
	@$(RUN) -m pytest -q tests/ops/test_compilation.py

# A small matrix of `vllm-dflash bench` on the demo pair; on two cores five minutes.
bench-demo: demo-pair
	@VLLM_CPU_KVCACHE_SPACE=$${VLLM_CPU_KVCACHE_SPACE:-1} HF_HUB_OFFLINE=1 .venv/bin/vllm-dflash bench \
		.demo/target .demo/drafter --out .demo/bench --groups ngram,dflash2 --workloads code,chat,prose \
		--output-tokens 64 --concurrency 1,4 --temperature 0 --count 4 --repeats 1 --break-even \
		$(BENCH_ARGS) -- --enforce-eager --max-model-len 2048

bench-metrics: demo-pair
	@$(RUN) -m vllm_dflash.bench.metrics --target .demo/target --drafter .demo/drafter

sanitize: setup
	@$(RUN) -m pytest -q tests/sanitizers

fuzz: setup
	@DFLASH_FUZZ_EXAMPLES=$${DFLASH_FUZZ_EXAMPLES:-5000} $(RUN) -m pytest -q tests/checkpoint/test_hostile.py

# Three engines, interleaved; what is measured is kept, so that it can be interrupted and repeated.
bench-block-length: demo-pair
	@$(RUN) -m tests.speed $(BENCH_ARGS)

bench-ops: setup
	@$(RUN) -m vllm_dflash.bench.ops

gpu-check: setup
	@$(RUN) -m tests.gpu.check

soak: setup
	@$(RUN) -m tests.soak $(SOAK_ARGS)
	@$(RUN) -m tests.soak --runner v2 --steps 1500 $(SOAK_ARGS)

dashboard-picture: demo-pair
	@$(RUN) -m tests.deploy.picture docs/dashboard.png
