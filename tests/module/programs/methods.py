"""Bound methods as pytrees, class and static methods, callables in a class body."""

import functools
import inspect
from typing import Any

import jax.numpy as jnp
import jax.tree_util as jtu

from tests.beside_equinox import error_of
from tests.module.programs.registry import program


def make(eqx):
    class Model(eqx.Module):
        weight: Any

        def scale(self, x: int = 2, /, *, shift: int = 0) -> int:
            """Scales."""
            return self.weight * x + shift

        def other(self):
            return self.weight

    return Model


def make_with_mixin(eqx):
    class Mixin:
        def scale(self, x, *, shift=0):
            return self.weight * x + shift

    class Model(Mixin, eqx.Module):
        weight: Any

    return Model


@program
def a_method_is_a_module(eqx):
    found = []
    for Model in (make(eqx), make_with_mixin(eqx)):
        model = Model(2)
        method = model.scale
        children, _ = eqx.tree_flatten_one_level(method)
        paths = [(jtu.keystr(path), leaf) for path, leaf in jtu.tree_leaves_with_path(method)]
        doubled = jtu.tree_map(lambda leaf: 2 * leaf, method)
        found += [
            (isinstance(method, eqx.Module), method(3, shift=1), doubled(3), paths),
            (len(children), children[0] is model, method.__self__ is model),
            (
                method.__func__ is Model.scale,
                inspect.isfunction(Model.scale),
                Model.scale(model, 3),
            ),
            error_of(setattr, method, "tag", 1),
        ]
    return found


@program
def methods_of_equal_instances_are_equal(eqx):
    Model = make(eqx)
    one, same, other = Model(2).scale, Model(2).scale, Model(3).scale
    structures = [jtu.tree_structure(each) for each in (one, other, Model(2).other)]
    arrays = [Model(jnp.array(value)).scale for value in (1.0, 1.0, 2.0)]
    return (
        [one == same, one == other, one == Model(2).other, hash(one) == hash(same)],
        [structures[0] == each for each in structures[1:]],
        [bool(arrays[0] == each) for each in arrays[1:]],
        ({Model(1).scale: "found"}[Model(1).scale], error_of(hash, arrays[0])),
    )


@program
def metadata_of_a_method(eqx):
    class Model(make(eqx)):
        def any(*args, key=None):
            pass

        def __call__(self):
            return 1

    method = Model(1).scale
    names = [
        (each.__name__, each.__doc__, each.__module__, each.__annotations__)
        for each in (method, functools.wraps(method)(lambda: None))
    ]
    signatures = [str(inspect.signature(each)) for each in (method, Model(1).any)]
    unwrapped = inspect.unwrap(method)(3)
    return names, signatures, method.__qualname__, inspect.ismethod(Model(1).__call__), unwrapped
