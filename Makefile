# jaxmpi: everything a user or developer runs. `make help` lists it.
# Needs Python >= 3.10 with its headers and venv, a C compiler, make, and standard Linux tools (sh, awk, timeout).
# Everything else is installed by pip into a virtual environment.

PYTHON ?= python3
MPI ?= openmpi
VENV ?= $(if $(filter openmpi,$(MPI)),.venv,.venv-$(MPI))
OUTPUT ?= output
LIMIT ?= 1800
# Tests that start jobs mostly wait: more at once than there are cores.
WORKERS ?= $(shell echo $$(($$(nproc) + 1)))

BIN := $(VENV)/bin
READY := $(VENV)/.ready
RUN := timeout $(LIMIT) $(BIN)/python -m jaxmpi.run
C_SOURCES := $(wildcard csrc/*/* csrc/mpi/abi/*)
SOURCES := $(C_SOURCES) $(wildcard python/jaxmpi/*.py* python/jaxmpi/*/*.py) meson.build pyproject.toml README.md

# Tests start hundreds of Python processes: without stored bytecode each of them compiles all of JAX.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-all test-ranks test-faults test-asan test-tcp test-hosts test-clients test-sharded test-layouts starts fuzz soak faults errors test-device test-gpu test-c test-valgrind test-races bench bench-gpu bench-quick compat wheel wheel-test docs lint format clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-14s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))
	@echo
	@echo "MPI=openmpi (default) or MPI=mpich chooses the MPI; each has its own environment (.venv, .venv-mpich)."
	@echo "PYTHON=python3.12 chooses the Python of a new environment."

setup: $(READY) ## make the environment, with the package and an MPI in it
	@$(BIN)/python -m jaxmpi.info

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo "jaxmpi needs Python 3.10 or newer, $(PYTHON) is $$($(PYTHON) --version): make PYTHON=python3.12 ..."; exit 1; }
	@test -f "$$($(PYTHON) -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h" || \
	  { echo "The headers of Python are missing; on Debian and Ubuntu: apt install python3-dev"; exit 1; }
	@# A new pip by that of Python is there sooner than the one that venv unpacks.
	@$(PYTHON) -m venv --without-pip $(VENV) 2>/dev/null && \
	  $(PYTHON) -m pip --python $(VENV)/bin/python install --quiet --disable-pip-version-check --no-compile pip 2>/dev/null || \
	  $(PYTHON) -m venv $(VENV) || \
	  { rm -rf $(VENV); echo "Python's venv is missing; on Debian and Ubuntu: apt install python3-venv"; exit 1; }

# An editable install: changes of Python take effect at once, changes of C are compiled by the next command.
DEVELOP := .build/develop$(VENV:.venv%=%)
# Bytecode is left to the imports: most of what is installed is never imported.
PIP = PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile
EDITABLE = $(PIP) --no-build-isolation --config-settings=build-dir=$(DEVELOP) --editable
$(VENV)/.installed: $(BIN)/python meson.build pyproject.toml
	$(PIP) "meson-python>=0.17" "meson>=1.3" ninja
	$(EDITABLE) ".[$(MPI)]" $(DEMO)
	@touch $@

# What the demo imports besides; the rest of the extras comes with the tests.
DEMO := matplotlib pillow tqdm
$(VENV)/.built: $(VENV)/.installed $(C_SOURCES)
	@$(BIN)/ninja --quiet -C $(DEVELOP)
	@touch $@

# The extras of what is installed, without building it again.
$(VENV)/.test: $(VENV)/.installed
	$(PIP) "jaxmpi[examples,test]"
	@touch $@

$(READY): $(VENV)/.built $(VENV)/.test
	@touch $@

demo: $(VENV)/.built ## the shallow-water model on 2 ranks, with a picture and an animation
	$(RUN) -n 2 examples/shallow_water.py --save-animation --output-dir $(OUTPUT)

