# `make` lists the targets. Each one sets up .venv first; see scripts/setup_env.sh.
PY := .venv/bin/python
SETUP := scripts/setup_env.sh

.PHONY: help setup demo test lint sweep docs figures properties clean

help:
	@echo "make demo    train a small GPT with and without the flag and compare (5 minutes on 2 cores)"
	@echo "make test    ruff, mypy and pytest (15 minutes on 2 cores, no GPU)"
	@echo "make lint    ruff and mypy alone"
	@echo "make sweep   how many chunks: time against peak memory, the flags to use; SWEEP='--tokens 4096 ...'"
	@echo "make docs    the documentation as a site, in build/site"
	@echo "make figures the figures of README.md, docs/scaling.md and docs/plan.md, from docs/benchmarks/results"
	@echo "make properties  12,000 random calls of the head against fp64 (12 minutes; make test tries 300)"
	@echo "make clean   remove .venv, build/ and caches"

setup:
	@$(SETUP)

demo: setup
	@$(PY) scripts/demo.py $(DEMO)

sweep: setup
	@$(PY) scripts/sweep_chunks.py $(SWEEP)

docs: setup
	@if grep -qsE "sphinx|myst|furo" .venv/missing.txt; then \
		echo "docs: Sphinx, MyST or furo could not be installed: see .venv/pip.log" >&2; exit 2; fi
	@$(PY) -m sphinx -W --keep-going -n -q -b html -d build/doctrees docs build/site
	@echo "build/site/index.html"

figures: setup
	@$(PY) scripts/readme_figures.py
	@$(PY) scripts/fit_scaling.py --write docs/scaling.md
	@$(PY) scripts/check_plan.py --write

# A tool that set-up could not install (no network) is skipped with a line that says so.
lint: setup
	@if grep -qs ruff .venv/missing.txt; then echo "SKIPPED ruff: not installed"; else \
		$(PY) -m ruff check && $(PY) -m ruff format --check; fi
	@if grep -qs mypy .venv/missing.txt; then echo "SKIPPED mypy: not installed"; else \
		$(PY) -m mypy; fi

test: lint
	@workers="-n 2 --dist loadfile"; \
	if grep -qs pytest-xdist .venv/missing.txt; then \
		echo "SKIPPED pytest-xdist: not installed, one process of tests instead of two"; workers=; fi; \
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(PY) -m pytest -q $$workers

properties: setup
	@HYPOTHESIS_PROFILE=long OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(PY) -m pytest -q tests/op/test_properties.py $(PROPERTIES)

clean:
	rm -rf .venv build *.egg-info .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
