# make demo, make test: everything from a fresh clone. They make .venv, install the pinned requirements, build and run;
# a second call reuses what is there.
#   make test PYTHON=/path/to/python VENV=    takes that interpreter as it is and installs nothing
#   make build CMAKE_ARGS=-DPOSEMBED_CUDA=OFF passes options to CMake
PYTHON ?= python3
VENV ?= .venv
BUILD ?= build/dev
CMAKE_ARGS ?=
PYTEST_ARGS ?=
CTEST_ARGS ?=
BENCHMARK_ARGS ?=

ifeq ($(VENV),)
  python := $(shell command -v $(PYTHON))
  $(if $(python),,$(error PYTHON=$(PYTHON) is no program))
  requirements :=
else
  python := $(abspath $(VENV))/bin/python
  requirements := $(VENV)/requirements-installed
endif
# CMake, Ninja and the linters of that environment come before the machine's.
export PATH := $(dir $(python)):$(PATH)
# Tests and setup.py use the same build folder, so that nothing is compiled twice.
export POSEMBED_BUILD := $(abspath $(BUILD))
export PYTHONPATH := $(CURDIR)/python$(if $(PYTHONPATH),:$(PYTHONPATH))

.PHONY: all build test test-cpp test-python test-gpu sanitize-gpu check-memory check-races test-cuda-on-cpu run-cuda-on-cpu lint format docs demo benchmark benchmark-gpu benchmark-kernels wheel clean
all: build

# pip is slow even when it has nothing to do: it runs again only when a requirements file has changed.
$(VENV)/requirements-installed: requirements.txt requirements-dev.txt
	test -x $(python) || $(PYTHON) -m venv $(VENV)
	$(python) -m pip install --quiet --disable-pip-version-check -r requirements.txt -r requirements-dev.txt
	touch $@

# The library with its tests, installed into python/posembed, where Python and find_package look for it.
build: $(requirements)
	cmake -S . -B $(BUILD) -G Ninja --log-level=WARNING -DPOSEMBED_PYTHON=$(python) -DPOSEMBED_PYTHON_MODULE=ON \
	  -DPOSEMBED_TESTS=ON -DPOSEMBED_RELOCATABLE=OFF -DCMAKE_INSTALL_LIBDIR=lib $(CMAKE_ARGS)
	cmake --build $(BUILD)
	cmake --install $(BUILD) --prefix python/posembed > $(BUILD)/install.log

test: test-cpp test-python

test-cpp: build
	ctest --test-dir $(BUILD) --output-on-failure --parallel 2 $(CTEST_ARGS)

# Files of tests are spread over processes, whose waiting threads leave the cores to each other.
test-python: build
	OMP_WAIT_POLICY=passive $(python) -m pytest --numprocesses auto --maxprocesses 4 --dist loadfile $(PYTEST_ARGS)

# What needs a GPU and skips itself elsewhere. "slow" tests compile; PYTEST_ARGS='-m gpu' takes them too.
test-gpu: build
	ctest --test-dir $(BUILD) --output-on-failure -L gpu $(CTEST_ARGS)
	$(python) -m pytest -m 'gpu and not slow' $(PYTEST_ARGS)

# Each module once forward and backward, under each of the toolkit's checkers; of races and barriers in posembed's own
# kernels. What torch asks the CUDA runtime in vain is no fault: launches check their errors themselves.
sanitize-gpu: build
	for tool in 'memcheck --report-api-errors no' 'racecheck --kernel-name kns=posembed' 'synccheck --kernel-name kns=posembed'; do \
	  PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool $$tool --error-exitcode 1 \
	    $(BUILD)/tests/cpp/test_cuda || exit 1; \
	done

# Without a GPU: the CUDA kernels' sources, run on the CPU under AddressSanitizer and UndefinedBehaviorSanitizer (2 minutes
# on two cores), and under ThreadSanitizer (7 minutes).
check-memory check-races: build
	cmake --build $(BUILD) --target $(subst -,_,$@) -- -k 0

# Without a GPU: Python tests on a library whose operators take their CUDA half for tensors on the CPU, beside a copy of
# the Python sources (6 minutes on two cores). A build without CUDA kernels has no such half.
cuda_on_cpu := $(BUILD)/tests/cpp/cuda_on_cpu
test-cuda-on-cpu: build
	cmake --build $(BUILD) --target posembed_cuda_on_cpu
	test ! -e $(cuda_on_cpu)/libposembed.so || $(MAKE) --no-print-directory run-cuda-on-cpu

run-cuda-on-cpu:
	cmake -E rm -rf $(cuda_on_cpu)/python
	cmake -E copy_directory python $(cuda_on_cpu)/python
	cmake -E copy $(cuda_on_cpu)/libposembed.so $(cuda_on_cpu)/python/posembed/lib
	POSEMBED_CUDA_ON_CPU=1 PYTHONPATH=$(abspath $(cuda_on_cpu)/python) OMP_WAIT_POLICY=passive \
	  $(python) -m pytest --numprocesses 2 -m 'not slow' \
	  $(addprefix tests/python/,token bag learned sinusoidal rotary rotary_cache rotary_norm alibi input) \
	  $(addprefix tests/python/test_,operators.py parity.py launches.py) $(PYTEST_ARGS)

cpp_sources = $(shell git ls-files --cached --others --exclude-standard '*.h' '*.cpp' '*.cu')

lint: $(requirements)
	clang-format --dry-run -Werror $(cpp_sources)
	ruff check .
	ruff format --check .
	mypy

format: $(requirements)
	clang-format -i $(cpp_sources)
	ruff check --fix .
	ruff format .

# The documentation site in build/docs. --strict: a broken link is an error.
docs: build
	$(python) -m mkdocs build --quiet --strict

demo: build
	$(python) examples/python/demo.py

# Whole calls beside peers; then the kernels alone.
benchmark: build
	cmake -S . -B $(BUILD) --log-level=WARNING -DPOSEMBED_BENCHMARKS=ON
	cmake --build $(BUILD) --target posembed_floors
	$(python) benchmarks/run.py --table $(BUILD)/benchmark.md --json $(BUILD)/benchmark.json $(BENCHMARK_ARGS)

# override: else BENCHMARK_ARGS on the command line would send it back to the CPU.
benchmark-gpu: override BENCHMARK_ARGS += --device cuda
benchmark-gpu: benchmark

benchmark-kernels: $(requirements)
	cmake -S . -B $(BUILD) -G Ninja --log-level=STATUS -DPOSEMBED_PYTHON=$(python) -DPOSEMBED_BENCHMARKS=ON $(CMAKE_ARGS)
	cmake --build $(BUILD) --target rotary_benchmark alibi_benchmark token_benchmark exactness
	$(python) benchmarks/kernel_table.py $(BUILD)/benchmarks/rotary_benchmark
	$(python) benchmarks/kernel_table.py $(BUILD)/benchmarks/alibi_benchmark
	$(BUILD)/benchmarks/token_benchmark

wheel: build
	CMAKE_ARGS="-DPOSEMBED_WARNINGS_AS_ERRORS=ON $(CMAKE_ARGS)" $(python) -m pip wheel --quiet --no-build-isolation --no-deps --wheel-dir dist .

clean:
	rm -rf build dist python/posembed/lib python/posembed/include python/posembed/_C.*.so python/*.egg-info
