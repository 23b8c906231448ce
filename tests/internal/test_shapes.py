"""Functions run on shapes alone."""

import functools
import gc
import weakref

import jax
import jax.numpy as jnp

import eqxlike
from eqxlike import internal


def test_arrays_have_the_shapes_of_the_output_and_zeros_are_zeros():
    def function(x, y):
        return {"a": x, "b": [y > 0, x.astype(int)]}

    args = jnp.ones((2, 1)), jnp.ones(3)
    for name in ("eval_zero", "eval_empty"):
        found = getattr(internal, name)(function, *args)
        assert jax.eval_shape(lambda found=found: found) == jax.eval_shape(function, *args)
    assert internal.eval_zero(lambda x: x + 1, jnp.ones(2)).tolist() == [0, 0]


def test_leaves_that_are_no_arrays_stay():
    assert internal.eval_zero(lambda x: (x, "text", 1.0), jnp.array(1.0)) == (0, "text", 1.0)


def counted(function):
    def called(*args, **kwargs):
        called.count += 1
        return function(*args, **kwargs)

    called.count = 0
    return called


def test_equal_shapes_are_traced_once_and_others_again():
    function = counted(lambda x, n: (x[:n], n))
    first = ((jnp.ones(3), 2), {})
    others = [
        ((jnp.ones(3), 1), {}),
        ((jnp.ones(4), 2), {}),
        ((jnp.arange(3), 2), {}),
        ((jnp.ones(3),), {"n": 2}),
    ]
    for args, kwargs in [first, first, *others, first]:
        found = internal.cached_filter_eval_shape(function, *args, **kwargs)
        assert found == eqxlike.filter_eval_shape(lambda x, n: (x[:n], n), *args, **kwargs)
    assert function.count == 1 + len(others)


def test_wider_numbers_are_traced_again_and_a_returned_tree_is_a_new_one():
    def function():
        return {"a": jnp.zeros(())}

    found = internal.cached_filter_eval_shape(function)
    assert found.pop("a").dtype == jnp.float32
    assert internal.cached_filter_eval_shape(function).keys() == {"a"}
    with jax.enable_x64(True):
        assert internal.cached_filter_eval_shape(function)["a"].dtype == jnp.float64


def test_values_that_are_not_hashable_are_traced_each_time():
    class Unhashable:
        __hash__ = None

    function = counted(lambda x, other: x)
    for _ in range(2):
        internal.cached_filter_eval_shape(function, jnp.ones(2), Unhashable())
    assert function.count == 2


def test_static_values_that_are_changed_in_place_are_looked_at_anew():
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


def test_objects_of_one_call_stay_together():
    """As Optimistix has them: a partial equals no other, and is an example and an argument."""

    def shape_of_call():
        part = functools.partial(jnp.sum, axis=0)
        converted = eqxlike.filter_closure_convert(lambda part, x: part(x), part, jnp.ones((2, 3)))
        return internal.cached_filter_eval_shape(converted, part, jnp.ones((2, 3))).shape

    assert [shape_of_call(), shape_of_call()] == [(3,), (3,)]


def test_what_a_short_lived_function_closes_over_goes_with_it():
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
