"""The script that compares kinds of loop, in a short form."""

import jax
import numpy as np
import pytest

from tests import scripts

PATH = scripts.EXAMPLES / "loops.py"


@pytest.fixture(scope="module")
def script():
    return scripts.load(PATH, "loops_example")


SAME = ("Python", "scan", "scan, unroll=4", "fori_loop", "while_loop", "eqxlike, checkpointed")


@pytest.mark.parametrize("names", [(*SAME, "scan in scan"), ("scan with cond", "scan with where")])
def test_loops_compute_the_same(script, names):
    args = script.arguments_of(3)
    first, *others = [script.loop(name, 4)(*args) for name in names]
    for other in others:
        np.testing.assert_allclose(other, first, rtol=1e-5)


def test_only_the_loop_of_python_grows_with_its_turns(script):
    args = script.arguments_of(3)

    def count(name, turns):
        return script.count_operations(jax.make_jaxpr(script.loop(name, turns))(*args).jaxpr)

    assert count("Python", 8) == 2 * count("Python", 4) == 16
    for name in script.LOOPS:
        if name != "Python":
            assert count(name, 8) == count(name, 4)


def test_graph_of_one_loop_is_printed(script, capsys):
    assert script.main(["--graph", "scan", "--turns", "5"]) == 0
    assert "length=5" in capsys.readouterr().out
