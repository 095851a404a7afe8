# Every target makes the environment it needs first (.ci/setup.py), says what it downloads, and is quick the next time.
#
#   PYTHON=python3.12        the interpreter to make the environment with; without it, the first recent one on the PATH.
#                            If it can import torch 2.10 or later already, that torch is used and not downloaded.
#   TORCH=torch==2.13.0      the torch to install into the environment, instead of the pin in constraints.txt.
#
# On Linux x86-64 the default package index has torch with CUDA, about 3 GB with its libraries. A machine without an NVIDIA
# driver gets PyTorch's build for CPUs instead, about 200 MB, where PyTorch's own index of those answers within 5 s.
# A choice of yours goes first: TORCH=torch==2.13.0 asks for the default build, on a machine that is to get a driver, say;
# and where pip is told where packages come from (PIP_INDEX_URL, PIP_EXTRA_INDEX_URL, PIP_FIND_LINKS, PIP_NO_INDEX or the
# same in a pip.conf), torch comes from there as everything else does, and PyTorch's index is not asked.

VENV ?= .venv
PYTHON ?=
TORCH ?=
CANDIDATES := $(or $(PYTHON),python3 python3.13 python3.12 python3.11)
BIN := $(VENV)/bin
# -P: the folders of this checkout (cache, engine, ...) are no modules by themselves.
RUN := $(BIN)/python -P -m
# Test processes side by side, and one thread for torch in each: two that share cores wait for each other. Bytecode is kept,
# whatever the environment says: they start hundreds of processes, which would compile the same files again.
JOBS ?= 2
PARALLEL := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(RUN)
TIERS := JOBS=$(JOBS) $(BIN)/python .ci/tiers.py

# $(call setup,EXTRA ...): the environment, with these optional dependencies of pyproject.toml.
define setup
@for python in $(CANDIDATES); do \
	if "$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
		PYTHON="$(PYTHON)" TORCH="$(TORCH)" PYTHONSAFEPATH= \
			exec "$$python" .ci/setup.py --venv "$(VENV)" $(addprefix --extra=,$(1)); \
	fi; \
done; \
echo "pagetide needs Python 3.11 or later, and found none as: $(CANDIDATES)." \
	"Install it, or name it with PYTHON=/path/to/python." >&2; exit 1
endef

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' Makefile

demo:  ## watch an engine serve many prompts out of a pool too small for all of them, then two engines share a device
	$(call setup,constrained server)
	$(BIN)/pagetide demo --device cpu
	$(BIN)/pagetide demo --shared

fleet:  ## start four workers of the bundled model on the CPU behind one queue, and an HTTP front end
	$(call setup,constrained ray)
	$(BIN)/pagetide fleet start --config configs/fleet-demo.yaml

test:  ## the quick tests, without a GPU: 3 to 8 minutes on 2 cores
	$(call setup,test)
	$(TIERS) quick

test-all:  ## the quick tests and tests/deep, then kernels and engines with AVX2 alone and without native kernels
	$(call setup,test-all)
	$(TIERS) all

test-pythons:  ## what needs no torch, with each further Python from 3.11 to 3.13 that is installed
	$(call setup,test)
	JOBS=$(JOBS) $(BIN)/python .ci/pythons.py

STRESS_ALONE := tests/stress/test_elastic_stress.py tests/stress/test_memory_stress.py tests/stress/test_fleet_stress.py

stress:  ## the long randomised tests
	$(call setup,test-all)
	$(PARALLEL) pytest -q -n $(JOBS) -m stress $(addprefix --ignore=,$(STRESS_ALONE))
	$(RUN) pytest -q -m stress $(STRESS_ALONE)

SOAK_S ?= 3600

soak:  ## native kernels with sanitisers, properties, random load and walks, recalls, kills, faults for SOAK_S seconds, requests to a server
	$(call setup,test-all)
	$(BIN)/python -P tests/sanitized_kernels.py
	$(PARALLEL) pytest -q -n $(JOBS) --tier=deep --hypothesis-profile=soak -m hypothesis
	PYTHONPATH=tests $(BIN)/python -m soak --seconds $(SOAK_S)
	PYTHONPATH=tests $(BIN)/python -m models_in_turn --seconds 600
	PYTHONPATH=tests $(BIN)/python -m fleet_kills --requests 300 --kills 30
	PAGETIDE_STRESS_SECONDS=600 $(RUN) pytest -q -m stress tests/stress/test_elastic_stress.py

# The first interpreter that has all of it runs `make gpu` as it is: a GPU machine may have no index to install from.
# Otherwise the environment is made. What asks for a compiler goes side by side; what counts the device's memory does not.
GPU_NEEDS := cuda.bindings.driver, hypothesis, jinja2, msgspec, prometheus_client, psutil, pynvml, pytest, rich, tqdm, transformers, triton, yaml
GPU_PYTHON = $(shell for python in $(CANDIDATES); do \
	"$$python" -P -c 'import torch, $(GPU_NEEDS)' 2>/dev/null && { echo "$$python"; break; }; done)
