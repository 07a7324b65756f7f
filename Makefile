# make demo, make test: everything from a fresh clone. They make .venv, install the pinned requirements, build and run;
# a second call reuses what is there.
#   make test PYTHON=/path/to/python VENV=    takes that interpreter as it is and installs nothing
#   make test TORCH=2.15.0                    makes and uses an environment of its own with that torch
#   make build CMAKE_ARGS=-DPOSEMBED_CUDA=ON  passes options to CMake
PYTHON ?= python3
TORCH ?= 2.11.0
ifeq ($(origin TORCH),file)
  VENV ?= .venv
  BUILD ?= build/dev
else
  VENV ?= .venv-$(TORCH)
  BUILD ?= build/torch-$(TORCH)
endif
CMAKE_ARGS ?=
PYTEST_ARGS ?=
CTEST_ARGS ?=
BENCHMARK_ARGS ?=

ifeq ($(VENV),)
  python := $(shell command -v $(PYTHON))
  $(if $(python),,$(error PYTHON=$(PYTHON) is no program))
else
  python := $(abspath $(VENV))/bin/python
  requirements := $(VENV)/requirements-installed
  requirements_demo := $(VENV)/requirements-demo-installed
  requirements_dev := $(VENV)/requirements-dev-installed
  requirements_stacks := $(VENV)/requirements-stacks-installed
  requirements_suite := $(VENV)/requirements-suite-installed
  requirements_torchrec := $(VENV)/requirements-torchrec-installed
endif
# CMake, Ninja and the linters of that environment come before the machine's.
export PATH := $(dir $(python)):$(PATH)
# Tests and setup.py use the same build folder, so that nothing is compiled twice.
export POSEMBED_BUILD := $(abspath $(BUILD))
export PYTHONPATH := $(CURDIR)/python$(if $(PYTHONPATH),:$(PYTHONPATH))

.PHONY: all build build-tests test test-cpp test-python test-programs test-transformers test-transformers-suite run-transformers-suite test-stacks run-stacks test-stacks-suite run-stacks-suite test-torchrec run-torchrec test-jax fuzz fuzz-readers reliability test-gpu test-packaging check-newest-torch requirements install-locked sanitize-gpu check-memory check-races check-machine-code test-cuda-on-cpu build-cuda-on-cpu test-without-cpp test-aarch64 lint format docs demo demo-requirements benchmark benchmark-gpu profile-gpu benchmark-kernels wheel wheels wheel-all test-wheel clean
all: build

# pip is slow even when it has nothing to do: it runs again only when a requirements file has changed.
install = $(python) -m pip install --quiet --disable-pip-version-check
$(VENV)/requirements-installed: requirements.txt
	test -x $(python) || $(PYTHON) -m venv $(VENV)
	$(install) torch==$(TORCH) -r $<
	touch $@

$(VENV)/requirements-%-installed: requirements-%.txt $(VENV)/requirements-installed
	$(install) torch==$(TORCH) -r $<
	touch $@

# The library and _C, installed into python/posembed, where Python and find_package look for it. A new build folder gets
# CPU kernels for this machine alone; tests need all.
configure = cmake -S . -B $(BUILD) -G Ninja --log-level=NOTICE -DPOSEMBED_PYTHON=$(python) -DPOSEMBED_PYTHON_MODULE=ON \
  -DPOSEMBED_RELOCATABLE=OFF -DPOSEMBED_MANYLINUX=OFF -DCMAKE_INSTALL_LIBDIR=lib
install_library = cmake --install $(BUILD) --prefix python/posembed > $(BUILD)/install.log

build: $(requirements)
	$(configure) $(if $(wildcard $(BUILD)/CMakeCache.txt),,-DPOSEMBED_INSTRUCTION_SETS=native) $(CMAKE_ARGS)
	cmake --build $(BUILD) --target posembed posembed_python
	$(install_library)

build-tests: $(requirements_dev)
	$(configure) -DPOSEMBED_INSTRUCTION_SETS=all -DPOSEMBED_TESTS=ON -DPOSEMBED_WARNINGS_AS_ERRORS=ON $(CMAKE_ARGS)
	cmake --build $(BUILD)
	$(install_library)

# With the seconds of each stage, and one line at the end: passed, failed, skipped and why.
stages = $(or $(shell command -v $(PYTHON)),python3) scripts/stages.py
test:
	@$(stages) requirements build ctest sanitizers pytest programs

requirements: $(requirements_dev)

# The same and no others, with known hashes (.ci/requirements.txt).
install-locked:
	test -x $(python) || $(PYTHON) -m venv $(VENV)
	$(install) --require-hashes --only-binary :all: -r .ci/requirements.txt

