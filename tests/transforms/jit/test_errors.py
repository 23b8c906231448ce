"""Errors: what the user sees, and that a function that failed once is as good as any after."""

import gc
import os
import sys
import traceback

import jax
import jax.numpy as jnp
import pytest

from eqxlike import (
    Module,
    checking_partitions,
    field,
    filter_grad,
    filter_jit,
    filter_value_and_grad,
    filter_vmap,
)


class Pair(Module):
    left: object
    right: object = None
    mode: object = field(static=True, default="a")


class Boom(Exception):
    pass


class Switch:
    """A function that fails as long as it is told to, and counts how often it was traced."""

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


ARGUMENTS = {
    "array": lambda: jnp.ones(2),
    "module": lambda: Pair(jnp.ones(2), (jnp.ones(3), "a")),
    "module-with-list": lambda: Pair([jnp.ones(2)], {"a": jnp.ones(3)}),
    "tuple": lambda: (jnp.ones(2), None, "a"),
    "nothing": lambda: "a",
}


def frames_of_warm_call(function, *args):
    """The functions in Python that a call goes through, by file and name."""
    frames = []

    def note(frame, event, _):
        if event == "call":
            frames.append((frame.f_code.co_filename.split("#")[0], frame.f_code.co_name))

    before = sys.getprofile()
    # The collector may come at any moment, and those who listen to it are Python.
    gc.disable()
    sys.setprofile(note)
    try:
        function(*args)
    finally:
        sys.setprofile(before)
        gc.enable()
    return frames


def failed_then_right(tree, times=1):
    switch = Switch()
    jitted = filter_jit(switch.function())
    for _ in range(times):
        with pytest.raises(Boom, match="told to fail"):
            jitted(tree)
    switch.fails = False
    return switch, jitted


@pytest.mark.parametrize("name", ARGUMENTS)
def test_success_after_failure_gives_the_right_result(name):
    tree = ARGUMENTS[name]()
    _, jitted = failed_then_right(tree)
    for _ in range(3):
        assert repr(jitted(tree)) == repr(tree)


@pytest.mark.parametrize("name", ARGUMENTS)
def test_success_after_failure_is_one_trace_more(name):
    tree = ARGUMENTS[name]()
    switch, jitted = failed_then_right(tree)
    for _ in range(3):
        jitted(tree)
    assert switch.count == 2


@pytest.mark.parametrize("times", [1, 5])
@pytest.mark.parametrize("name", ARGUMENTS)
def test_warm_call_after_failure_takes_the_way_of_one_that_never_failed(name, times):
    tree = ARGUMENTS[name]()
    _, failed = failed_then_right(tree, times)
    fine = filter_jit(lambda tree: tree)
    for _ in range(3):
        failed(tree), fine(tree)
    assert frames_of_warm_call(failed, tree) == frames_of_warm_call(fine, tree)


@pytest.mark.parametrize("name", ARGUMENTS)
def test_warm_call_after_failure_enters_no_python_of_jax(name):
    tree = ARGUMENTS[name]()
    _, jitted = failed_then_right(tree)
    for _ in range(3):
        jitted(tree)
    # In Python, JAX may walk over trees; it may not call its function.
    package = os.path.dirname(jax.__file__)
    files = {os.path.relpath(file, package) for file, _ in frames_of_warm_call(jitted, tree)}
    assert {file for file in files if not file.startswith("..")} <= {"_src/tree_util.py"}


def test_way_of_jax_for_a_function_that_failed_would_be_seen():
    # What the test above looks for is there where `jax.jit` has failed once.
    switch = Switch()
    jitted = jax.jit(switch.function())
    with pytest.raises(Boom):
        jitted(jnp.ones(2))
    switch.fails = False
    for _ in range(3):
        jitted(jnp.ones(2))
    package = os.path.dirname(jax.__file__)
    assert [file for file, _ in frames_of_warm_call(jitted, jnp.ones(2)) if package in file]


def test_failure_for_one_shape_leaves_the_other_right():
    def function(x):
        if x.shape == (2,):
            raise Boom
        return 2 * x

    jitted = filter_jit(function)
    for _ in range(2):
        assert (jitted(jnp.ones(3)) == 2).all()
        with pytest.raises(Boom):
            jitted(jnp.ones(2))


