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
    """How an array lies on the two devices."""
    if len(array.sharding.device_set) != 2:
        return "elsewhere"
    return "whole" if array.sharding.is_fully_replicated else "split"


def places(tree):
    """The places of the arrays of a tree, and what else is in it."""
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
    # None leaves an array where it is.
    jitted = filter_jit(give_both, in_shardings=(SPLIT, None))
    assert places(jitted(ONES, jax.device_put(ONES, COPIED))) == ["split", "whole"]
    # What is not an array is passed over.
    assert places(filter_jit(give_both, in_shardings=SPLIT)(ONES, "text")) == ["split", "text"]


def test_in_shardings_are_a_prefix_that_reaches_into_an_argument():
    jitted = filter_jit(lambda tree: tree, in_shardings=({"a": SPLIT, "b": COPIED},))
    tree = jitted({"a": (ONES, "text", jnp.ones(2)), "b": ONES})
    assert places(tree) == ["split", "text", "split", "whole"]
    jitted = filter_jit(lambda model: model, in_shardings=(Affine(SPLIT, COPIED),))
    assert places(jitted(Affine(ONES, ONES))) == ["split", "whole"]


def test_in_shardings_need_none_for_a_default_left_out_or_given_as_it_is():
    jitted = filter_jit(lambda x, how="text": (x, how), in_shardings=(SPLIT,))
    assert places(jitted(ONES)) == ["split", "text"]
    assert places(jitted(ONES, "text")) == ["split", "text"]


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
    for called in CALLED.values():
        jitted = filter_jit(called, in_shardings=(SPLIT,))
        for _ in range(2):
            with pytest.raises(
                ValueError,
                match=r"has 1 entries, but this call of \w+ has 2 arguments to place: x, y\. Exp",
            ):
                jitted(ONES, ONES)
        jitted = filter_jit(called, in_shardings=(SPLIT,) * 5)
        with pytest.raises(ValueError, match=r"has 5 entries, .* 2 arguments to place: x, y\."):
            jitted(ONES, ONES)
    # Variadic arguments have one for each.
    jitted = filter_jit(lambda x, *more: (x, *more), in_shardings=(SPLIT, None))
    with pytest.raises(ValueError, match=r"has 3 arguments to place: x, more\[0\], more\[1\]\."):
        jitted(ONES, ONES, ONES)
    # And so has a default that was given.
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


def test_in_shardings_by_name_place_the_instance_of_a_method_too():
    def method(self, x):
        return self

    bound = types.MethodType(method, Affine(ONES, ONES))
    jitted = filter_jit(bound, in_shardings={"self": Affine(SPLIT, COPIED)})
    assert places(jitted(ONES)) == ["split", "whole"]


def test_in_shardings_by_name_reach_into_variadic_arguments():
    in_shardings = {"args": (None, SPLIT), "key": SPLIT, "options": {"a": COPIED, "b": None}}
    jitted = filter_jit(
        lambda *args, key, **options: (args, key, options), in_shardings=in_shardings
    )
    args, key, options = jitted(ONES, ONES, b=ONES, key=ONES, a=ONES)
    assert places([args[1], key, options["a"]]) == ["split", "split", "whole"]


def test_an_unknown_name_in_in_shardings_is_an_error_that_lists_the_parameters():
    message = r"scale has no parameter named 'z'; it has 'x', 'y', 'factor', 'shift'\."
    for called in (scale, filter_vmap(scale)):
        with pytest.raises(ValueError, match=message):
            filter_jit(called, in_shardings={"z": SPLIT})


def test_shardings_that_are_no_prefix_are_an_error():
    jitted = filter_jit(lambda x: x, in_shardings={"x": {"a": SPLIT}})
    with pytest.raises(ValueError, match=r"`in_shardings\['x'\]` is not a prefix"):
        jitted(ONES)
    jitted = filter_jit(lambda x, y: x, in_shardings=({"a": SPLIT}, None))
    with pytest.raises(ValueError, match="in_shardings"):
        jitted(ONES, ONES)
    jitted = filter_jit(lambda x: (x, x), out_shardings={"a": SPLIT})
    with pytest.raises(ValueError, match="out_shardings"):
        jitted(ONES)


def test_out_shardings_are_a_prefix_of_the_output():
    for function, out_shardings, expected in (
        (lambda x: {"a": x, "b": (x + 1, "text")}, SPLIT, ["split", "split", "text"]),
        (lambda x: (x, x + 1), (SPLIT, COPIED), ["split", "whole"]),
        (lambda x: Affine(x, x), Affine(SPLIT, COPIED), ["split", "whole"]),
    ):
        assert places(filter_jit(function, out_shardings=out_shardings)(ONES)) == expected


def test_out_sharding_none_leaves_the_choice_to_the_compiler():
    x = jax.device_put(ONES, SPLIT)
    outputs = filter_jit(lambda x: (x, x + 1), out_shardings=(COPIED, None))(x)
    assert places(outputs) == ["whole", "split"]


def test_shardings_hold_for_warm_calls():
    jitted = filter_jit(lambda x: x + 1, in_shardings=SPLIT, out_shardings=COPIED)
    assert [place(jitted(ONES)) for _ in range(3)] == ["whole"] * 3
