# `make` lists the targets. Each one sets up .venv first (scripts/dev/setup_env.sh), unless PY names another
# Python, which is used as it is: `PY=python3 make test-gpu`.
PY ?= .venv/bin/python
ifeq ($(PY),.venv/bin/python)
SETUP := scripts/dev/setup_env.sh
else
SETUP := :
endif
# A hundred processes of the tests import torch: each would compile it anew, which takes as long as its import.
ifdef PYTHONDONTWRITEBYTECODE
unexport PYTHONDONTWRITEBYTECODE
export PYTHONPYCACHEPREFIX := $(CURDIR)/build/pycache
endif
# Folders of `make test-rest`; in the others a test's marker says that it belongs there (tests/conftest.py).
REST := tests/tools tests/plan tests/project

.PHONY: help setup demo test test-rest test-gpu coverage lint sweep docs figures properties clean

help:
	@echo "make demo    train a small GPT with and without the flag and compare (5 minutes on 2 cores)"
	@echo "make test    ruff, mypy, and what a change to head, kernels, collectives or adapter can break (4 to 9"
	@echo "             minutes on 2 cores, no GPU)"
	@echo "make test-rest  the other Megatron, all faults, tools, documentation, packaging (4 to 9 minutes)"
	@echo "make test-gpu   tests/gpu.txt on one or two GPUs; TESTS='tests/op -k graph' for others"
	@echo "make coverage  lines and branches that make test runs, in its ranks' processes too; COVERAGE=tests/op for others"
	@echo "make lint    ruff and mypy alone"
	@echo "make sweep   how many chunks: time against peak memory, the flags to use; SWEEP='--tokens 4096 ...'"
	@echo "make docs    the documentation as a site, in build/site"
	@echo "make figures tables and pictures of README.md and docs, from docs/benchmarks/results and the plan"
	@echo "make properties  12,000 random calls of the head against fp64 (12 minutes; make test tries 300)"
	@echo "make clean   remove .venv, build/ and caches"
	@echo "Compare two runs, profile memory, benchmark, soak ...: scripts/README.md"

setup:
	@$(SETUP)

demo: setup
	@$(PY) -m scripts.demo $(DEMO)

sweep: setup
	@$(PY) scripts/sweep_chunks.py $(SWEEP)

docs: setup
	@if grep -qsE "sphinx|myst|furo" .venv/missing.txt; then \
		echo "docs: Sphinx, MyST or furo could not be installed: see .venv/pip.log" >&2; exit 2; fi
	@$(PY) -m sphinx -W --keep-going -n -q -b html -d build/doctrees docs build/site
	@echo "build/site/index.html"

figures: setup
	@$(PY) -m scripts.dev.figures

# A tool that set-up could not install (no network) is skipped with a line that says so.
RUFF = if grep -qs ruff .venv/missing.txt; then echo "SKIPPED ruff: not installed"; else \
	$(PY) -m ruff check && $(PY) -m ruff format --check; fi
MYPY = if grep -qs mypy .venv/missing.txt; then echo "SKIPPED mypy: not installed"; else $(PY) -m mypy; fi
lint: setup
	@$(RUFF)
	@$(MYPY)

NO_XDIST = $(info SKIPPED pytest-xdist: not installed, one process of tests instead of two)
WORKERS = $(if $(shell $(PY) -c "import xdist" 2>&1),$(NO_XDIST),-n 2 --dist loadfile)
PYTEST = OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(PY) -m pytest

OF_TEST = -m "not rest" $(REST:%=--ignore=%)

# mypy takes one core for half a minute, beside the tests; it speaks after them.
test: setup
	@$(RUFF)
	@mkdir -p build; ($(MYPY)) >build/mypy.log 2>&1 & types=$$!; \
		$(PYTEST) -q $(WORKERS) $(OF_TEST); tests=$$?; \
		wait $$types; types=$$?; cat build/mypy.log; exit $$((tests | types))

test-rest: setup
	@$(PYTEST) -q $(WORKERS) -m rest

# One process, whose ranks have the GPUs. Kernels that are compiled once stay in build/triton.
TESTS = $(shell grep -v "^\#" tests/gpu.txt)
test-gpu: setup
	@$(PY) -c "import hypothesis, pytest, torch, triton; assert torch.cuda.is_available(), 'no CUDA device'"
	@PYTHONPATH="$$PWD$${PYTHONPATH:+:$$PYTHONPATH}" TRITON_CACHE_DIR="$${TRITON_CACHE_DIR:-$$PWD/build/triton}" \
		$(PYTEST) -v $(TESTS)

# coverage follows ranks and launches by itself (pyproject.toml): no test knows of it.
COVERAGE = $(OF_TEST)
coverage: setup
	@$(PY) -m coverage erase
	@OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(PY) -m coverage run -m pytest -q $(WORKERS) $(COVERAGE); tests=$$?; \
		$(PY) -m coverage combine -q && $(PY) -m coverage report; exit $$tests

properties: setup
	@HYPOTHESIS_PROFILE=long OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(PY) -m pytest -q tests/op/test_properties.py $(PROPERTIES)

clean:
	rm -rf .venv build *.egg-info .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