# CASES=--brief: of tests that start jobs or are slow two cases at most, and nothing that is left to the night.
CASES ?=
# How jobs end, several hosts, long programs, timelines, benchmarks, the wheel: `make test-all` has them.
NOT_EACH_TIME := $(patsubst %,--ignore-glob=tests/*/test_%.py,faults launcher injected sharded_jobs two_hosts run_devices device grid_examples grid_jobs sharded_examples benchmarks soak timeline wheel)
test: $(READY) $(VENV)/.lint ## what every change needs: the suite on 2 ranks, most tests that run on one rank alone, the C tests
	timeout $(LIMIT) $(BIN)/python -m pytest -n $(WORKERS) --brief $(NOT_EACH_TIME) -m "launches or one_rank"
	$(RUN) -n 2 -m pytest --color=no --brief
	$(MAKE) test-c

test-all: $(READY) $(VENV)/.lint ## all tests: 1, 2 and 4 ranks, optimized code dispatched synchronously, a simulated device, the C tests
	timeout $(LIMIT) $(BIN)/python -m pytest -n $(WORKERS) $(CASES)
	$(RUN) -n 2 -m pytest --color=no $(CASES)
	$(RUN) -n 4 -m pytest --color=no $(CASES)
	JAXMPI_TEST_SYNCHRONOUS=1 JAXMPI_TEST_OPTIMIZED=1 $(RUN) -n 2 -m pytest --color=no $(CASES) \
	  tests/primitive/test_order.py tests/primitive/test_jit.py
	$(MAKE) test-clients
	$(MAKE) test-sharded
	$(MAKE) test-device
	$(MAKE) test-c

$(VENV)/.clients: $(VENV)/.installed
	$(PIP) "jaxmpi[clients]"
	@touch $@

test-clients: $(READY) $(VENV)/.clients ## programs of optax, diffrax, equinox, lineax and JAX's solvers that communicate, on 2 ranks
	JAXMPI_TEST_CLIENTS=1 $(RUN) -n 2 -m pytest --color=no tests/derivatives/test_clients.py

SHARDED := $(RUN) --collectives
PROCESSES ?= 1 2 3 4
test-sharded: $(READY) ## JAX's own sharded programs over MPI, on 1 to 4 ranks, and on 2 over gloo
	for n in $(PROCESSES); do \
	  $(SHARDED) mpi -n $$n -m pytest --color=no $(CASES) tests/sharded/test_sharded.py tests/sharded/test_sharded_layouts.py || exit; done
	$(SHARDED) gloo -n 2 -m pytest --color=no $(CASES) tests/sharded/test_sharded.py

# LAYOUTS: numbers of ranks. On 4 it takes ten minutes, on more of them longer.
LAYOUTS ?= 4
test-layouts: $(READY) ## JAX's changes of layout over MPI, on all meshes of 1 to 3 axes, on LAYOUTS ranks (4)
	for n in $(LAYOUTS); do \
	  JAXMPI_TEST_LAYOUTS=all $(SHARDED) mpi -n $$n -m pytest --color=no tests/sharded/test_sharded_layouts.py || exit; done

# JOBS of RANKS ranks, two at once.
JOBS ?= 1000
starts: $(READY) ## starts a small job of sharded arrays 1,000 times
	$(BIN)/python tests/programs/starts.py --jobs $(JOBS) --ranks $(RANKS) --beside 2

RANKS ?= 2
TESTS ?=
test-ranks: $(READY) ## the suite on RANKS ranks alone (default 2); TESTS="errors jit" chooses files of it
	$(RUN) -n $(RANKS) -m pytest --color=no $(CASES) $(wildcard $(patsubst %,tests/*/test_%.py,$(TESTS)))

test-faults: $(READY) ## how jobs end: the tests of faults, with their times
	timeout $(LIMIT) $(BIN)/python -m pytest -n $(WORKERS) $(CASES) --color=no --durations=0 --durations-min=1 tests/launcher/test_faults.py tests/launcher/test_launcher.py tests/mpi/test_injected.py

