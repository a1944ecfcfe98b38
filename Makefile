# Two commands for a new user: `make demo` and `make test`. Both make .venv and install everything first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# pip leaves compiling to Python, which compiles what is imported, a tenth, and keeps it, whatever this shell says.
EXTRAS ?= dev,plots
INSTALL = $(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo test test-long test-docs test-with-docs test-exhaustive test-slow-machine test-versions test-versions-exhaustive nightly
.PHONY: test-backend-suite gpu-test-backend-suite
.PHONY: gpu-test gpu-test-exhaustive
.PHONY: bench gpu-sanitize lint format docs docs-figures clean help
.DEFAULT_GOAL := help

help:
	@echo "make demo      train a small GPT on a grid of 4 processes (or your GPUs) and show what was sent; SHORT=1 for 8 steps"
	@echo "make test      tests of everything that needs no GPU"
	@echo "make test-long the end-to-end runs that make test leaves to CI"
	@echo "make test-docs the code blocks of README and docs"
	@echo "make test-with-docs  test, test-long and test-docs in one session, as CI runs them"
	@echo "make test-exhaustive  the cases that all of these leave out"
	@echo "make test-slow-machine  make test in a clone with empty caches, on one core beside a busy loop (TESTS=FOLDER: a part)"
	@echo "make test-versions  the oldest and the newest Python, torch and Triton that are tried"
	@echo "make test-backend-suite  torch's own tests of backends, with the backend stretto; on CPUs"
	@echo "make nightly   all of these, and make lint"
	@echo "make docs      the documentation as a site, in build/site; a broken link, anchor or picture is an error"
	@echo "make bench NAME=schedules  a bench of the lab (none: their list); ARGS='--seeds 5' are its options"
	@echo "make lint      formatting, linter, types, import layers"
	@echo "make gpu-sanitize  small calls of every protocol under compute-sanitizer (needs two GPUs)"
	@echo "make gpu-test  tests/gpu, with the Python on PATH (needs a GPU; on a single one, ranks share it)"
	@echo "make gpu-test-backend-suite  torch's own tests of backends, with the backend stretto; on two GPUs"
	@echo "make gpu-test-exhaustive  the cases that make gpu-test leaves out; SHARD=1/4 is a quarter of them"

demo: $(VENV)/.installed
	$(BIN)/stretto demo $(if $(SHORT),--steps 8)

# A process that has run all its tests takes over some of the others'; there is one more than 2 cores take, since some
# tests wait.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses 3 --dist worksteal
CODE_TESTS := tests --ignore=tests/gpu --ignore=tests/versions --ignore=tests/test_site.py --ignore=tests/test_pages.py

test: $(VENV)/.installed
	$(PYTEST) $(CODE_TESTS) --durations 20 -m "not exhaustive and not long"

test-long: $(VENV)/.installed
	$(PYTEST) $(CODE_TESTS) --durations 20 -m "long and not exhaustive"

test-docs: $(VENV)/.installed
	$(PYTEST) tests/test_pages.py

# test, test-long and test-docs in one session, which imports, collects and starts its servers once.
test-with-docs: $(VENV)/.installed
	$(PYTEST) $(filter-out --ignore=tests/test_pages.py,$(CODE_TESTS)) --durations 20

# What is committed, in a clone with empty caches, on one core beside a busy loop: no limit may depend on the machine.
test-slow-machine: $(VENV)/.installed
	$(BIN)/python tests/slow_machine.py --venv $(VENV) $(if $(TESTS),--tests $(TESTS))

test-exhaustive: $(VENV)/.installed
	$(PYTEST) $(CODE_TESTS) --durations 20 -m exhaustive

nightly: test-with-docs lint docs test-versions-exhaustive test-exhaustive test-backend-suite

test-backend-suite: $(VENV)/.installed
	$(BIN)/python tests/backend_suite/run.py

# Each set of versions has a virtual environment in this folder, some 5 GB; .venv has the versions of constraints.txt.
VERSIONS_FOLDER ?= build/versions
test-versions:
	$(PYTHON) tests/versions/run.py --folder $(VERSIONS_FOLDER)

test-versions-exhaustive:
	$(PYTHON) tests/versions/run.py --folder $(VERSIONS_FOLDER) --exhaustive

# Several processes, each with ranks on the same GPUs: most of the time goes into compiling kernels, and machines with
# GPUs have many CPUs. Each process takes a shard, whose files' ranks stay together. On one GPU it has an MPS daemon,
# whose ranks are alone on the GPU in their time slice (`python -m tests.gpu.resuming build/gpu-test-*-of-8.xml` stores what
# the shards took, by which the next run's are balanced). Without MPS every rank has time slices of its own, and more
# processes would only make these rarer. With several GPUs each rank of a process has one, and tests that measure the
# GPUs come first, alone.
# `make gpu-test-exhaustive SHARD=1/4` runs a quarter, and a run that was cut off goes on: PASSED names what has passed.
GPU_PYTEST := PYTHONPATH="src$${PYTHONPATH:+:$$PYTHONPATH}" $(PYTHON) -m pytest tests/gpu --durations 15
GPU_WORKERS := --numprocesses 4 --dist loadfile
GPU_SHARDS ?= 8
ONE_GPU_SHARDS := $(if $(shell command -v nvidia-cuda-mps-control),$(GPU_SHARDS),1)
ONE_GPU_SHARDS := $(patsubst %,%-of-$(ONE_GPU_SHARDS),$(shell seq $(ONE_GPU_SHARDS)))
ONE_GPU_SHARDS := $(addprefix gpu-test-shard-,$(ONE_GPU_SHARDS))
SEVERAL_GPUS_SHARDS := $(patsubst %,gpu-test-shard-%-of-8,1 2 3 4 5 6 7 8)
SHARD ?= 1/1
PASSED ?= build/gpu-test-passed.txt
GPU_PART := --shard $(SHARD) --passed $(PASSED)

HAS_GPU := $(PYTHON) -c 'import sys, torch; sys.exit(not torch.cuda.is_available() and "torch finds no GPU here")'
HAS_ONE_GPU := $(PYTHON) -c 'import sys, torch; sys.exit(torch.cuda.device_count() != 1)'

gpu-test:
	@$(HAS_GPU)
	if $(HAS_ONE_GPU); then $(MAKE) --jobs --keep-going --output-sync $(ONE_GPU_SHARDS); else \
		$(GPU_PYTEST) -m "alone and not exhaustive"; alone=$$?; \
		$(MAKE) --jobs --keep-going --output-sync GPU_MARKS="not alone and not exhaustive" $(SEVERAL_GPUS_SHARDS) \
		&& exit $$alone; fi

GPU_MARKS := not exhaustive
.PHONY: $(ONE_GPU_SHARDS) $(SEVERAL_GPUS_SHARDS)
$(ONE_GPU_SHARDS) $(SEVERAL_GPUS_SHARDS): gpu-test-shard-%:
	$(GPU_PYTEST) -m "$(GPU_MARKS)" --shard $(subst -of-,/,$*) --junit-xml build/gpu-test-$*.xml

# pytest ends with 5 where it was left nothing to do, as in a shard without tests that run alone.
gpu-test-exhaustive:
	@$(HAS_GPU)
	if $(HAS_ONE_GPU); then $(GPU_PYTEST) -m exhaustive $(GPU_PART) || [ $$? -eq 5 ]; else \
		{ $(GPU_PYTEST) -m "alone and exhaustive" $(GPU_PART) || [ $$? -eq 5 ]; } && \
		{ $(GPU_PYTEST) -m "not alone and exhaustive" $(GPU_PART) $(GPU_WORKERS) || [ $$? -eq 5 ]; }; fi

gpu-test-backend-suite:
	@$(HAS_GPU)
	$(PYTHON) tests/backend_suite/run.py --gpus --jobs 10

# NCCL asks the driver for what it may not have, so errors of calls to the driver say nothing of these kernels.
gpu-sanitize:
	PYTHONPATH="src:.$${PYTHONPATH:+:$$PYTHONPATH}" compute-sanitizer --tool memcheck --report-api-errors no --target-processes all --error-exitcode 9 \
		$(PYTHON) tests/gpu/sanitize.py
	PYTHONPATH="src:.$${PYTHONPATH:+:$$PYTHONPATH}" compute-sanitizer --tool racecheck --target-processes all --error-exitcode 9 \
		$(PYTHON) tests/gpu/sanitize.py

lint: $(VENV)/.installed
	$(BIN)/ruff format --no-cache --check .
	$(BIN)/ruff check --no-cache .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(VENV)/.installed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# Rebuilt when the dependencies change. Debian and Ubuntu ship Python without its venv module.
$(VENV)/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "Stretto needs Python 3.11 or newer: make PYTHON=/path/to/python3.11"; exit 1; }
	@$(PYTHON) -m venv --clear $(VENV) || { \
		rm -rf $(VENV); \
		if [ "$$(id -u)" = 0 ] && command -v apt-get > /dev/null; then \
			apt-get update && apt-get install -y python3-venv && $(PYTHON) -m venv --clear $(VENV); \
		else \
			echo "Python's venv module is missing: sudo apt-get install python3-venv"; exit 1; \
		fi; }
	$(INSTALL) --editable '.[$(EXTRAS)]'
	$(BIN)/stretto doctor  # which compiles what is compiled once
	@touch $@

bench: $(VENV)/.installed
	PYTHONPATH="src:.$${PYTHONPATH:+:$$PYTHONPATH}" $(BIN)/python -m lab $(or $(NAME),--help) $(ARGS)

docs: $(VENV)/.docs-installed
	NO_MKDOCS_2_WARNING=1 PATH="$(abspath $(BIN)):$$PATH" $(BIN)/mkdocs build --strict
	$(BIN)/python -m pytest --quiet tests/test_site.py

$(VENV)/.docs-installed: $(VENV)/.installed
	$(if $(findstring docs,$(EXTRAS)),,$(INSTALL) --editable '.[docs]')
	@touch $@

docs-figures: $(VENV)/.installed
	$(BIN)/python docs/figures.py

clean:
	rm -rf $(VENV) build *.egg-info src/*.egg-info