test-cpp: build-tests
	ctest --test-dir $(BUILD) --output-on-failure --parallel 2 $(CTEST_ARGS)

# Files of tests are spread over processes, the longest first (tests/python/conftest.py); waiting threads leave the cores
# to each other. Whole programs, which CI runs when they, the Python code or the C++ interface have changed, are apart.
spread = OMP_WAIT_POLICY=passive $(python) -m pytest --numprocesses auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder
programs := tests/install/test_docs.py tests/install/test_wheel.py tests/python/test_nanogpt.py tests/python/test_examples.py tests/python/test_decompositions.py tests/python/rotary/test_completion.py tests/python/distributed/test_example.py tests/python/integrations/test_huggingface_all.py tests/python/integrations/test_huggingface.py tests/python/alibi/test_alibi.py tests/python/test_compatibility.py
test-python: build $(requirements_dev)
	$(spread) -m 'not program' --junitxml=$(BUILD)/reports/pytest.xml $(PYTEST_ARGS)

test-programs: build $(requirements_dev)
	$(spread) -m program --junitxml=$(BUILD)/reports/programs.xml $(programs) $(PYTEST_ARGS)

# Patches every model class of the installed transformers, or of TRANSFORMERS=5.24.0; make test-programs takes one in 48.
test-transformers: private other = $(abspath $(BUILD))/transformers-$(TRANSFORMERS)
test-transformers: build $(requirements_dev)
	$(if $(TRANSFORMERS),$(install) --upgrade --no-deps --target $(other) transformers==$(TRANSFORMERS))
	$(if $(TRANSFORMERS),PYTHONPATH=$(other):$(PYTHONPATH)) OMP_WAIT_POLICY=passive POSEMBED_ALL_MODELS=1 $(python) -m pytest --numprocesses auto --dist load tests/python/integrations/test_huggingface_all.py

# In an environment of its own: the kernels package takes some versions of transformers only.
test-stacks: build
	$(MAKE) --no-print-directory run-stacks $(if $(VENV),VENV=$(VENV)-stacks)

run-stacks: $(requirements_stacks)
	OMP_WAIT_POLICY=passive $(python) -m pytest $(addprefix tests/python/integrations/test_,huggingface.py patch_door.py patch_proof.py huggingface_kernels.py huggingface_peft.py training_stacks.py diffusion_and_vision.py torchtitan.py) tests/python/rotary/test_axial_programs.py $(PYTEST_ARGS)

# transformers' own modeling tests, from a checkout, with plain and with patched models. A checkout of a release has the
# tests of its src/transformers; without src, the installed transformers is tested.
NUMERICS ?= model
test-transformers-suite: build
	$(if $(SOURCE),,$(error SOURCE=<a checkout of transformers> is missing))
	$(MAKE) --no-print-directory run-transformers-suite $(if $(VENV),VENV=$(VENV)-suite)

run-transformers-suite: $(requirements_suite)
	$(python) tests/suite/transformers_suite.py --numerics $(NUMERICS) $(SOURCE) $(FAMILIES)

# The same with tests of diffusers or timm from a checkout, in the environment of test-stacks.
test-stacks-suite: build
	$(if $(SOURCE),,$(error SOURCE=<a checkout of diffusers or timm> is missing))
	$(MAKE) --no-print-directory run-stacks-suite $(if $(VENV),VENV=$(VENV)-stacks)

run-stacks-suite: $(requirements_stacks)
	$(python) tests/suite/transformers_suite.py $(SOURCE) $(FAMILIES)

# torchrec requires fbgemm-gpu, which needs CUDA; fbgemm-gpu-cpu is the same for the CPU.
$(VENV)/requirements-torchrec-installed: requirements-torchrec.txt $(VENV)/requirements-installed
	$(install) torch==$(TORCH) -r $<
	$(install) --no-deps torchrec==1.6.1
	touch $@

test-torchrec: build
	$(MAKE) --no-print-directory run-torchrec $(if $(VENV),VENV=$(VENV)-torchrec)

run-torchrec: $(requirements_torchrec)
	OMP_WAIT_POLICY=passive $(python) -m pytest tests/python/distributed/test_torchrec.py "tests/python/test_docstrings.py::test_examples[posembed.integrations.torchrec]" $(PYTEST_ARGS)

# posembed_kernels.jax, with JAX in a folder of its own.
test-jax: private other = $(abspath $(BUILD))/jax
test-jax: build $(requirements_dev)
	$(install) --upgrade --target $(other) jax
	PYTHONPATH=$(PYTHONPATH):$(other) $(python) -m pytest tests/python/without_torch/test_jax.py \
	  "tests/python/test_docstrings.py::test_examples[posembed_kernels.jax]" $(PYTEST_ARGS)

