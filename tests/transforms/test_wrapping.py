"""What every transformed function has, whatever the transformation."""

import inspect
import pickle
from typing import Any

import equinox
import jax.numpy as jnp
import jax.tree_util as jtu
import pytest

import eqxlike

TRANSFORMATIONS = ["filter_checkpoint", "filter_grad", "filter_jacfwd"]
TWO, THREE = jnp.float32(2), jnp.float32(3)


def double(x, y: int = 3, *, key=None):
    """Doubles."""
    return 2 * x


class Model(eqxlike.Module):
    weight: Any

    def __call__(self, x):
        return self.weight * x


def test_is_a_pytree_with_the_metadata_of_what_it_wraps():
    for name in TRANSFORMATIONS:
        transform = getattr(eqxlike, name)
        transformed = transform(double)
        for attribute in ("__name__", "__qualname__", "__doc__", "__module__", "__annotations__"):
            assert getattr(transformed, attribute) == getattr(double, attribute)
        assert transformed.__wrapped__ is double
        assert inspect.signature(transformed) == inspect.signature(double)
        assert jtu.tree_leaves(transform(Model(TWO))) == [TWO]
        assert transformed == transform(double) == pickle.loads(pickle.dumps(transformed))
        assert hash(transformed) == hash(transform(double))
        assert transformed != transform(sum)


def test_is_a_method_in_the_body_of_a_class():
    for name in TRANSFORMATIONS:
        transform = getattr(eqxlike, name)

        class Scale(eqxlike.Module):
            weight: Any

            @transform
            def scale(self, x, *, offset):
                """Scales."""
                return self.weight * x + offset

        scale = Scale(TWO)
        expected = transform(lambda scale, x, offset: scale.weight * x + offset)(scale, THREE, TWO)
        assert eqxlike.tree_equal(scale.scale(THREE, offset=TWO), expected)
        assert eqxlike.tree_equal(Scale.scale(scale, THREE, offset=TWO), expected)
        assert (scale.scale.__name__, scale.scale.__doc__) == ("scale", "Scales.")
        assert list(inspect.signature(scale.scale).parameters) == ["x", "offset"]


def test_is_a_method_in_the_body_of_any_class():
    class Plain:
        scale = eqxlike.filter_grad(double)

    plain = Plain()
    assert plain.scale.__self__ is plain
    assert Plain.scale.__wrapped__ is double


def test_methods_of_equinox_lose_the_instance():
    class Theirs(equinox.Module):
        scale = equinox.filter_jacfwd(lambda self, x: x)

    with pytest.raises(TypeError, match="missing 1 required positional argument"):
        Theirs().scale(THREE)