# The core itself under AddressSanitizer and UBSan, in the place of the usual one; Python and XLA are not.
ASAN := -Db_sanitize=address,undefined -Db_lundef=false
USUAL := -Db_sanitize=none -Db_lundef=true
PRELOADED = $(foreach name,libasan.so libstdc++.so,$(shell $${CC:-cc} -print-file-name=$(name)))
test-asan: $(READY) ## the suite on 2 ranks with the core under AddressSanitizer and UBSan
	trap '$(MESON) configure $(USUAL) $(DEVELOP) && $(BIN)/ninja --quiet -C $(DEVELOP)' EXIT; \
	$(MESON) configure $(ASAN) $(DEVELOP) && $(BIN)/ninja --quiet -C $(DEVELOP) && \
	ASAN_OPTIONS=detect_leaks=0:detect_odr_violation=0 LD_PRELOAD="$(PRELOADED)" \
	  $(RUN) -n 2 -m pytest --color=no

# Over TCP alone: variables by which the MPI libraries leave out shared memory.
BY_TCP_openmpi := OMPI_MCA_pml=ob1 OMPI_MCA_btl=self,tcp
BY_TCP_mpich := MPIR_CVAR_NOLOCAL=1 MPIR_CVAR_CH4_NETMOD=ucx UCX_TLS=self,tcp
TCP_TESTS := $(wildcard $(patsubst %,tests/*/test_%.py,tcp operations errors order jit adjoint))
test-tcp: $(READY) ## the suite on 2 ranks, and much of it on 4, which communicate by TCP and not by shared memory
	JAXMPI_TEST_TCP=1 $(BY_TCP_$(MPI)) $(RUN) -n 2 -m pytest --color=no
	JAXMPI_TEST_TCP=1 $(BY_TCP_$(MPI)) $(RUN) -n 4 -m pytest --color=no $(TCP_TESTS)

test-hosts: $(READY) ## a job on two hosts, which are network namespaces of this machine; needs root
	timeout $(LIMIT) $(BIN)/python -m pytest --color=no tests/launcher/test_two_hosts.py

# N random programs, with second derivatives if ORDER=2; FORGOTTEN=0.4: in many of them ranks never wait for something;
# `python tests/programs/fuzz.py --help` lists more options.
N ?= 100
SEED ?= 0
ORDER ?= 1
FORGOTTEN ?= 0
fuzz: $(READY) ## N random programs on RANKS ranks against a witness (default 100 and 2)
	$(BIN)/python tests/programs/fuzz.py --programs $(N) --ranks $(RANKS) --seed $(SEED) --order $(ORDER) --forgotten $(FORGOTTEN)

faults: $(READY) ## N random programs in each of which a call of MPI fails, is late or never returns (default 100)
	JAXMPI_TEST_FAULTS=$(N) timeout $(LIMIT) $(BIN)/python -m pytest -n auto --color=no tests/mpi/test_injected.py -k test_random

# OPERATIONS on each of 4 ranks, by two threads; `python tests/programs/soak.py --help` lists more options.
OPERATIONS ?= 250000
soak: $(READY) ## a million mixed operations on 4 ranks, each result checked, memory and files watched; ten minutes
	$(RUN) -n 4 tests/programs/soak.py --operations $(OPERATIONS) --seed $(SEED)

# The C tests run under AddressSanitizer and UBSan if the compiler has them.
SANITIZE = $(shell echo 'int main(void){return 0;}' | $${CC:-cc} -fsanitize=address,undefined -x c - -o /dev/null 2>/dev/null \
  && echo -Db_sanitize=address,undefined -Db_lundef=false)
HEADERS = JAXMPI_MPI_INCLUDE=$(abspath $(VENV))/include \
  JAXMPI_FFI_INCLUDE=$$($(BIN)/python -c 'import jax; print(jax.ffi.include_dir())') \
  JAXMPI_CUDA_INCLUDE=$(abspath $(firstword $(wildcard $(VENV)/lib/python*/site-packages/nvidia/cuda_runtime/include)))
MESON = PATH="$(abspath $(BIN)):$$PATH" meson
BUILD := .build/$(MPI)

