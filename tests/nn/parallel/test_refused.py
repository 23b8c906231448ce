import re

import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

from eqxlike import nn
from tests.nn.parallel.branches import X, linear, linears


def test_no_branch_and_one_that_cannot_be_called_are_refused():
    with pytest.raises(ValueError, match=r"^Parallel needs at least one branch\.$"):
        nn.Parallel([])
    message = r"^Parallel: branches\[1\] cannot be called; it is a list of length 0\.$"
    with pytest.raises(TypeError, match=message):
        nn.Parallel([nn.Identity(), []])


@pytest.mark.parametrize("join", ["product", ["sum"]])
def test_unknown_join_is_refused_with_those_that_are_known(join):
    message = rf"^join must be 'sum', 'concatenate' or a function .*, got {re.escape(repr(join))}\."
    with pytest.raises(ValueError, match=message):
        nn.Parallel([nn.Identity()], join)


@pytest.mark.parametrize(("join", "shown"), [("sum", "'sum'"), (jnp.stack, "a function")])
def test_axis_beside_another_join_is_refused(join, shown):
    message = rf"^axis is for join='concatenate' alone, and join is {shown}\.$"
    with pytest.raises(ValueError, match=message):
        nn.Parallel([nn.Identity()], join, axis=0)


def test_what_is_no_index_or_past_the_end_is_refused():
    model = nn.Parallel([nn.Identity(), nn.Identity()])
    with pytest.raises(TypeError, match="indexed by an integer, got float"):
        model[1.0]
    for index in (2, -3):
        with pytest.raises(IndexError, match=f"Parallel of 2 branches has no branch {index}"):
            model[index]


def returning(output):
    return nn.Lambda(lambda x: output)


def zeros(*shape):
    return np.zeros(shape, np.float32)


MISFITS = {
    "shapes to sum": (
        "sum",
        {},
        [zeros(4), zeros(4), zeros(5)],
        r"cannot sum what branches\[0\] and branches\[2\] return: outputs\[0\] is an array of "
        r"shape \(4,\) and dtype float32, and outputs\[2\] is an array of shape \(5,\) and dtype",
    ),
    "text": (
        "sum",
        {},
        [zeros(4), "a"],
        r"cannot sum what branches\[1\] returns: outputs\[1\] is a leaf of type str, and no array",
    ),
    "numbers of axes": (
        "concatenate",
        {},
        [zeros(4), zeros(4, 1)],
        r"cannot concatenate what branches\[0\] and branches\[1\] return: .* \(4,\) .* \(4, 1\)",
    ),
    "another axis": (
        "concatenate",
        {"axis": -1},
        [zeros(4, 1), zeros(3, 2)],
        r"outputs\[0\] is an array of shape \(4, 1\) .* outputs\[1\] is an array of shape \(3, 2\)",
    ),
    "no such axis": (
        "concatenate",
        {"axis": 1},
        [zeros(4), zeros(4)],
        r"cannot concatenate what branches\[0\] returns: outputs\[0\] is an array of shape \(4,\) "
        "and dtype float32, which has no axis 1",
    ),
}


@pytest.mark.parametrize("name", MISFITS)
def test_outputs_that_do_not_fit_are_refused_by_branch(name):
    join, options, outputs, message = MISFITS[name]
    model = nn.Sequential([nn.Parallel([*map(returning, outputs)], join, **options)])
    with pytest.raises(ValueError, match=r"^Parallel at Sequential.layers\[0\] .*" + message):
        model(X)


def test_error_in_branches_that_run_as_one_says_where_they_are(getkey):
    model = nn.Sequential([nn.Parallel([*linears(getkey(), 2), nn.Identity()])])
    with pytest.raises(ValueError, match=r"Linear expected x of shape \(3,\)") as caught:
        model(jnp.ones(2))
    note = "It happened in branches 0, 1 of Parallel at Sequential.layers[0], which run as one."
    assert note in caught.value.__notes__


def test_scalars_of_equal_branches_are_not_concatenated(getkey):
    model = nn.Parallel([linear(key, "scalar") for key in jr.split(getkey())], "concatenate")
    with pytest.raises(ValueError, match=r"branches\[0\] returns: .* shape \(\) .*has no axis 0"):
        model(X)


def test_plain_function_as_a_branch_says_how_to_wrap_it():
    model = nn.Parallel([nn.Identity(), jnp.sin])
    with pytest.raises(TypeError, match="unexpected keyword argument 'key'") as error:
        model(jnp.ones(2), key=jr.key(0))
    note = "It happened in branch 1 of Parallel. Branches are called with `key=` where it is given"
    assert any(each.startswith(note) for each in error.value.__notes__)
