"""A folder of compiled programs: what the first process compiled, the second reads."""

import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

import eqxlike as eqx

STEP = """
import json, sys
import jax, jax.numpy as jnp
import eqxlike as eqx

cache = eqx.cache_compilations(sys.argv[1])
model = eqx.nn.Linear(2, 1, key=jax.random.key(0))

@eqx.filter_jit
def step(model, x):
    return eqx.filter_grad(lambda model: jnp.mean(jax.vmap(model)(x) ** 2))(model)

step(model, jnp.ones((3, 2)))
print(json.dumps({"read": [each.name for each in cache.read],
                  "compiled": [each.name for each in cache.compiled],
                  "costs": [each.cost_s for each in cache.read], "text": repr(cache)}))
"""


def _start(folder):
    """What a fresh process read and compiled."""
    command = [sys.executable, "-c", STEP, str(folder)]
    process = subprocess.run(command, check=True, timeout=120, stdout=subprocess.PIPE, text=True)
    return json.loads(process.stdout)


def test_second_start_compiles_nothing_and_knows_what_the_first_one_cost(tmp_path):
    first, second = _start(tmp_path / "cache"), _start(tmp_path / "cache")
    assert "jit(step)" in first["compiled"]
    assert second["compiled"] == []
    assert sorted(second["read"]) == sorted(first["compiled"] + first["read"])
    assert all(cost > 0 for cost in second["costs"])
    assert "0 programs compiled in 0.00 s" in second["text"]


@pytest.fixture
def x():
    """Made before, so that nothing but what a test compiles is counted."""
    return jnp.ones(3)


def test_program_is_compiled_once_and_then_read(tmp_path, x):
    with eqx.cache_compilations(tmp_path) as cache:
        for _ in range(2):
            jax.jit(lambda x: x * 17).lower(x).compile()
    assert (len(cache.compiled), len(cache.read)) == (1, 1)
    assert cache.compile_s == cache.compiled[0].seconds > 0
    assert repr(cache).startswith(f"{tmp_path}: 1 program read in ")
    with eqx.cache_compilations(tmp_path, min_compile_s=1e6) as cache:
        for _ in range(2):
            jax.jit(lambda x: x * 19).lower(x).compile()
    assert (len(cache.compiled), len(cache.read)) == (2, 0)


def test_closing_sets_jax_as_it_was_and_stops_counting(tmp_path, x):
    before = jax.config.jax_compilation_cache_dir
    cache = eqx.cache_compilations(tmp_path)
    assert jax.config.jax_compilation_cache_dir == str(tmp_path)
    cache.close()
    cache.close()
    assert jax.config.jax_compilation_cache_dir == before
    jax.jit(lambda x: x * 23).lower(x).compile()
    assert cache.compiled == cache.read == ()


def test_a_context_within_another_keeps_and_counts_its_own(tmp_path, x):
    with eqx.cache_compilations(tmp_path / "outer") as outer:
        jax.jit(lambda x: x * 31).lower(x).compile()
        with eqx.cache_compilations(tmp_path / "inner") as inner:
            for _ in range(2):
                jax.jit(lambda x: x * 37).lower(x).compile()
    assert (len(outer.compiled), len(outer.read)) == (1, 0)
    assert (len(inner.compiled), len(inner.read)) == (1, 1)


def test_record_that_is_damaged_is_no_obstacle(tmp_path, x):
    (tmp_path / "compilations.jsonl").write_bytes(b'["jit(f)", 1.0]\n{}\n\xff["jit(f)"\n3\n')
    with eqx.cache_compilations(tmp_path) as cache:
        for _ in range(2):
            jax.jit(lambda x: x * 29).lower(x).compile()
    assert len(cache.read) == 1
    assert cache.read[0].cost_s == cache.compiled[0].seconds


def test_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").touch()
    before = jax.config.jax_compilation_cache_dir
    for place in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(OSError, match=r"cannot write there .*: give another folder") as caught:
            eqx.cache_compilations(place)
        assert caught.value.filename == os.fspath(place)
    assert jax.config.jax_compilation_cache_dir == before


def test_what_is_no_folder_or_no_time_is_refused():
    for folder, options, error, message in [
        ("", {}, ValueError, "expects a folder on this machine, got ''"),
        ("gs://bucket/cache", {}, ValueError, "a folder on this machine, got 'gs://bucket/cache'"),
        (3, {}, TypeError, "expects the path of a folder, got 3"),
        ("unused", {"min_compile_s": -1}, ValueError, "at least 0 seconds, got -1"),
        ("unused", {"min_compile_s": "a"}, TypeError, "min_compile_s must be a number, got 'a'"),
    ]:
        with pytest.raises(error, match=message):
            eqx.cache_compilations(folder, **options)