$(BUILD)/.ready: $(READY)
	@rm -rf $(BUILD)
	$(MESON) setup $(BUILD) -Dwerror=true $(SANITIZE)
	@touch $@

# Many of them wait, rather than compute.
test-c: $(BUILD)/.ready ## the C tests, against a fake MPI library and the real headers
	$(HEADERS) $(MESON) test -C $(BUILD) --num-processes $$((2 * $$(nproc))) --print-errorlogs --suite c

# All suites on the two device transports that differ most, fewer on the other two; with CASES=--brief all suites on one
# transport and 2 ranks alone.
ON_DEVICE = $(wildcard $(patsubst %,tests/*/test_%.py,$(1)))
DEVICE_TESTS := $(call ON_DEVICE,device operations errors dtypes order jit transformations large grid neighbors bench counts ends leaves)
SHORT_DEVICE_TESTS := $(call ON_DEVICE,device operations errors dtypes order)
FAKES = JAXMPI_FAKE_DRIVERS=$(abspath $(BUILD))/tests/device
test-device: $(BUILD)/.ready ## the suites on a simulated device, copied for MPI and by an aware MPI, on 1, 2 and 4 ranks
	$(MESON) compile -C $(BUILD) device
	$(FAKES) $(BIN)/python -m pytest $(CASES) tests/launcher/test_run_devices.py
	for transport in $(if $(CASES),callback,callback aware); do \
	  $(FAKES) JAXMPI_TEST_DEVICE=$$transport timeout $(LIMIT) $(BIN)/python -m pytest -n auto --color=no $(CASES) $(SHORT_DEVICE_TESTS) || exit; \
	done
	$(FAKES) JAXMPI_TEST_DEVICE=callback $(RUN) -n 2 -m pytest --color=no $(CASES) $(DEVICE_TESTS)
	$(FAKES) JAXMPI_TEST_DEVICE=aware $(RUN) -n 2 -m pytest --color=no $(CASES) $(if $(CASES),$(SHORT_DEVICE_TESTS),$(DEVICE_TESTS))
	$(FAKES) JAXMPI_TEST_DEVICE=callback $(RUN) -n 4 -m pytest --color=no $(CASES) $(call ON_DEVICE,device order $(if $(CASES),,operations))
	for transport in thread wait; do \
	  $(FAKES) JAXMPI_TEST_DEVICE=$$transport $(RUN) -n 2 -m pytest --color=no $(CASES) $(call ON_DEVICE,device operations) || exit; \
	done

# On a real device, which the ranks share; operations that need the CPU stay on it.
GPU ?= cuda
test-gpu: $(READY) ## the suites on this machine's GPU, on 1, 2 and 4 ranks (GPU=rocm: with JAX's plugin for it in .venv)
	$(if $(filter cuda,$(GPU)),$(BIN)/python -m pip install --quiet --disable-pip-version-check "jax[cuda12]")
	for n in 1 2 4; do \
	  JAX_PLATFORMS=$(GPU),cpu $(RUN) -n $$n -m pytest --color=no $(DEVICE_TESTS) tests/derivatives/test_adjoint.py tests/mpi/test_gpu.py || exit; done

$(BUILD)-valgrind/.ready $(BUILD)-races/.ready: $(READY)
	@rm -rf $(@D)
	$(MESON) setup $(@D) -Dwerror=true $(if $(findstring races,$@),-Db_sanitize=thread -Db_lundef=false)
	@touch $@

test-valgrind: $(BUILD)-valgrind/.ready ## the C tests under valgrind
	$(MESON) test -C $(BUILD)-valgrind --print-errorlogs --suite c --timeout-multiplier 10 \
	  --wrap 'valgrind --quiet --error-exitcode=9 --leak-check=full'

errors: $(READY) ## the times in docs/errors.md, with this MPI beside those measured before with another
	@mkdir -p .build && rm -f .build/faults-$(MPI).jsonl
	JAXMPI_FAULT_TIMES=$(abspath .build/faults-$(MPI).jsonl) $(BIN)/python -m pytest --color=no tests/launcher/test_faults.py tests/launcher/test_launcher.py \
	  -k "test_fault_of_one_rank or test_launcher_is_killed or test_mpiexec_ended"
	$(BIN)/python tests/programs/errors_page.py $$(ls .build/faults-*.jsonl)

test-races: $(BUILD)-races/.ready ## the C tests with ThreadSanitizer
	$(MESON) test -C $(BUILD)-races --print-errorlogs --suite c --timeout-multiplier 10

# The benchmarks compare with mpi4jax in an environment with both, and a JAX with which both work. mpi4jax is built from
# source with the same MPI; its source also has the shallow-water model that ours is compared with. If it cannot be
# built its columns stay empty.
BENCH_JAX := jax==0.10.2
BENCH_PEER := mpi4jax==0.9.1.post2
BENCH := .venv-bench$(if $(filter openmpi,$(MPI)),,-$(MPI))
BENCH_PIP = PATH="$(abspath $(BENCH)/bin):$$PATH" MPICC=$(abspath $(BENCH)/bin/mpicc) \
  $(BENCH)/bin/python -m pip --quiet --disable-pip-version-check
BENCH_RUN := timeout $(LIMIT) $(BENCH)/bin/python -m jaxmpi.run -n 2
RESULTS := $(OUTPUT)/bench$(if $(filter openmpi,$(MPI)),,-$(MPI))
# JAX's own collectives use additional threads and are several times slower if each rank is bound to one core.
UNBOUND := PJRT_NPROC=$(shell nproc) OMP_NUM_THREADS=$(shell nproc) XLA_FLAGS=--xla_cpu_multi_thread_eigen=true
BENCH_RUN_UNBOUND := $(UNBOUND) $(BENCH_RUN) --mpiexec-args='--bind-to none'

$(BENCH)/.peer:
	@$(MAKE) --no-print-directory VENV=$(BENCH) $(BENCH)/bin/python
	$(BENCH_PIP) install "$(BENCH_JAX)" $(MPI) mpi4py
	$(BENCH_PIP) download --no-deps --no-binary mpi4jax --dest $(BENCH) "$(BENCH_PEER)" && \
	  tar -xzf $(BENCH)/mpi4jax-*.tar.gz -C $(BENCH) && \
	  $(BENCH_PIP) install --no-cache-dir $(BENCH)/mpi4jax-*.tar.gz || \
	  echo "mpi4jax could not be built: the benchmarks will do without it"
	@touch $@

$(BENCH)/.installed: $(BENCH)/.peer $(SOURCES)
	$(BENCH_PIP) install "$(BENCH_JAX)" ".[$(MPI),examples]"
	@touch $@

$(BENCH)/libshallow_water.so: benchmarks/shallow_water.c $(BENCH)/.peer
	$(BENCH)/bin/mpicc -O3 -march=native -shared -fPIC $< -o $@ -lm

# Our model, mpi4jax's example if it could be built, and C.
SEA = benchmarks/shallow_water.py $(addprefix --peer ,$(wildcard $(BENCH)/mpi4jax-*/examples/shallow_water.py))

