"""Errors of `filter_jit`: tracebacks, notes, and calls after a failure."""

import os
import traceback

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqxlike import Module, Partial, filter_grad, filter_jit, filter_value_and_grad, filter_vmap
from tests.partition.models import Pair
from tests.transforms.jit.models import calls_of


class Boom(Exception):
    pass


class Switch:
    """Makes a function that raises an error while `fails` is true, and counts its traces."""

    def __init__(self):
        self.fails = True
        self.count = 0

    def function(self):
        def switched(tree):
            self.count += 1
            if self.fails:
                raise Boom("told to fail")
            return tree

        return switched


ARGUMENTS = [jnp.ones(2), Pair(jnp.ones(2), "a"), Pair([jnp.ones(2)], {"a": jnp.ones(3)}), "a"]


def test_call_after_a_failed_trace_is_correct_and_as_fast_as_without_the_failure():
    for tree in ARGUMENTS:
        switch = Switch()
        jitted = filter_jit(switch.function())
        for _ in range(2):
            with pytest.raises(Boom, match="told to fail"):
                jitted(tree)
        switch.fails = False
        fine = filter_jit(lambda tree: tree)
        for _ in range(3):
            assert repr(jitted(tree)) == repr(fine(tree)) == repr(tree)
        assert switch.count == 3
        frames = calls_of(jitted, tree)
        assert frames == calls_of(fine, tree)
        # The Python functions of JAX in a warm call only flatten trees.
        package = os.path.dirname(jax.__file__)
        files = {os.path.relpath(file, package) for file, _ in frames if file != "C"}
        assert {file for file in files if not file.startswith("..")} <= {"_src/tree_util.py"}


# --- the traceback and its notes ---


def fail(x):
    y = x + 1
    raise Boom(f"the line of the user {y.shape}")


class Model(Module):
    weight: object

    def __call__(self, x):
        return fail(self.weight * x)

    def call(self, x):
        return self(x)

    @filter_jit
    def apply(self, x):
        return self.call(x)


def warm(jitted):
    """A function with earlier calls of another shape. The failing call tries the fast path."""

    def function(x):
        return 2 * x if x.shape == (3,) else fail(x)

    call = filter_jit(function)
    for _ in range(3):
        call(jnp.ones(3))
    return call


DEVICE = jax.sharding.SingleDeviceSharding(jax.devices()[0])
FAILING = {
    "function": lambda x: filter_jit(fail)(x),
    "keyword": lambda x: filter_jit(fail)(x=x),
    "eager": lambda x: Partial(Model(jnp.ones(2)).call)(x),
    "module": lambda x: filter_jit(Model(jnp.ones(2)))(x),
    "method": lambda x: Model(jnp.ones(2)).apply(x),
    "nested": lambda x: filter_jit(lambda x: filter_jit(fail)(x))(x),
    "warm": lambda x: warm(fail)(x),
    "grad": lambda x: filter_jit(filter_grad(fail))(x),
    "value-and-grad": lambda x: filter_jit(filter_value_and_grad(fail))(x),
    "vmap": lambda x: filter_jit(filter_vmap(fail))(x),
    "jax-grad": lambda x: jax.grad(filter_jit(fail))(x),
    "jax-vmap": lambda x: jax.vmap(filter_jit(fail))(x),
    "jax-jit": lambda x: jax.jit(filter_jit(fail))(x),
    "lower": lambda x: filter_jit(fail).lower(x),
    "donated": lambda x: filter_jit(fail, donate="all")(x),
    "out-shardings": lambda x: filter_jit(fail, out_shardings=DEVICE)(x),
}


def traceback_of(function):
    with pytest.raises(Boom) as raised:
        function(jnp.ones(2))
    assert raised.value.__cause__ is raised.value.__context__ is None
    return traceback.extract_tb(raised.value.__traceback__)


def test_traceback_ends_at_the_line_of_the_user_without_frames_of_the_package():
    for name, failing in FAILING.items():
        frames = traceback_of(failing)
        assert (frames[0].name, frames[-1].filename) == ("traceback_of", __file__)
        assert frames[-1].line == 'raise Boom(f"the line of the user {y.shape}")'
        assert files_of_ours(frames) == [], name


def files_of_ours(frames):
    return [each.filename for each in frames if "eqxlike" in each.filename.replace(__file__, "")]


def test_traceback_has_all_frames_if_jax_shows_its_own():
    filtering = jax.config.jax_traceback_filtering
    jax.config.update("jax_traceback_filtering", "off")
    try:
        assert files_of_ours(traceback_of(FAILING["function"])) != []
    finally:
        jax.config.update("jax_traceback_filtering", filtering)


def test_error_of_a_leaked_tracer_in_a_module_names_its_path():
    kept = []
    filter_jit(lambda x: kept.append(Pair({"a": x})))(jnp.ones(2))
    for num_calls in (0, 3):
        jitted = filter_jit(lambda module: module.left)
        for _ in range(num_calls):
            jitted(Pair({"a": jnp.ones(2)}))
        with pytest.raises(jax.errors.UnexpectedTracerError, match=r"\.left\['a'\]"):
            jitted(kept[0])


STRINGS = [
    (np.array(["a", "b"]), "<U1"),
    (np.array([b"a"]), "|S1"),
    (np.array(["a", None], object), "object"),
    (np.array("2020-01-01", "datetime64[D]"), "datetime64[D]"),
    (np.str_("a"), "<U1"),
]


def warm_call(tree):
    jitted = filter_jit(lambda model: model)
    for _ in range(3):
        jitted(Pair({"a": jnp.ones(2), "b": np.ones(2)}))
    jitted(tree)


CALLS = {
    "warm": warm_call,
    "cold": lambda tree: filter_jit(lambda x, model: x)(1.0, tree),
    "by name": lambda tree: filter_jit(lambda x, *, model: x)(1.0, model=tree),
    "nested": lambda tree: filter_jit(filter_grad(lambda model: model.left["a"].sum()))(tree),
    "lower": lambda tree: filter_jit(lambda model: model).lower(tree),
}


def test_error_of_an_array_without_numbers_names_path_and_dtype():
    for call in CALLS.values():
        for array, dtype in STRINGS:
            with pytest.raises(TypeError) as caught:
                call(Pair({"a": jnp.ones(2), "b": array}))
            expected = (
                f"are arrays without numbers: model.left['b'] ({dtype}). Pass numbers, or kee"
            )
            assert expected in "\n".join(caught.value.__notes__)


def test_error_of_a_branch_on_a_tracer_names_the_argument():
    def inner(model, x, *, y):
        return 1 if y > 0 else 2

    outer = filter_jit(lambda z: filter_jit(inner)({"a": z}, z, y=z))
    with pytest.raises(jax.errors.TracerBoolConversionError) as caught:
        outer(jnp.ones(()))
    notes = [each for each in caught.value.__notes__ if "arrays[" in each]
    assert [each.rpartition(", ")[2] for each in notes] == ["arrays[2] is y."]
