"""Shardings of arguments and outputs."""

import functools
import types

import jax
import jax.numpy as jnp
import pytest

from eqxlike import Module, filter_jit, filter_vmap
from tests.transforms.jit.models import Affine
from tests.transforms.models import COPIED, SPLIT

ONES = jnp.ones(4)


def place(array):
    """The placement of an array on the two devices."""
    if len(array.sharding.device_set) != 2:
        return "elsewhere"
    return "whole" if array.sharding.is_fully_replicated else "split"


def places(tree):
    """The placements of the arrays of a tree, and its other leaves."""
    return [place(leaf) if hasattr(leaf, "sharding") else leaf for leaf in jax.tree.leaves(tree)]


def test_in_shardings_are_given_for_each_argument():
    give_both = lambda x, y: (x, y)
    for in_shardings, expected in (
        (SPLIT, ["split", "split"]),
        ((SPLIT, COPIED), ["split", "whole"]),
        ([SPLIT, None], ["split", "whole"]),
    ):
        jitted = filter_jit(give_both, in_shardings=in_shardings)
        assert places(jitted(ONES, ONES)) == expected
        assert places(jitted(y=ONES, x=ONES)) == expected
    # `None` does not move an array.
    jitted = filter_jit(give_both, in_shardings=(SPLIT, None))
    assert places(jitted(ONES, jax.device_put(ONES, COPIED))) == ["split", "whole"]
    # Other leaves than arrays are ignored.
    assert places(filter_jit(give_both, in_shardings=SPLIT)(ONES, "text")) == ["split", "text"]


def test_in_shardings_are_a_prefix_of_an_argument_and_skip_defaults():
    jitted = filter_jit(lambda tree: tree, in_shardings=({"a": SPLIT, "b": COPIED},))
    tree = jitted({"a": (ONES, "text", jnp.ones(2)), "b": ONES})
    assert places(tree) == ["split", "text", "split", "whole"]
    jitted = filter_jit(lambda model: model, in_shardings=(Affine(SPLIT, COPIED),))
    assert places(jitted(Affine(ONES, ONES))) == ["split", "whole"]
    jitted = filter_jit(lambda x, how="text": (x, how), in_shardings=(SPLIT,))
    assert places(jitted(ONES)) == places(jitted(ONES, "text")) == ["split", "text"]


def scale(x, y, factor=1.0, *, shift=None):
    return x * factor, y


class Scale(Module):
    factor: jax.Array

    def __call__(self, x, y):
        return self.factor * x, y

    method = __call__


CALLED = {
    "function": scale,
    "method": Scale(jnp.ones(4)).method,
    "Module": Scale(jnp.ones(4)),
    "transformed": filter_vmap(scale),
    "transformed method": filter_vmap(Scale(jnp.array(1.0)).method),
    "partial": functools.partial(scale, factor=jnp.ones(4)),
}


def test_fewer_or_more_in_shardings_than_arguments_are_an_error():
    words = r"has 1 entries, but this call of \w+ has 2 arguments to place: x, y\. Exp"
    for called in CALLED.values():
        jitted = filter_jit(called, in_shardings=(SPLIT,))
        for _ in range(2):
            with pytest.raises(ValueError, match=words):
                jitted(ONES, ONES)
        jitted = filter_jit(called, in_shardings=(SPLIT,) * 5)
        with pytest.raises(ValueError, match=r"has 5 entries, .* 2 arguments to place: x, y\."):
            jitted(ONES, ONES)
    # Each variadic argument needs an entry.
    jitted = filter_jit(lambda x, *more: (x, *more), in_shardings=(SPLIT, None))
    with pytest.raises(ValueError, match=r"has 3 arguments to place: x, more\[0\], more\[1\]\."):
        jitted(ONES, ONES, ONES)
    # A default needs an entry if the call passes it.
    jitted = filter_jit(lambda x, y=None: (x, y), in_shardings=(SPLIT,))
    jitted(ONES)
    with pytest.raises(ValueError, match=r"has 2 arguments to place: x, y\."):
        jitted(ONES, ONES)


def test_in_shardings_are_given_by_name():
    for called in CALLED.values():
        jitted = filter_jit(called, in_shardings={"y": SPLIT})
        for _ in range(2):
            x, y = jitted(ONES, ONES)
            assert place(y) == "split"
            assert place(x) != "elsewhere"
        assert place(jitted(y=ONES, x=ONES)[1]) == "split"
    bound = types.MethodType(lambda self, x: self, Affine(ONES, ONES))
    jitted = filter_jit(bound, in_shardings={"self": Affine(SPLIT, COPIED)})
    assert places(jitted(ONES)) == ["split", "whole"]


def test_in_shardings_by_name_apply_to_variadic_arguments():
    in_shardings = {"args": (None, SPLIT), "key": SPLIT, "options": {"a": COPIED, "b": None}}
    jitted = filter_jit(
        lambda *args, key, **options: (args, key, options), in_shardings=in_shardings
    )
    args, key, options = jitted(ONES, ONES, b=ONES, key=ONES, a=ONES)
    assert places([args[1], key, options["a"]]) == ["split", "split", "whole"]


def test_mismatched_shardings_are_an_error():
    message = r"scale has no parameter named 'z'; it has 'x', 'y', 'factor', 'shift'\."
    for called in (scale, filter_vmap(scale)):
        with pytest.raises(ValueError, match=message):
            filter_jit(called, in_shardings={"z": SPLIT})
    for options, message in (
        ({"in_shardings": {"x": {"a": SPLIT}}}, r"`in_shardings\['x'\]` is not a prefix"),
        ({"in_shardings": ({"a": SPLIT},)}, "in_shardings"),
        ({"out_shardings": {"a": SPLIT}}, "out_shardings"),
    ):
        with pytest.raises(ValueError, match=message):
            filter_jit(lambda x: (x, x), **options)(ONES)
    with pytest.raises(ValueError, match="in_shardings"):
        filter_jit(lambda x, y: x, in_shardings=({"a": SPLIT}, None))(ONES, ONES)


def test_out_shardings_are_a_prefix_of_the_output():
    for function, out_shardings, expected in (
        (lambda x: {"a": x, "b": (x + 1, "text")}, SPLIT, ["split", "split", "text"]),
        (lambda x: (x, x + 1), (SPLIT, COPIED), ["split", "whole"]),
        # None leaves the choice to the compiler.
        (lambda x: (x, x + 1), (COPIED, None), ["whole", "split"]),
        (lambda x: Affine(x, x), Affine(SPLIT, COPIED), ["split", "whole"]),
    ):
        jitted = filter_jit(function, in_shardings=SPLIT, out_shardings=out_shardings)
        for _ in range(3):
            assert places(jitted(ONES)) == expected
