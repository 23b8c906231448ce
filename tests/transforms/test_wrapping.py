"""Wrappers of all transformations: metadata, methods and errors."""

import functools
import inspect
import pickle
from typing import Any

import equinox
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import pytest

import eqxlike
from tests.transforms.models import MESH, ROWS, Scale

TRANSFORMATIONS = ["filter_checkpoint", "filter_grad", "filter_jacfwd"]
DECORATED = ["filter_pmap", "filter_shard_map"]
WRAPPERS = {
    **{name: getattr(eqxlike, name) for name in (*TRANSFORMATIONS, "filter_pmap", "filter_jit")},
    "filter_shard_map": functools.partial(
        eqxlike.filter_shard_map, mesh=MESH, in_specs=ROWS, out_specs=ROWS
    ),
}
TWO, THREE = jnp.float32(2), jnp.float32(3)


def double(x, y: int = 3, *, key=None):
    """Doubles."""
    return 2 * x


def test_wrapper_is_a_pytree_with_the_metadata_of_the_function():
    for name, transform in WRAPPERS.items():
        transformed = transform(double)
        assert name not in DECORATED or repr(transform(len)) == f"{name}({len!r})"
        for attribute in ("__name__", "__qualname__", "__doc__", "__module__", "__annotations__"):
            assert getattr(transformed, attribute) == getattr(double, attribute)
        assert transformed.__wrapped__ is double
        assert inspect.signature(transformed) == inspect.signature(double)
        assert [*filter(eqxlike.is_array, jtu.tree_leaves(transform(Scale(TWO))))] == [TWO]
        assert transformed == transform(double)
        if name != "filter_shard_map":  # A mesh has devices, which cannot be pickled.
            assert transformed == pickle.loads(pickle.dumps(transformed))
        assert hash(transformed) == hash(transform(double))
        assert transformed != transform(sum)


def test_transformation_in_a_class_body_makes_a_method():
    def model_of(eqx, name):
        class Model(eqx.Module):
            weight: Any

            @getattr(eqx, name)
            def scale(self, x, *, offset):
                """Scales."""
                return self.weight * x + offset

        return Model(TWO)

    for name in TRANSFORMATIONS:
        model = model_of(eqxlike, name)
        function = lambda model, x, offset: model.weight * x + offset
        expected = getattr(eqxlike, name)(function)(model, THREE, TWO)
        assert eqxlike.tree_equal(model.scale(THREE, offset=TWO), expected)
        assert eqxlike.tree_equal(type(model).scale(model, THREE, offset=TWO), expected)
        assert (model.scale.__name__, model.scale.__doc__) == ("scale", "Scales.")
        assert list(inspect.signature(model.scale).parameters) == ["x", "offset"]
    with pytest.raises(TypeError, match="missing 1 required positional argument"):
        model_of(equinox, "filter_jacfwd").scale(THREE, offset=TWO)
    assert not hasattr(model_of(equinox, "filter_vmap").scale, "__name__")
    plain = type("Plain", (), {"scale": eqxlike.filter_grad(double)})()
    assert plain.scale.__self__ is plain
    assert type(plain).scale.__wrapped__ is double


OF_VALUES = {
    "filter_pure_callback": lambda f: eqxlike.filter_pure_callback(f, result_shape_dtypes=TWO),
    "filter_closure_convert": lambda f: eqxlike.filter_closure_convert(f, TWO),
    "filter_jvp": lambda f: eqxlike.filter_jvp(f, (TWO,), (TWO,)),
    "filter_vjp": lambda f: eqxlike.filter_vjp(f, TWO),
    "filter_custom_jvp.def_jvp": eqxlike.filter_custom_jvp(len).def_jvp,
    "filter_custom_jvp.defjvp": eqxlike.filter_custom_jvp(len).defjvp,
    "filter_custom_vjp.def_fwd": eqxlike.filter_custom_vjp(len).def_fwd,
    "filter_custom_vjp.def_bwd": eqxlike.filter_custom_vjp(len).def_bwd,
    "filter_custom_vjp.defvjp": lambda f: eqxlike.filter_custom_vjp(len).defvjp(len, f),
}
OTHERS = ["value_and_grad", "jacrev", "hessian", "vmap", "make_jaxpr", "custom_jvp", "custom_vjp"]
OF_FUNCTIONS = {f"filter_{name}": getattr(eqxlike, f"filter_{name}") for name in OTHERS}


@pytest.mark.filterwarnings("ignore:.*is deprecated")
def test_error_of_a_value_that_is_not_callable_names_the_transformation():
    for name, transform in {**WRAPPERS, **OF_FUNCTIONS, **OF_VALUES}.items():
        with pytest.raises(TypeError, match=f"3 is not a callable object: `{name}` expects"):
            transform(3)
    custom_vjp, grad = eqxlike.filter_custom_vjp(len), eqxlike.filter_grad
    mesh = jax.make_mesh((1,), ("batch",))
    for message, call in (
        (r"`filter_custom_vjp\.defvjp` expects", lambda: custom_vjp.defvjp(3, len)),
        ("keyword argument 'foo'", lambda: eqxlike.filter_checkpoint(double, foo=True)(TWO)),
        ("keyword argument 'foo'", lambda: grad(double, foo=True)(TWO)),
        # A decorator refuses wrong options before it is called with a function.
        ("filter_checkpoint: .*argument 'foo'", lambda: eqxlike.filter_checkpoint(foo=True)),
        ("filter_shard_map: .*required .*specs'", lambda: eqxlike.filter_shard_map(mesh=mesh)),
        # JAX refuses `reduce_axes`, but only without a mode.
        ("'reduce_axes'", lambda: grad(double, mode=eqxlike.ad.Forward(), reduce_axes=("x",))),
    ):
        with pytest.raises(TypeError, match=message):
            call()
