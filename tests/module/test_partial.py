"""`Partial`: compared with `functools.partial` where that is the measure.

More of it is compared with Equinox in `programs/wrapping.py`.
"""

import functools
import inspect
import itertools

import pytest

from eqxlike import Partial
from tests.module.programs.registry import affine, everything

ARGS = [(), (1,), (1, 2)]
KWARGS = [{}, {"a": 3}, {"a": 4, "b": 5}, {"self": 6, "func": 7, "args": 8}]


def test_calls_as_functools_partial_does():
    calls = list(itertools.product(ARGS, KWARGS))
    for (args, kwargs), (more_args, more_kwargs) in itertools.product(calls, calls):
        theirs = functools.partial(everything, *args, **kwargs)
        ours = Partial(everything, *args, **kwargs)
        assert ours(*more_args, **more_kwargs) == theirs(*more_args, **more_kwargs)
        assert (ours.func, ours.args, ours.keywords) == (theirs.func, theirs.args, theirs.keywords)


def test_signature_is_that_of_functools_partial():
    for args, kwargs in (((), {}), ((2,), {}), ((2,), {"shift": 1})):
        expected = inspect.signature(functools.partial(affine, *args, **kwargs))
        assert inspect.signature(Partial(affine, *args, **kwargs)) == expected


@pytest.mark.parametrize("function", [3, max], ids=["a number", "max"])
def test_signature_of_what_has_none_takes_anything(function):
    assert list(inspect.signature(Partial(function)).parameters) == ["args", "kwargs"]
