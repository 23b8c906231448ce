"""Methods of objects that are no Modules: bound methods are hashable whatever they are bound to."""

import dataclasses
import functools
import sys

import equinox
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqxlike as eqx


@dataclasses.dataclass(frozen=True)
class Frozen:
    """Hashable to look at, but not with an array in it."""

    scale: object

    def loss(self, x):
        return jnp.sum(x * self.scale)


@dataclasses.dataclass
class Unhashable:
    scale: object

    def loss(self, x):
        return jnp.sum(x * self.scale)


class Plain:
    def __init__(self, scale):
        self.scale = scale

    def loss(self, x):
        return jnp.sum(x * self.scale)


CLASSES = pytest.mark.parametrize("cls", [Frozen, Unhashable, Plain])
USES = {
    "function": lambda library, f, x: library.filter_jit(f)(x),
    "argument": lambda library, f, x: library.filter_jit(lambda f, x: f(x))(f, x),
    "gradient": lambda library, f, x: library.filter_jit(library.filter_value_and_grad(f))(x)[1],
    "partial": lambda library, f, x: library.filter_jit(functools.partial(f))(x),
    "lowered": lambda library, f, x: library.filter_jit(f).lower(x).compile()(x),
}


@pytest.mark.parametrize("make_scale", [lambda: 2.0, lambda: jnp.full(3, 2.0)])
@pytest.mark.parametrize("use", USES.values(), ids=USES)
@CLASSES
def test_method_is_called_as_in_equinox(cls, use, make_scale):
    instance, x = cls(make_scale()), jnp.arange(3.0)
    ours, theirs = (use(library, instance.loss, x) for library in (eqx, equinox))
    np.testing.assert_array_equal(ours, theirs)


@CLASSES
def test_repeated_calls_are_traced_once(cls):
    traces = []

    class Traced(cls):
        def loss(self, x):
            traces.append(None)
            return super().loss(x)

    instance = Traced(jnp.full(3, 2.0))
    jitted = eqx.filter_jit(instance.loss)
    for _ in range(3):
        jitted(jnp.arange(3.0))
        eqx.filter_jit(instance.loss)(jnp.arange(3.0))
    assert len(traces) == 1


@pytest.mark.parametrize("cls", [Unhashable, Plain])
# A partial made anew is another one in Equinox.
@pytest.mark.parametrize("use", [name for name in USES if name != "partial"])
def test_instance_is_static_by_identity_as_in_equinox(cls, use):
    def outputs(library):
        instance, x = cls(2.0), jnp.arange(3.0)
        found = [USES[use](library, instance.loss, x)]
        instance.scale = 3.0
        return [*found, *(USES[use](library, each.loss, x) for each in (instance, cls(3.0)))]

    np.testing.assert_array_equal(outputs(eqx), outputs(equinox))


@pytest.mark.parametrize("library", [eqx, equinox])
def test_40_calls_of_a_method_of_an_object_that_appends_to_a_list_are_one_trace(library):
    count = 0

    class Trainer:
        def __init__(self):
            self.losses = []

        def loss(self, x):
            nonlocal count
            count += 1
            return jnp.sum(x)

    trainer = Trainer()
    for _ in range(40):
        trainer.losses.append(library.filter_jit(trainer.loss)(jnp.ones(3)))
    assert count == 1


def test_numpy_array_of_the_instance_is_not_read_by_a_warm_call(monkeypatch):
    monkeypatch.setattr("eqxlike._checking._depth", 0)
    instance = Plain(np.ones((2, 3), np.float32))
    jitted = eqx.filter_jit(instance.loss)
    x = jnp.ones((2, 3))
    jitted(x)
    called = []
    sys.setprofile(
        lambda frame, event, function: event == "c_call" and called.append(function.__name__)
    )
    try:
        jitted(x)
    finally:
        sys.setprofile(None)
    assert "tobytes" not in called
    assert len(called) < 20


def test_two_instances_are_not_taken_for_each_other():
    for cls in (Frozen, Unhashable, Plain):
        results = [
            float(eqx.filter_jit(cls(jnp.full(3, scale)).loss)(jnp.ones(3))) for scale in (1.0, 2.0)
        ]
        assert results == [3, 6]


@pytest.mark.parametrize("error", [TypeError, ValueError])
def test_instance_whose_hash_raises_is_static_by_identity(error):
    class Broken(Plain):
        def __hash__(self):
            raise error("no hash today")

    jitted = eqx.filter_jit(Broken(jnp.full(3, 2.0)).loss)
    assert [float(jitted(jnp.ones(3))) for _ in range(3)] == [6, 6, 6]


def test_unhashable_argument_that_is_not_bound_is_refused_as_before():
    with pytest.raises(TypeError, match="of type Unhashable, is not hashable"):
        eqx.filter_jit(lambda instance: 0)(Unhashable(2.0))


def test_gradient_of_a_method_is_that_of_the_function():
    instance = Frozen(jnp.arange(3.0))
    gradient = jax.jit(jax.grad(instance.loss))(jnp.ones(3))
    np.testing.assert_array_equal(
        eqx.filter_jit(eqx.filter_grad(instance.loss))(jnp.ones(3)), gradient
    )
