"""`Partial`: compared with `functools.partial` where that is the measure.

More of it is compared with Equinox in `programs/wrapping.py`.
"""

import functools
import inspect
import itertools
import traceback

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import pytest

from eqxlike import Module, Partial, is_array


def everything(*args, **kwargs):
    return args, kwargs


ARGS = [(), (1,), (1, 2)]
KWARGS = [{}, {"a": 3}, {"a": 4, "b": 5}, {"self": 6, "func": 7, "args": 8}]


def test_calls_as_functools_partial_does():
    calls = list(itertools.product(ARGS, KWARGS))
    for (args, kwargs), (more_args, more_kwargs) in itertools.product(calls, calls):
        theirs = functools.partial(everything, *args, **kwargs)
        ours = Partial(everything, *args, **kwargs)
        assert ours(*more_args, **more_kwargs) == theirs(*more_args, **more_kwargs)
        assert (ours.func, ours.args, ours.keywords) == (theirs.func, theirs.args, theirs.keywords)


def affine(scale, x, *, shift=0):
    return scale * x + shift


def test_signature_is_that_of_functools_partial():
    for args, kwargs in (((), {}), ((2,), {}), ((2,), {"shift": 1})):
        expected = inspect.signature(functools.partial(affine, *args, **kwargs))
        assert inspect.signature(Partial(affine, *args, **kwargs)) == expected


@pytest.mark.parametrize("function", [3, max], ids=["a number", "max"])
def test_signature_of_what_has_none_takes_anything(function):
    assert list(inspect.signature(Partial(function)).parameters) == ["args", "kwargs"]


def test_arrays_in_a_module_that_it_calls_are_leaves():
    class Scale(Module):
        weight: jax.Array

        def __call__(self, x, y):
            return self.weight * x + y

    partial = Partial(Scale(jnp.array(2.0)), jnp.array(3.0))
    leaves = [leaf for leaf in jtu.tree_leaves(partial) if is_array(leaf)]
    assert leaves == [2.0, 3.0]
    # `jax.tree_util.Partial` has the Module in its structure.
    assert jtu.tree_leaves(jtu.Partial(partial.func, *partial.args)) == [3.0]


def test_an_error_in_the_function_shows_none_of_our_frames():
    class Failing(Module):
        def method(self, x):
            raise ValueError("of the user")

    # The method is one of ours too, and hides its frame as well.
    with pytest.raises(ValueError, match="of the user") as caught:
        Partial(Failing().method)(1)
    files = [frame.filename for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert files == [__file__, __file__]
