"""Errors of `filter_vmap` and `filter_pmap` for wrong axes, arguments and options."""

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import pytest

from eqxlike import filter_pmap, filter_vmap

MATRIX = jnp.arange(6.0).reshape(2, 3)
TWO, THREE = jnp.ones(2), jnp.ones(3)


def identity(x, *others, y=1):
    return (x, *others) if others else x


def vmap(*args, **options):
    return lambda: filter_vmap(identity, **options)(*args)


def pmap(*args, **options):
    return lambda: filter_pmap(identity, **options)(*args)


def returning(output, **options):
    return lambda: filter_vmap(lambda x: output(x), **options)(MATRIX)


KINDS = "None, ints, and callables only; `{}` has"
TREE = {"a": [TWO, jnp.ones((2, 3))], "b": "text"}
MAPPED = {"a": 0, "b": None}
SIZES = (
    r"`filter_vmap` got inconsistent sizes.*\n"
    r"  \* size 2: axis 0 of args\[0\]\['a'\]\[0\], f32\[2\]; axis 0 of args\[0\]\['a'\]\[1\], "
    r"f32\[2,3\]\.\n  \* size 3: axis 1 of args\[1\], f32\[2,3\]\.\n"
)
LACKS = r"\['a'\] along axis {}, which implies that its rank should be at least {}, but is only {} "
UNMAPPED = r"^output\['b'\]\[1\] has no axis in `out_axes` \(axis spec .*pmean"
KEYWORDS = [(lambda: filter_vmap(identity)(MATRIX, y=MATRIX), "keyword arguments cannot be used")]
ARGUMENTS = [
    (vmap([TWO, "s"], in_axes=0), r"args\[0\]\[1\] = 's' of type <class 'str'>.*axis 0"),
    (returning(lambda x: {"a": "s"}, out_axes=1), r"output\['a'\] = 's' of type <class .*axis 1"),
    (lambda: filter_vmap(lambda x, y: x)(MATRIX), "missing 1 required positional argument: 'y'"),
    *((call(MATRIX, foo=True), "unexpected keyword argument 'foo'") for call in (vmap, pmap)),
]
AXES_AND_SIZES = [
    *((vmap(MATRIX, **{name: "a"}), KINDS.format(name)) for name in ("in_axes", "out_axes")),
    (vmap(MATRIX, in_axes=True), "True of type bool"),
    (vmap(MATRIX, in_axes=lambda leaf: "a"), "'a' of type str"),
    (vmap(MATRIX, in_axes=np.int64(0)), "of type int64"),
    (vmap(MATRIX, MATRIX, in_axes=(0,)), "`in_axes` is not a prefix of the tuple of arguments"),
    (
        vmap(MATRIX, MATRIX, out_axes=(0,)),
        "`out_axes` is not a prefix of what the function.*: it has 1 entries instead of 2",
    ),
    (vmap({"a": MATRIX}, in_axes=2), LACKS.format(2, 3, 2)),
    (vmap({"a": MATRIX}, in_axes=-3), LACKS.format(-3, 3, 2)),
    (vmap({"a": jnp.ones(())}, in_axes=0), LACKS.format(0, 1, 0)),
    *((vmap(MATRIX, out_axes=n), f"output along axis {n}: axis {n} is out of bo") for n in (2, -3)),
    (returning(lambda x: {"a": THREE, "b": [THREE, x]}, out_axes={"a": 0, "b": None}), UNMAPPED),
    (returning(lambda x: {"a": THREE, "b": [THREE, x]}, out_axes=None), r"\['b'\]\[1\] has no"),
    (vmap(TWO, TWO, in_axes={"z": None}), r"any argument: \('z',\).* are 'x', 'others'\."),
    (vmap(TWO, TWO, in_axes={"y": None}), r"any argument: \('y',\).* are 'x', 'others'\."),
    (lambda: filter_vmap(lambda: 1, in_axes={"x": None})(), "given by this call are none"),
    (vmap(TREE, MATRIX, in_axes={"x": MAPPED, "others": (1,)}), SIZES),
    (vmap([TWO] * 8, THREE), r"args\[0\]\[2\], f32\[2\]; 5 more\.\n"),
    (vmap([TWO] * 3, THREE), r"args\[0\]\[2\], f32\[2\]\.\n"),
    (vmap(TWO, axis_size=5), r"  \* the `axis_size` argument was 5;\n  \* size 2"),
    (vmap(MATRIX, in_axes=None), "Cannot resolve batch dimension"),
    (pmap(MATRIX, THREE), "inconsistent sizes.*size 2.*size 3"),
    (pmap(THREE), "2 devices|partitioned 2 times"),
    *((pmap(argument, in_axes=None), "axis_size") for argument in (MATRIX, "text")),
    (
        pmap(MATRIX, devices=jax.devices()[:1]),
        "axes of size 2, one index for each device, but there are only 1 devices",
    ),
    *((pmap(MATRIX, donate=word), "must be one of 'all', 'warn'") for word in ("some", ("x",))),
    (pmap(MATRIX, static_broadcasted_argnums=0), "static_broadcasted_argnums"),
    (pmap(MATRIX, donate_argnums=0), "donate_argnums"),
]
MISFITS = {RuntimeError: KEYWORDS, TypeError: ARGUMENTS, ValueError: AXES_AND_SIZES}


@pytest.mark.parametrize(
    ("error", "provoke", "message"),
    [(error, *row) for error, rows in MISFITS.items() for row in rows],
)
def test_error_names_the_axis_argument_or_option_and_its_path(error, provoke, message):
    with pytest.raises(error, match=f"(?s){message}"):
        provoke()


@jtu.register_pytree_with_keys_class
class Checked:
    """A node that accepts only arrays as children."""

    def __init__(self, *children):
        assert all(isinstance(child, jax.Array) for child in children)
        self.children = children

    def tree_flatten_with_keys(self):
        return [(jtu.SequenceKey(i), child) for i, child in enumerate(self.children)], None

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls(*children)


def test_error_names_the_path_in_a_node_that_checks_its_children():
    with pytest.raises(ValueError, match=r"axis 0 of args\[0\]\[1\], f32\[3\]"):
        filter_vmap(lambda x: None)(Checked(TWO, THREE))