GPU_JOBS ?= 8
GPU_BUDGET_S ?= 310
GPU_RESULTS ?= build/bench
GPU_ALONE := tests/gpu/test_arena_weights.py tests/gpu/test_cuda_arena.py tests/gpu/test_nvml.py
GPU_TESTS = $(filter-out $(GPU_ALONE),$(shell grep -rlE --include='test_*.py' '^[^#]*mark\.gpu' tests))

gpu:  ## the tests, and the figures, that need a CUDA device
	@python="$(GPU_PYTHON)"; \
	if [ -z "$$python" ]; then $(MAKE) --no-print-directory gpu-environment || exit 1; python="$(BIN)/python"; fi; \
	export PYTHONPATH="$(CURDIR)/src:$(CURDIR)$${PYTHONPATH:+:$$PYTHONPATH}" PYTHONUNBUFFERED=1; \
	"$$python" -P -c "import sys, torch; torch.cuda.is_available() or sys.exit( \
		f'make gpu needs a CUDA device; torch {torch.__version__} sees none on this machine')" || exit 1; \
	jobs=; "$$python" -P -c 'import xdist' 2>/dev/null && jobs="-n $(GPU_JOBS)"; \
	run() { timeout -s INT -k 20 "$$1" "$$python" -P -m pytest -q -m gpu --durations=5 $$2 || status=1; }; \
	status=0; \
	run 170 "$$jobs $(GPU_TESTS)"; \
	run 60 "$(GPU_ALONE)"; \
	"$$python" -P -m benchmarks.gpu --budget-s $(GPU_BUDGET_S) --results "$(GPU_RESULTS)" || status=1; \
	exit $$status

gpu-environment:
	$(call setup,test-all cuda)

# Warnings fail, such as those of a link to a page, an anchor or a file of the repository that is not there.
SITE := $(RUN) sphinx -q -W --keep-going -d build/doctrees -c docs . build/docs

docs:  ## the documentation as a site, into build/docs
	$(call setup,docs)
	$(SITE)
	@echo "the documentation is in build/docs/index.html"

check:  ## lint, format, types, what is said to be possible, and the documentation
	$(call setup,dev docs)
	$(RUN) ruff check .
	$(RUN) ruff format --check .
	$(RUN) mypy
	$(BIN)/python -P .ci/capabilities.py
	$(SITE)

bench:  ## measure; the figures go to build/bench
	$(call setup,server)
	@mkdir -p build/bench
	$(BIN)/python -m benchmarks.bookkeeping --json build/bench/bookkeeping.json
	$(BIN)/python -m benchmarks.monitor --json build/bench/monitor.json
	$(BIN)/python -m benchmarks.elastic --json build/bench/elastic.json
	$(BIN)/python -m benchmarks.goodput --json build/bench/goodput.json
	$(BIN)/python -m benchmarks.memory --json build/bench/memory.json
	$(BIN)/python -m benchmarks.prefix --json build/bench/prefix.json
	$(BIN)/python -m benchmarks.prefix_hits --json build/bench/prefix_hits.json
	$(BIN)/python -m benchmarks.pressure --json build/bench/pressure.json
	$(BIN)/python -m benchmarks.engine_cpu --json build/bench/engine_cpu.json
	$(BIN)/python -m benchmarks.quantization --json build/bench/quantization.json
	$(BIN)/python -m benchmarks.kv_cache_dtype --json build/bench/kv_cache_dtype.json
	$(BIN)/python -m benchmarks.kept_prefixes --json build/bench/kept_prefixes.json
	$(BIN)/python -m benchmarks.loading --json build/bench/loading.json
	$(BIN)/python -m benchmarks.waking --json build/bench/waking.json
	$(BIN)/python -m benchmarks.serve --json build/bench/serve.json
	$(BIN)/python -m benchmarks.windows --json build/bench/windows.json
	$(BIN)/python -m benchmarks.states --json build/bench/states.json
	$(BIN)/python -m benchmarks.state_pool --json build/bench/state_pool.json
	$(BIN)/python -m benchmarks.fleet --json build/bench/fleet.json

RELEASE ?=

dist:  ## wheel and sdist into dist/, each installed and tried; RELEASE=1 fails on what keeps it from being a release
	$(call setup,dist)
	$(BIN)/python .ci/distribution.py $(if $(RELEASE),--release)

clean:  ## remove everything that make made, the environment too
	rm -rf build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
	rm -rf "$(VENV)"

.DEFAULT_GOAL := help
.PHONY: demo fleet test test-all test-pythons stress soak gpu gpu-environment docs check bench dist clean help