bench: $(BENCH)/.installed $(BENCH)/libshallow_water.so ## beside C, mpi4py, mpi4jax and gloo: tables, plots; 15 minutes
	$(BENCH_RUN) benchmarks/calls.py --output $(RESULTS)/calls.json
	$(BENCH_RUN_UNBOUND) benchmarks/calls.py --gloo --output $(RESULTS)/gloo.json
	@for n in 1 2 4; do timeout $(LIMIT) $(BENCH)/bin/python -m jaxmpi.run -n $$n $(SEA) --c $(BENCH)/libshallow_water.so \
	  --days 1 --output $(RESULTS)/sea-$$n.json || exit; done
	timeout $(LIMIT) $(BENCH)/bin/python benchmarks/startup.py --output $(RESULTS)/startup.json
	$(BENCH)/bin/python benchmarks/sharded.py | tee $(RESULTS)/sharded.txt
	@for n in 2 4; do timeout $(LIMIT) $(BENCH)/bin/python -m jaxmpi.run -n $$n benchmarks/halos.py | tee $(RESULTS)/halos-$$n.txt; done
	$(BENCH)/bin/python benchmarks/report.py $(RESULTS)/*.json --plots $(RESULTS) --markdown | tee $(RESULTS)/tables.md

# mpi4jax takes part if its build finds a CUDA toolkit.
bench-gpu: $(BENCH)/.installed ## allreduce and sendrecv of arrays on this machine's GPU beside mpi4jax, 4 B to 256 MiB
	$(BENCH_PIP) install "jax[cuda12]==$(lastword $(subst ==, ,$(BENCH_JAX)))"
	JAX_PLATFORMS=cuda,cpu $(BENCH_RUN) benchmarks/calls.py --operations allreduce exchange \
	  --bytes 4 4096 65536 1048576 16777216 67108864 268435456 --output $(RESULTS)/gpu.json

bench-quick: $(BENCH)/.installed $(BENCH)/libshallow_water.so ## the figures that the project is held to, in a minute
	@$(BENCH_RUN) benchmarks/quick.py
	@$(BENCH_RUN_UNBOUND) benchmarks/quick.py --gloo
	@$(BENCH_RUN) benchmarks/overlap.py --name shared_memory
	@$(BY_TCP_openmpi) $(BENCH_RUN) benchmarks/overlap.py --name tcp
	@$(BENCH)/bin/python benchmarks/sharded.py --rounds 3
	@for n in 2 4; do timeout $(LIMIT) $(BENCH)/bin/python -m jaxmpi.run -n $$n benchmarks/halos.py || exit; done
	@TF_CPP_MIN_LOG_LEVEL=3 $(BENCH_RUN) $(SEA) --c $(BENCH)/libshallow_water.so --days 0.5 --quick

compat: ## one built file on every MPI and several versions of JAX and Python
	$(PYTHON) tests/programs/compat.py

# URL: of the repository on a forge. Without it the description of the files has no links.
URL ?=
wheel: ## the files of a release, in dist/: an sdist, and one wheel for every MPI, JAX and Python, checked
	$(PYTHON) tests/programs/wheels.py build --url "$(URL)"

wheel-test: ## what a user of that wheel gets, with each MPI, where nothing is compiled: a table
	$(PYTHON) tests/programs/wheels.py test

$(VENV)/.lint: $(VENV)/.installed
	$(PIP) "jaxmpi[lint]"
	@touch $@

C_FILES = $(wildcard csrc/*/*.[ch] csrc/mpi/abi/*.h tests/c/*.[ch] tests/device/*.[ch] tests/inject/*.c benchmarks/*.c)
lint: $(READY) $(VENV)/.lint ## formatters in checking mode, linters and type checker
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run --Werror $(C_FILES)
	$(BIN)/zizmor --offline --quiet --no-progress .github
	$(BIN)/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
	@if command -v cppcheck >/dev/null; then cppcheck --quiet --error-exitcode=1 --std=c11 --enable=warning,portability \
	  --inline-suppr --suppress=missingIncludeSystem -DABI_HEADER='"mpi/abi/openmpi.h"' -Icsrc $(filter-out csrc/python/%,$(wildcard csrc/*/*.c)); fi

$(VENV)/.docs: $(VENV)/.installed
	$(PIP) "jaxmpi[docs]"
	@touch $@

SITE := $(OUTPUT)/docs
docs: $(READY) $(VENV)/.docs ## the documentation as a site, in output/docs; its programs are tested by `make test`
	timeout $(LIMIT) $(BIN)/python -m sphinx --quiet --fail-on-warning --keep-going --fresh-env --builder html docs $(SITE)
	@echo "$(abspath $(SITE))/index.html"

format: $(VENV)/.lint ## let the formatters change the files
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(C_FILES)

clean: ## remove what these commands have made, the environments too
	rm -rf .venv .venv-* .build $(OUTPUT)
