# Every target does its own set-up (.ci/setup): it makes $(VENV), installs what it needs there, and does
# neither again until pyproject.toml changes. ARGS goes to the command: make demo ARGS="--data digits"

VENV ?= .venv
PYTHON ?=
ARGS ?=
export VENV PYTHON

python = $(VENV)/bin/python

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help demo test test-core test-pages mutants test-pytorch test-pretrained test-downstream bench bench-all profile docs release release-check lint format types clean

help:
	@echo "make demo      the Bayesian networks on real data, and the cost of filter_jit"
	@echo "make test      the behaviour of the package (ARGS=--changed: of what the branch changes)"
	@echo "make test-core  the core alone, with a few packages to install"
	@echo "make test-pages  examples in docstrings and pages, tutorials, the demo, types, benchmarks, the site's sources"
	@echo "make mutants   how many small mistakes in the package the suite finds, and which tests find them"
	@echo "make test-pytorch  the layers compared with PyTorch's"
	@echo "make test-pretrained  models of published checkpoints compared with transformers'"
	@echo 'make test-downstream  Lineax, Optimistix and Diffrax on eqxlike and on Equinox (ARGS="--whole": all programs)'
	@echo "make bench     filter_jit side by side with jax.jit, Equinox and NNX"
	@echo 'make bench-all  every benchmark and the tests on one device (ARGS="--device gpu --minutes 40")'
	@echo "make profile   where the time of a call goes"
	@echo "make docs      the site, in build/site"
	@echo "make release   dates the changelog, builds, checks, commits and tags (VERSION=0.2.0); pushes nothing"
	@echo "make release-check  wheel and sdist, each extra alone on each Python, sizes compared with the last"
	@echo "make lint      ruff, format and rules (make format applies them)"
	@echo "make types     pyright"
	@echo "make clean     takes away the environments, caches and builds"
	@echo 'Options: ARGS="..." for the command, PYTHON=/path/to/python, VENV=folder'

demo:
	@.ci/setup demo test dev
	@$(python) -m examples.demo $(ARGS)

in_parallel = -n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder --max-worker-restart 0

# Where Python is told to keep no bytecode, each process that a test starts compiles the package anew.
test test-core test-pages: export PYTHONDONTWRITEBYTECODE =
# XLA's threads have a heap each otherwise, which keeps what they gave back.
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