def test_failure_for_one_shape_leaves_warm_calls_of_another_on_the_fast_path():
    def function(x):
        if x.shape == (2,):
            raise Boom
        return 2 * x

    jitted, fine = filter_jit(function), filter_jit(lambda x: 2 * x)
    jitted(jnp.ones(3))
    with pytest.raises(Boom):
        jitted(jnp.ones(2))
    for _ in range(3):
        jitted(jnp.ones(3)), fine(jnp.ones(3))
    x = jnp.ones(3)
    assert frames_of_warm_call(jitted, x) == frames_of_warm_call(fine, x)


def test_failure_for_one_static_leaves_the_other_traced():
    count = 0

    def function(x, how):
        nonlocal count
        count += 1
        if how == "fail":
            raise Boom
        return 2 * x

    jitted = filter_jit(function)
    for _ in range(3):
        jitted(jnp.ones(2), "work")
        with pytest.raises(Boom):
            jitted(jnp.ones(2), "fail")
    assert count == 1 + 3


def test_failure_inside_an_inner_function_leaves_both_on_the_fast_path():
    switch = Switch()
    inner = filter_jit(switch.function())
    outer = filter_jit(lambda x: inner(x))
    fine_inner = filter_jit(lambda tree: tree)
    fine = filter_jit(lambda x: fine_inner(x))
    with pytest.raises(Boom):
        outer(jnp.ones(2))
    switch.fails = False
    for _ in range(3):
        outer(jnp.ones(2)), fine(jnp.ones(2)), inner(jnp.ones(2)), fine_inner(jnp.ones(2))
    x = jnp.ones(2)
    assert frames_of_warm_call(outer, x) == frames_of_warm_call(fine, x)
    assert frames_of_warm_call(inner, x) == frames_of_warm_call(fine_inner, x)


def test_keyboard_interrupt_while_tracing_then_success():
    switch = Switch()

    def function(x):
        if switch.fails:
            raise KeyboardInterrupt
        return 2 * x

    jitted, fine = filter_jit(function), filter_jit(lambda x: 2 * x)
    with pytest.raises(KeyboardInterrupt):
        jitted(jnp.ones(2))
    switch.fails = False
    x = jnp.ones(2)
    for _ in range(3):
        jitted(x), fine(x)
    assert frames_of_warm_call(jitted, x) == frames_of_warm_call(fine, x)


def test_unhashable_argument_then_a_right_one():
    jitted = filter_jit(lambda tree: tree)
    with pytest.raises(TypeError, match="not hashable"):
        jitted({1})
    assert jitted("a") == "a"


def test_failure_while_lowering_then_success():
    switch = Switch()
    jitted = filter_jit(switch.function())
    with pytest.raises(Boom):
        jitted.lower(jnp.ones(2))
    switch.fails = False
    assert (jitted.lower(jnp.ones(2)).compile()(jnp.ones(2)) == 1).all()


def test_failure_in_a_callback_at_run_time_then_success():
    fails = True

    def check(x):
        if fails:
            raise Boom("at run time")
        return x

    @filter_jit
    def function(x):
        return jax.pure_callback(check, jax.ShapeDtypeStruct((2,), jnp.float32), x)

    with pytest.raises(Exception, match="at run time"):
        jax.block_until_ready(function(jnp.ones(2)))
    fails = False
    assert (function(jnp.ones(2)) == 1).all()


# What the user sees.


def fail(x):
    y = x + 1
    raise Boom(f"the line of the user {y.shape}")


class Model(Module):
    weight: object

    def __call__(self, x):
        return fail(self.weight * x)

    @filter_jit
    def apply(self, x):
        return fail(self.weight * x)


@jax.tree_util.Partial
def fails_in_partial(x):
    return fail(x)


def warm(jitted):
    """Calls of other shapes went well, so that the failing one comes by the fast path."""

    def function(x):
        return 2 * x if x.shape == (3,) else fail(x)

    call = filter_jit(function)
    for _ in range(3):
        call(jnp.ones(3))
    return call


FAILING = {
    "function": lambda x: filter_jit(fail)(x),
    "keyword": lambda x: filter_jit(fail)(x=x),
    "module": lambda x: filter_jit(Model(jnp.ones(2)))(x),
    "module-with-list": lambda x: filter_jit(Model([jnp.ones(2)][0]))(x),
    "method": lambda x: Model(jnp.ones(2)).apply(x),
    "partial": lambda x: filter_jit(fails_in_partial)(x),
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
    "out-shardings": lambda x: filter_jit(
        fail, out_shardings=jax.sharding.SingleDeviceSharding(jax.devices()[0])
    )(x),
}


