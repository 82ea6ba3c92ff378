# edgedsv4: `make chat` talks to a model, `make test` runs every check that needs no GPU.
# Each works on a fresh clone with Python >= 3.11 (with headers), a C compiler and make; the first run
# sets up $(VENV), later runs find the stamps in it and start at once.
#
#   make chat MODEL=flash.gguf            another model        make chat ARGS="--ctx 8192"
#   make eval                             figures of the pocket model, in build/eval.json
#   make test PYTEST="-k gguf"            part of the suite    make test WORKERS=0     in one process
#   make compile-kernels                  for every GPU, without one; see CONTRIBUTING.md
#   make capi                             libdsv4 for C and C++, in build/capi; see docs/c-api.md
#   make chat TORCH="torch --index-url URL"   another torch build, 2.11 or newer
#   make chat TORCH=                      the torch that $(PYTHON) already has
# The choice of torch is remembered in $(VENV) until another one is named.

PYTHON  ?= python3
VENV    ?= .venv
MODEL   ?=
ARGS    ?=
PYTEST  ?=
# Processes that share the tests; 0 runs them in this one, for a debugger.
WORKERS ?= 2

BIN    := $(VENV)/bin
STAMPS := $(VENV)/stamps
NATIVE := $(wildcard setup.py edgedsv4/*/native/*.c edgedsv4/*/native/*.h edgedsv4/*/native/*.py \
  include/dsv4.h $(addprefix edgedsv4/capi/,build_ext.py header.py callbacks.h shim.h))

ifeq ($(origin TORCH),undefined)
  ifneq ($(wildcard $(STAMPS)/torch-choice),)
    TORCH := $(shell cat $(STAMPS)/torch-choice)
  else
    TORCH := $(shell grep '^torch==' constraints.txt)
  endif
endif
TORCH_STAMP := $(STAMPS)/torch-$(shell printf '%s' '$(TORCH)' | cksum | cut -d' ' -f1)
# torch is chosen by TORCH alone, so its pin must not fight another choice.
PIP := $(BIN)/python -m pip install --disable-pip-version-check -c $(STAMPS)/constraints.txt
# Without build isolation the build uses the pinned tools and downloads nothing twice. `compat` puts the
# checkout on Python's path; the other mode is lost to a folder of the same name, as beside a clone.
INSTALL := $(PIP) --quiet --no-build-isolation --config-settings editable_mode=compat
# What an extra asks for, without the package: installing that again would compile its C again. Most
# modules of these are never imported, so Python compiles those that are.
TOOLS := $(PIP) --quiet --no-compile
EXTRA := import sys, tomllib; \
  extras = tomllib.load(open(sys.argv[1], "rb"))["project"]["optional-dependencies"]; \
  print(*(line for name in sys.argv[2:] for line in extras[name]), sep="\n")

.PHONY: chat test eval capi compile-kernels lint docs setup clean

# With job control the chat is a process group of its own: Ctrl+C stops its reply and not make.
chat: $(STAMPS)/package
	@if [ -t 0 ]; then set -m; fi; $(BIN)/dsv4-chat $(MODEL) $(ARGS)

# Twice: Triton decides when a kernel is defined whether it is interpreted, so the interpreter's tests
# have processes of their own. Status 5, no test chosen, is right where PYTEST means the other run.
# On a machine with a GPU `auto` would be that.
NO_GPU := CUDA_VISIBLE_DEVICES=
# A file stays in one process, so that what its tests share is made once; files in their order, for the
# long ones come early. Tests of the interpreter share nothing.
BY_FILE := --dist loadfile --no-loadscope-reorder
BY_TEST := --dist worksteal
INTERPRETED := $(if $(findstring tests/,$(PYTEST)),,tests/triton)
test: $(STAMPS)/test
	@status=0; run() { "$$@" || { code=$$?; $(if $(PYTEST),[ $$code = 5 ] ||) status=$$code; }; }; \
	run env $(NO_GPU) $(BIN)/python -m pytest -m "not gpu" -n $(WORKERS) $(BY_FILE) $(PYTEST); \
	run env $(NO_GPU) TRITON_INTERPRET=1 $(BIN)/python -m pytest -m interpreted -n $(WORKERS) $(BY_TEST) $(INTERPRETED) $(PYTEST); \
	exit $$status

# Every variant of every Triton kernel for every GPU; what it takes is kept in tests/data.
#   make compile-kernels ARGS="--only matvec --targets sm_90"     TRITON=3.9.0  another release
TRITON ?=
compile-kernels: $(STAMPS)/test
	@folder=$$(mktemp -d); trap 'rm -rf "$$folder"' EXIT; \
	$(if $(TRITON),$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target "$$folder" triton==$(TRITON) &&) \
	PYTHONPATH="$$folder" $(BIN)/python tests/triton_compile/compile_kernels.py $(ARGS)

# The table of what the pocket model (or MODEL, a file) can do; see apps/pocket/README.md.
#   make eval ARGS="--until 600 --sets recall,kl-"
POCKET_CORPUS := $(wildcard apps/pocket/build/corpus.tar.xz)
eval: $(STAMPS)/package
	@mkdir -p build
	PYTHONPATH=apps OMP_NUM_THREADS=1 $(BIN)/python -m pocket.evaluate \
	  $(or $(MODEL),edgedsv4/data/pocket-v4/pocket-v4.gguf) --workers $(or $(filter-out 0,$(WORKERS)),1) \
	  $(if $(POCKET_CORPUS),--corpus $(POCKET_CORPUS)) --out build/eval.json $(ARGS)

# A prefix to compile against: library, headers, and what pkg-config and CMake look for.
capi: $(STAMPS)/package
	$(BIN)/python -m edgedsv4.capi.build --out build/capi --cc "$(CC)"

lint: $(STAMPS)/lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

docs: $(STAMPS)/package
	$(BIN)/python -m edgedsv4.cli.docs docs/cli.md

setup: $(STAMPS)/package

clean:
	rm -rf $(VENV) build dist *.egg-info apps/tui/build apps/tui/*.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
	find edgedsv4 apps/tui tests -name __pycache__ -type d -prune -exec rm -rf {} +
	find edgedsv4 -name '*.so' -delete

$(STAMPS)/venv:
	@command -v $(PYTHON) >/dev/null || { echo "make: no '$(PYTHON)' found; name a Python >= 3.11: make PYTHON=/path/to/python" >&2; exit 2; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "make: $$($(PYTHON) -V) is too old; name a Python >= 3.11: make PYTHON=/path/to/python" >&2; exit 2; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { echo "make: $(PYTHON) cannot make virtual environments; install its venv package (python3-venv)" >&2; exit 2; }
	@$(PYTHON) -c 'import os, sys, sysconfig; sys.exit(not os.path.exists(os.path.join(sysconfig.get_paths()["include"], "Python.h")))' || { echo "make: Python.h of $(PYTHON) is missing; install its headers (python3-dev)" >&2; exit 2; }
	@command -v $(firstword $(CC)) >/dev/null || { echo "make: no C compiler '$(CC)' found; install one or name it: make CC=gcc" >&2; exit 2; }
	@echo "[1/3] virtual environment in $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	@mkdir -p $(STAMPS) && touch $@

# A torch that PYTHON has already, maybe in an environment of its own, is lent by a path file.
LEND_TORCH := import os, torch; print(os.path.dirname(os.path.dirname(torch.__file__)))
SITE       := import sysconfig; print(sysconfig.get_paths()["purelib"])

$(TORCH_STAMP): constraints.txt | $(STAMPS)/venv
	@rm -f $(STAMPS)/torch-*
	@grep -v '^torch==' constraints.txt > $(STAMPS)/constraints.txt
	@echo "[2/3] torch: $(if $(strip $(TORCH)),$(TORCH) (the largest download; some minutes on a slow line),the one that $(PYTHON) has)"
	@lent="$$($(BIN)/python -c '$(SITE)')/lent_torch.pth"; rm -f "$$lent"; \
	$(if $(strip $(TORCH)),$(PIP) $(TORCH),$(PYTHON) -c '$(LEND_TORCH)' > "$$lent" || { rm -f "$$lent"; \
	echo "make: TORCH is empty, but $(PYTHON) has no torch; name a build, or another PYTHON" >&2; exit 2; })
	@printf '%s' '$(TORCH)' > $(STAMPS)/torch-choice
	@touch $@

# Editable, so that what is run and tested is this checkout and the C extension is built into it.
$(STAMPS)/package: pyproject.toml apps/tui/pyproject.toml $(NATIVE) $(TORCH_STAMP)
	@echo "[3/3] edgedsv4 and its C extension, dsv4-chat"
	@$(PIP) --quiet setuptools cffi
	@$(INSTALL) --editable . --editable apps/tui
	@touch $@

$(STAMPS)/test: $(STAMPS)/package
	@echo "test dependencies"
	@$(BIN)/python -c '$(EXTRA)' pyproject.toml test parity > $(STAMPS)/test.txt
	@$(BIN)/python -c '$(EXTRA)' apps/tui/pyproject.toml test >> $(STAMPS)/test.txt
	@$(TOOLS) -r $(STAMPS)/test.txt
	@touch $@

$(STAMPS)/lint: $(STAMPS)/package
	@echo "lint tools"
	@$(BIN)/python -c '$(EXTRA)' pyproject.toml lint > $(STAMPS)/lint.txt
	@$(TOOLS) -r $(STAMPS)/lint.txt
	@touch $@