# 20,000 calls of operators with arguments that are partly sane, from a seed of the day; make test makes 1,000.
fuzz: build
	$(python) tests/fuzz/operators.py --calls 20000 --seed $$(date +%Y%m%d)00000

# The readers of files under libFuzzer, each on so many inputs (needs clang).
FUZZ_RUNS ?= 200000
fuzz-readers: $(requirements)
	$(python) scripts/fuzz_readers.py --runs $(FUZZ_RUNS)

# Everything long of docs/guide/reliability.md (some hours on two cores), then its planted faults, each of which must make
# a test fail. make test has the short form.
reliability: FUZZ_RUNS = 10000000
reliability: build-tests fuzz fuzz-readers
	POSEMBED_LONG=1 OMP_WAIT_POLICY=passive $(python) -m pytest --timeout 7200 $(addprefix tests/python/,test_operators.py test_decompositions.py test_reliability.py \
	  test_memory.py test_guard_pages.py pretrained) $(PYTEST_ARGS)
	$(python) tests/faults/plant.py

# What needs a GPU (docs/guide/gpu.md). "slow" tests compile with Inductor and are left out.
test-gpu sanitize-gpu benchmark-gpu profile-gpu: build-tests
	BUILD=$(BUILD) PYTHON=$(python) PYTEST_ARGS='$(PYTEST_ARGS)' BENCHMARK_ARGS='$(BENCHMARK_ARGS)' \
	  scripts/gpu.sh $(@:-gpu=)

# Without a GPU: the CUDA kernels' sources, run on the CPU under AddressSanitizer and UndefinedBehaviorSanitizer, or under
# ThreadSanitizer.
check-memory check-races: build-tests
	cmake --build $(BUILD) --target $(subst -,_,$@) -- -k 0

# Without a GPU: Python tests on a library whose operators take their CUDA half for tensors on the CPU, beside a copy of
# the Python sources. A build without CUDA kernels has no such half.
cuda_on_cpu := $(BUILD)/tests/cpp/cuda_on_cpu
with_cuda_on_cpu = POSEMBED_CUDA_ON_CPU=1 PYTHONPATH=$(abspath $(cuda_on_cpu)/python) OMP_WAIT_POLICY=passive $(python)
on_both_halves := test_operators.py test_launches.py test_parity.py without_torch/test_c_cuda.py token bag learned sinusoidal fourier rotary rotary_cache rotary_norm alibi relative_logits input
test-cuda-on-cpu: build-cuda-on-cpu
	test ! -e $(cuda_on_cpu)/libposembed.so || $(with_cuda_on_cpu) -m pytest --numprocesses 2 -m 'not slow' \
	  $(addprefix tests/python/,$(on_both_halves)) $(PYTEST_ARGS)
	test ! -e $(cuda_on_cpu)/libposembed.so || $(with_cuda_on_cpu) tests/gpu/sweep.py --quick

build-cuda-on-cpu: build-tests
	cmake --build $(BUILD) --target posembed_cuda_on_cpu
	cmake -E rm -rf $(cuda_on_cpu)/python
	cmake -E copy_directory python $(cuda_on_cpu)/python
	test ! -e $(cuda_on_cpu)/libposembed.so || cmake -E copy $(cuda_on_cpu)/libposembed.so $(cuda_on_cpu)/python/posembed/lib

# What the wheel for every torch and Python has: all but posembed.cpp, beside a copy of the Python sources without _C.
without_cpp := $(BUILD)/without-cpp
test-without-cpp: build
	cmake -E rm -rf $(without_cpp)
	cmake -E copy_directory python $(without_cpp)/python
	rm $(without_cpp)/python/posembed/_C.*.so
	PYTHONPATH=$(abspath $(without_cpp)/python) $(python) -m pytest --numprocesses 2 -m 'not slow and not program' \
	  tests/python $(PYTEST_ARGS)

# Arm, cross-compiled and run under an emulator: tests, and the bits of every operator beside this machine's.
aarch64 = PYTHON=$(python) TORCH=$(TORCH) PYTEST_ARGS='$(PYTEST_ARGS)' scripts/aarch64.sh
test-aarch64: build $(requirements_dev)
	$(aarch64) test

# Registers, local memory and wide loads of the hot CUDA kernels, beside what is recorded.
check-machine-code: build-tests
	$(python) scripts/machine_code.py $(BUILD)/csrc/libposembed_kernels.so

