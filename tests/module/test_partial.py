"""`Partial` compared with `functools.partial`; `programs/wrapping.py` compares it with Equinox."""

import functools
import inspect
import itertools

import pytest

from eqxlike import Partial
from tests.module.programs.registry import affine, everything

ARGS = [(), (1,), (1, 2)]
KWARGS = [{}, {"a": 3}, {"a": 4, "b": 5}, {"self": 6, "func": 7, "args": 8}]


def test_partial_calls_like_functools_partial():
    calls = list(itertools.product(ARGS, KWARGS))
    for (args, kwargs), (more_args, more_kwargs) in itertools.product(calls, calls):
        theirs = functools.partial(everything, *args, **kwargs)
        ours = Partial(everything, *args, **kwargs)
        assert ours(*more_args, **more_kwargs) == theirs(*more_args, **more_kwargs)
        assert (ours.func, ours.args, ours.keywords) == (theirs.func, theirs.args, theirs.keywords)


def test_signature_matches_functools_partial():
    for args, kwargs in (((), {}), ((2,), {}), ((2,), {"shift": 1})):
        expected = inspect.signature(functools.partial(affine, *args, **kwargs))
        assert inspect.signature(Partial(affine, *args, **kwargs)) == expected


@pytest.mark.parametrize("function", [3, max], ids=["a number", "max"])
def test_signature_of_a_callable_without_signature_accepts_all_arguments(function):
    assert list(inspect.signature(Partial(function)).parameters) == ["args", "kwargs"]