def traceback_of(function):
    with pytest.raises(Boom) as raised:
        function(jnp.ones(2))
    return traceback.extract_tb(raised.value.__traceback__)


@pytest.mark.parametrize("name", FAILING)
def test_line_of_the_user_is_the_last_of_the_traceback(name):
    last = traceback_of(FAILING[name])[-1]
    assert (last.filename, last.line) == (__file__, 'raise Boom(f"the line of the user {y.shape}")')


@pytest.mark.parametrize("name", FAILING)
def test_no_frame_of_ours_is_in_the_traceback(name):
    files = [frame.filename for frame in traceback_of(FAILING[name])]
    assert [file for file in files if "eqxlike" in file.replace(__file__, "")] == []


@pytest.mark.parametrize("name", FAILING)
def test_error_has_neither_cause_nor_context(name):
    with pytest.raises(Boom) as raised:
        FAILING[name](jnp.ones(2))
    assert raised.value.__cause__ is None
    assert raised.value.__context__ is None


def test_error_in_checking_mode_shows_no_frame_of_ours():
    with checking_partitions():
        files = [frame.filename for frame in traceback_of(FAILING["function"])]
    assert [file for file in files if "eqxlike" in file.replace(__file__, "")] == []


def test_all_frames_are_there_where_jax_shows_its_own():
    filtering = jax.config.jax_traceback_filtering
    jax.config.update("jax_traceback_filtering", "off")
    try:
        files = [frame.filename for frame in traceback_of(FAILING["function"])]
    finally:
        jax.config.update("jax_traceback_filtering", filtering)
    assert [file for file in files if "eqxlike" in file.replace(__file__, "")] != []


def test_frames_of_the_caller_are_all_there():
    def outer(x):
        return middle(x)

    def middle(x):
        return filter_jit(fail)(x)

    names = [frame.name for frame in traceback_of(outer)]
    assert names[-3:] == ["outer", "middle", "fail"]


def test_jax_error_of_a_value_dependent_function_shows_the_line_of_the_user():
    def function(x):
        return x if x > 0 else -x

    with pytest.raises(jax.errors.TracerBoolConversionError) as raised:
        filter_jit(function)(jnp.array(1.0))
    assert traceback.extract_tb(raised.value.__traceback__)[-1].name == "function"


# Errors that name a path.


def test_unhashable_static_leaf_names_its_path():
    tree = {"a": [1, Pair(jnp.ones(2), {1})]}
    with pytest.raises(TypeError, match=r"\['a'\]\[1\]\.right.*set.*not hashable"):
        filter_jit(lambda tree: tree)(tree)


def test_unhashable_static_leaf_of_an_argument_passed_by_name_names_its_path():
    with pytest.raises(TypeError, match=r"\[1\].*set.*not hashable"):
        filter_jit(lambda x, tree: x)(jnp.ones(2), tree=(1, {1}))


@pytest.mark.parametrize("value", [jnp.ones(2), (1, jnp.ones(2))], ids=["array", "in-a-tuple"])
def test_array_in_a_static_field_names_the_field(value):
    with pytest.raises(TypeError, match=r"Pair\.mode"):
        Pair(1, mode=value)


def leaked():
    kept = []
    filter_jit(lambda x: kept.append(Pair({"a": x})))(jnp.ones(2))
    return kept[0]


def test_tracer_that_leaked_into_a_module_is_an_error_of_jax():
    with pytest.raises(jax.errors.UnexpectedTracerError):
        filter_jit(lambda module: module.left)(leaked())


def test_tracer_that_leaked_into_a_module_names_its_path():
    with pytest.raises(jax.errors.UnexpectedTracerError, match=r"\.left\['a'\]"):
        filter_jit(lambda module: module.left)(leaked())


def test_tracer_that_leaked_into_a_module_names_its_path_in_a_warm_call():
    jitted = filter_jit(lambda module: module.left)
    for _ in range(3):
        jitted(Pair({"a": jnp.ones(2)}))
    with pytest.raises(jax.errors.UnexpectedTracerError, match=r"\.left\['a'\]"):
        jitted(leaked())


def test_good_call_after_one_with_a_leaked_tracer_is_right():
    jitted = filter_jit(lambda module: module.left)
    with pytest.raises(jax.errors.UnexpectedTracerError):
        jitted(leaked())
    assert (jitted(Pair({"a": jnp.ones(2)}))["a"] == 1).all()