cpp_sources = $(shell git ls-files --cached --others --exclude-standard '*.h' '*.cpp' '*.cu')

lint: $(requirements_dev)
	clang-format --dry-run -Werror $(cpp_sources)
	ruff check .
	ruff format --check .
	mypy

format: $(requirements_dev)
	clang-format -i $(cpp_sources)
	ruff check --fix .
	ruff format .

# Refreshes the generated parts of the pages, then makes the site in build/docs. --strict: a broken link is an error.
docs: build $(requirements_dev)
	$(python) docs/pages.py --notebooks
	$(python) -m mkdocs build --quiet --strict

demo:
	@$(stages) demo-requirements demo-build
	@$(python) examples/python/demo.py

demo-requirements: $(requirements_demo)

# Whole calls beside peers; then the kernels alone.
benchmark: build
	cmake -S . -B $(BUILD) --log-level=WARNING -DPOSEMBED_BENCHMARKS=ON
	cmake --build $(BUILD) --target posembed_bandwidth_limits
	$(python) benchmarks/run.py --table $(BUILD)/benchmark.md --json $(BUILD)/benchmark.json $(BENCHMARK_ARGS)

benchmark-kernels: $(requirements)
	cmake -S . -B $(BUILD) -G Ninja --log-level=STATUS -DPOSEMBED_PYTHON=$(python) -DPOSEMBED_BENCHMARKS=ON $(CMAKE_ARGS)
	cmake --build $(BUILD) --target rotary_benchmark alibi_benchmark token_benchmark exactness kernel_instructions
	$(python) benchmarks/kernel_table.py $(BUILD)/benchmarks/rotary_benchmark
	$(python) benchmarks/kernel_table.py $(BUILD)/benchmarks/alibi_benchmark
	$(BUILD)/benchmarks/token_benchmark

# A wheel in dist/ for machines without a compiler, for the torch and the Python of the environment: for the CPU, with
# CUDA=1 for GPUs too; with ARCH=aarch64 for Arm, cross-compiled.
wheel: export POSEMBED_BUILD := $(abspath $(BUILD))$(if $(CUDA),-cuda)
wheel: $(requirements_dev)
	$(if $(filter aarch64,$(ARCH)),$(aarch64) wheel,$(python) scripts/build_wheel.py $(if $(CUDA),--cuda))

# Wheels for every torch and Python named, each in an environment of its own.
TORCHES ?= 2.11.0 2.12.1 2.13.0 2.14.0 2.15.0
PYTHONS ?= python3.10 python3.11 python3.12 python3.13 python3.14
wheels:
	set -e; for torch in $(TORCHES); do for python in $(PYTHONS); do \
	  $(MAKE) wheel TORCH=$$torch PYTHON=$$python VENV=.venv-$$torch-$$python BUILD=build/wheel-$$torch-$$python; \
	done; done

# One wheel for every Python, with a library for each torch named. The torches are downloaded, and not installed. With
# ARCH=aarch64 for Arm.
wheel-all: export POSEMBED_BUILD := $(abspath $(BUILD))/wheel-all$(if $(CUDA),-cuda)
wheel-all: $(requirements_dev)
	env -u PIP_NO_INDEX $(if $(filter aarch64,$(ARCH)),$(aarch64) wheel,$(python) scripts/build_wheel.py $(if $(CUDA),--cuda)) \
	  --torches $(TORCHES)

# That wheel in new environments of each torch and Python that is there; it downloads some GB for each.
WHEEL ?= $(wildcard dist/posembed-*-py3-none-*.whl)
test-wheel: $(requirements_dev)
	env -u PIP_NO_INDEX $(python) scripts/test_wheel.py $(WHEEL) --torches $(TORCHES) --pythons $(PYTHONS)

# Packaging from scratch: the wheel and a project that includes posembed compile all of it.
test-packaging: build-tests
	POSEMBED_PACKAGING_FROM_SCRATCH=1 $(python) -m pytest tests/install/test_install.py $(PYTEST_ARGS)

# Of the newest torch the headers serve, whatever the Python.
newest_torch := build/newest-torch
check-newest-torch: build-tests
	env -u PIP_NO_INDEX $(python) -m pip download --quiet --require-hashes --no-deps --only-binary :all: --dest $(newest_torch) \
	  --implementation cp --python-version 3.11 --platform manylinux_2_28_x86_64 -r .ci/newest-torch.txt
	$(python) scripts/newest_torch.py $(BUILD) $(newest_torch)/torch-*.whl

clean:
	rm -rf build dist python/posembed/lib python/posembed/include python/posembed/_C.*.so python/*.egg-info
