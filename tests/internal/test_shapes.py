"""Functions that are evaluated abstractly, on shapes and dtypes."""

import functools
import gc
import weakref

import jax
import jax.numpy as jnp

import eqxlike
from eqxlike import internal


def test_eval_zero_and_eval_empty_give_arrays_and_keep_other_leaves():
    def function(x, y):
        return {"a": x, "b": [y > 0, x.astype(int)]}

    args = jnp.ones((2, 1)), jnp.ones(3)
    for name in ("eval_zero", "eval_empty"):
        found = getattr(internal, name)(function, *args)
        assert jax.eval_shape(lambda found=found: found) == jax.eval_shape(function, *args)
    assert internal.eval_zero(lambda x: x + 1, jnp.ones(2)).tolist() == [0, 0]
    assert internal.eval_zero(lambda x: (x, "text", 1.0), jnp.array(1.0)) == (0, "text", 1.0)


def counted(function):
    def called(*args, **kwargs):
        called.count += 1
        return function(*args, **kwargs)

    called.count = 0
    return called


def test_equal_shapes_share_a_trace_and_other_shapes_do_not():
    function = counted(lambda x, n: (x[:n], n))
    first = ((jnp.ones(3), 2), {})
    others = [((array, 2), {}) for array in (jnp.ones(4), jnp.arange(3))]
    others += [((jnp.ones(3), 1), {}), ((jnp.ones(3),), {"n": 2})]
    for args, kwargs in [first, first, *others, first]:
        found = internal.cached_filter_eval_shape(function, *args, **kwargs)
        assert found == eqxlike.filter_eval_shape(lambda x, n: (x[:n], n), *args, **kwargs)
    assert function.count == 1 + len(others)


def test_enable_x64_traces_again_and_each_returned_tree_is_new():
    def function():
        return {"a": jnp.zeros(())}

    found = internal.cached_filter_eval_shape(function)
    assert found.pop("a").dtype == jnp.float32
    assert internal.cached_filter_eval_shape(function).keys() == {"a"}
    with jax.enable_x64(True):
        assert internal.cached_filter_eval_shape(function)["a"].dtype == jnp.float64


def test_unhashable_values_are_traced_each_time():
    class Unhashable:
        __hash__ = None

    function = counted(lambda x, other: x)
    for _ in range(2):
        internal.cached_filter_eval_shape(function, jnp.ones(2), Unhashable())
    assert function.count == 2


def test_change_in_place_of_a_static_value_is_seen():
    class Sized(eqxlike.Module):
        sizes: list[int] = eqxlike.field(static=True)

        def __call__(self):
            return jnp.zeros(self.sizes)

    def shapes(*modules):
        return [internal.cached_filter_eval_shape(module).shape for module in modules]

    changed, same = Sized([1]), Sized([1])
    before = shapes(changed, same)
    changed.sizes[0] = 2
    assert (before, shapes(changed, same)) == ([(1,), (1,)], [(2,), (1,)])


def test_object_that_is_both_example_and_argument_is_recognised():
    """Optimistix passes a partial, which is compared by identity, as example and as argument."""

    def shape_of_call():
        part = functools.partial(jnp.sum, axis=0)
        converted = eqxlike.filter_closure_convert(lambda part, x: part(x), part, jnp.ones((2, 3)))
        return internal.cached_filter_eval_shape(converted, part, jnp.ones((2, 3))).shape

    assert [shape_of_call(), shape_of_call()] == [(3,), (3,)]


def test_cache_keeps_no_closed_over_value_alive():
    class Held:
        pass

    def closing_over(held):
        return lambda x: (held, x)[1]

    held = Held()
    gone = weakref.ref(held)
    internal.cached_filter_eval_shape(closing_over(held), jnp.ones(2))
    del held
    gc.collect()
    assert gone() is None
