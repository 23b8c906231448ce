# Every target creates $(VENV) and installs its requirements there (.ci/setup). It does so again only
# after pyproject.toml changes. ARGS is passed to the command: make demo ARGS="--data digits"

VENV ?= .venv
PYTHON ?=
ARGS ?=
export VENV PYTHON

python = $(VENV)/bin/python

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help demo test test-core test-pages mutants test-pytorch test-pretrained test-downstream bench bench-all profile docs release release-check lint format types clean

help:
	@echo "make demo      Bayesian networks on real data, and the cost of filter_jit"
	@echo "make test      tests of the package (ARGS=--changed: only tests that the branch affects)"
	@echo "make test-core  tests of the core, which need few packages"
	@echo "make test-pages  tests of the examples in docstrings and pages, the tutorials, demo, types, benchmarks and site"
	@echo "make mutants   mutation tests: inserts small mistakes in the package and lists the tests that find them"
	@echo "make test-pytorch  compares the layers with PyTorch"
	@echo "make test-pretrained  compares models of published checkpoints with transformers"
	@echo 'make test-downstream  runs Lineax, Optimistix and Diffrax on eqxlike and on Equinox (ARGS="--whole": all programs)'
	@echo "make bench     compares filter_jit with jax.jit, Equinox and NNX"
	@echo 'make bench-all  runs every benchmark and the tests on one device (ARGS="--device gpu --minutes 40")'
	@echo "make profile   profiles a call of filter_jit"
	@echo "make docs      builds the site in build/site"
	@echo "make release   dates the changelog, builds, checks, commits and tags (VERSION=0.2.0); pushes nothing"
	@echo "make release-check  installs each extra alone on each Python, and compares sizes with the last release"
	@echo "make lint      checks format and rules (make format applies them)"
	@echo "make types     checks types with pyright"
	@echo "make clean     removes the environments, caches and builds"
	@echo 'Options: ARGS="..." for the command, PYTHON=/path/to/python, VENV=folder'

demo:
	@.ci/setup demo test dev
	@$(python) -m examples.demo $(ARGS)

in_parallel = -n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder --max-worker-restart 0

# With PYTHONDONTWRITEBYTECODE set, each process that a test starts would compile the package to bytecode.
test test-core test-pages: export PYTHONDONTWRITEBYTECODE =
# By default each thread of XLA has an arena of its own, which keeps the memory that the thread frees.
test test-core test-pages: export MALLOC_ARENA_MAX = 1
test:
	@.ci/setup test dev
	@$(python) -m pytest $(in_parallel) $(ARGS)

test-core:
	@.ci/setup test-core test dev
	@$(python) -m pytest $(in_parallel) tests/pytree tests/module tests/partition tests/transforms tests/nn tests/loops $(ARGS)

test-pages:
	@.ci/setup test dev
	@$(python) -m pytest $(in_parallel) tests/pages $(ARGS)

mutants: export PYTHONDONTWRITEBYTECODE =
mutants:
	@.ci/setup test dev
	@$(python) -m tests.mutants $(ARGS)

test-pytorch:
	@.ci/setup pytorch pretrained-test
	@$(python) -m pytest -n auto --maxprocesses 4 tests/pytorch $(ARGS)

test-pretrained: export HF_HUB_OFFLINE = 1
test-pretrained:
	@.ci/setup pretrained-test
	@$(python) -m pytest -n auto --maxprocesses 4 tests/pretrained $(ARGS)

test-downstream:
	@.ci/setup downstream
	@$(python) -m pytest -n auto --maxprocesses 4 --dist loadgroup tests/downstream $(ARGS)

bench:
	@.ci/setup peers test dev
	@$(python) -m benchmarks.jit_overhead $(ARGS)

bench-all:
	@.ci/setup peers test dev
	@$(python) -m benchmarks.all $(ARGS)

profile:
	@.ci/setup profile test dev
	@$(python) -m profiling.jit_dispatch $(ARGS)

docs:
	@.ci/setup docs
	@NO_MKDOCS_2_WARNING=1 $(python) -m mkdocs build --config-file docs/site/mkdocs.yml $(ARGS)

VERSION ?=
release:
	@.ci/setup dev
	@$(python) .ci/release/new.py $(VERSION)

release-check:
	@.ci/check-release --whole $(ARGS)

lint:
	@.ci/setup dev
	@$(python) -m ruff format --check .
	@$(python) -m ruff check .
	@$(VENV)/bin/lint-imports --no-logo
	@$(python) .ci/plain_english.py

format:
	@.ci/setup dev
	@$(python) -m ruff check --fix .
	@$(python) -m ruff format .

types:
	@.ci/setup dev
	@$(python) -m pyright --pythonpath $(python)

clean:
	rm -rf .venv .venv-newest build dist .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
