"""Objects with their own `__call__`, `__hash__` or `__eq__`, and methods of plain objects."""

import dataclasses
import functools
import gc
import inspect
import threading
from unittest import mock

import jax
import jax.numpy as jnp

from eqxlike import Module, filter_grad, filter_jit
from eqxlike._partition import flatten, num_interned


def test_replaced_call_of_a_class_is_traced():
    class Model:
        def __call__(self, x):
            return 2 * x

    jitted = filter_jit(Model())
    assert jitted(1.0) == 2
    Model.__call__ = lambda self, x: 5 * x
    assert jitted(jnp.ones(())) == 5
    Model.__call__ = lambda self, x, y: x + y
    assert jitted(1.0, 2.0) == 3


def test_decorated_call_of_a_transformed_module_accepts_its_arguments():
    # As with jaxtyping's import hook, the signature ignores `__wrapped__` and has no `self`.
    def checked(function):
        @functools.wraps(function)
        def call(*args, **kwargs):
            return function(*args, **kwargs)

        vars(call)["__signature__"] = inspect.signature(lambda *args, **kwargs: None)
        return call

    class Model(Module):
        weight: float

        @checked
        def __call__(self, x, y):
            return self.weight * x**2 * y

    gradient = filter_jit(filter_grad(Model(3.0)))
    assert gradient(jnp.array(2.0), 1.0) == 12
    assert gradient(jnp.array(2.0), y=2.0) == 24


def test_subclass_of_partial_is_called_by_its_own_call():
    for base in (functools.partial, jax.tree_util.Partial):

        class Hundredfold(base):
            def __call__(self, *args):
                return 100 * super().__call__(*args)

        assert filter_jit(Hundredfold(lambda x, y: x * y, 2.0))(3.0) == 600


def test_mock_of_a_module_is_static():
    pretender = mock.Mock(spec=Module)
    assert filter_jit(lambda x, it: it is pretender)(jnp.ones(()), pretender)


def test_garbage_collection_does_not_call_eq():
    # If `__eq__` calls JAX while jaxlib records a traceback, jaxlib frees code that is in use.
    asked_by = []

    class Asking:
        def __init__(self, number):
            self.number = number

        def __eq__(self, other):
            asked_by.append(is_collecting)
            return self.number == other.number

        def __hash__(self):
            return 0

    is_collecting = False
    before = num_interned()
    for numbers in ((1, 2, 3), (3, 1)):
        structures = [flatten(Asking(number))[1] for number in numbers]
        assert len(set(structures)) == len(numbers)
        is_collecting = True
        del structures
        gc.collect()
        is_collecting = False
        assert num_interned() <= before
    assert set(asked_by) == {False}


def test_flattening_inside_eq_does_not_deadlock():
    done = []

    class Static:
        def __hash__(self):
            return 1

        def __eq__(self, other):
            # Garbage collection may flatten a tree at any time.
            flatten(("inner", len(done)))
            done.append(None)
            return True

    thread = threading.Thread(target=lambda: [flatten(Static()) for _ in range(3)], daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()
    assert done


# --- methods of objects that are not Modules ---


@dataclasses.dataclass(frozen=True)
class Frozen:
    """Has a generated `__hash__`, which raises an error if `scale` is an array."""

    scale: object

    def loss(self, x):
        return jnp.sum(x * self.scale)


@dataclasses.dataclass
class Unhashable:
    scale: object

    loss = Frozen.loss


class Plain:
    def __init__(self, scale):
        self.scale = scale

    loss = Frozen.loss


def test_repeated_calls_of_a_bound_method_are_traced_once():
    for cls in (Frozen, Unhashable, Plain):
        traces = []

        class Traced(cls):
            def loss(self, x, traces=traces):
                traces.append(None)
                return jnp.sum(x * self.scale)

        instance = Traced(jnp.full(3, 2.0))
        jitted = filter_jit(instance.loss)
        for _ in range(3):
            assert jitted(jnp.arange(3.0)) == 6
            assert filter_jit(instance.loss)(jnp.arange(3.0)) == 6
        assert len(traces) == 1


def test_instance_whose_hash_raises_is_static_by_identity():
    for error in (TypeError("no hash today"), ValueError("no hash today")):

        class Broken(Plain):
            def __hash__(self, error=error):
                raise error

        jitted = filter_jit(Broken(jnp.full(3, 2.0)).loss)
        assert [float(jitted(jnp.ones(3))) for _ in range(3)] == [6, 6, 6]
