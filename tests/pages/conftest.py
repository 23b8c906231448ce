"""Fixtures for tests of pages, examples and benchmarks."""

import json

import jax
import pytest


@pytest.fixture
def promotion():
    """Allows dtype and rank promotion, as JAX does by default. Adam, NNX and NumPyro need it."""
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield


@pytest.fixture
def report_of(tmp_path):
    """A function that runs a benchmark's command and returns the report it writes."""

    def run(benchmark, *arguments, status=0, **options):
        path = tmp_path / "made" / "report.json"
        assert benchmark.main([*arguments, "--json", str(path)], **options) == status
        return json.loads(path.read_text())

    return run
