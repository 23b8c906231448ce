"""What every transformed function has, whatever the transformation."""

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


def test_is_a_pytree_with_the_metadata_of_what_it_wraps():
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
def test_what_is_no_function_is_an_error_that_names_the_transformation():
    for name, transform in {**WRAPPERS, **OF_FUNCTIONS, **OF_VALUES}.items():
        with pytest.raises(TypeError, match=f"3 is not a callable object: `{name}` expects"):
            transform(3)
    with pytest.raises(TypeError, match=r"`filter_custom_vjp\.defvjp` expects"):
        eqxlike.filter_custom_vjp(len).defvjp(3, len)
    for transform in (eqxlike.filter_checkpoint, eqxlike.filter_grad):
        with pytest.raises(TypeError, match="unexpected keyword argument 'foo'"):
            transform(double, foo=True)(TWO)
    # A decorator refuses its options before it gets a function.
    with pytest.raises(TypeError, match=r"filter_checkpoint: .*unexpected keyword argument 'foo'"):
        eqxlike.filter_checkpoint(foo=True)
    with pytest.raises(
        TypeError, match="filter_shard_map: missing a required argument: 'in_specs'"
    ):
        eqxlike.filter_shard_map(mesh=jax.make_mesh((1,), ("batch",)))
    # JAX itself refuses `reduce_axes`, but sees it only without a mode.
    with pytest.raises(TypeError, match="unexpected keyword argument 'reduce_axes'"):
        eqxlike.filter_grad(double, mode=eqxlike.ad.Forward(), reduce_axes=("batch",))
