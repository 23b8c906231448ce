"""`Partial`."""

import copy
import dataclasses
import functools
import inspect
import pickle
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu

from tests.module.programs.functions import affine, everything
from tests.module.programs.registry import program


@program
def partial_calls_with_what_it_has(eqx):
    partial = eqx.Partial(everything, 1, a=2)
    return partial(), partial(3, b=4), partial.func is everything, partial.args, partial.keywords


@program(differs="a keyword of the call replaces one given before, as in `functools.partial`")
def partial_keyword_given_twice(eqx):
    return eqx.Partial(everything, a=1)(a=2)


@program
def partial_keywords_of_any_name(eqx):
    return eqx.Partial(everything, self=1, func=2, args=3, keywords=4)()


@program(differs="as `functools.partial`, it takes any name by keyword")
def partial_called_with_a_keyword_named_self(eqx):
    return eqx.Partial(everything)(self=1)


@program
def partial_of_nothing(eqx):
    return eqx.Partial()


@program
def partial_function_by_keyword(eqx):
    return eqx.Partial(func=affine)


@program
def partial_of_what_cannot_be_called(eqx):
    return eqx.Partial(3)()


@program
def partial_is_a_module_and_no_functools_partial(eqx):
    partial = eqx.Partial(affine)
    return isinstance(partial, eqx.Module), isinstance(partial, functools.partial)


@program
def partial_fields(eqx):
    return [each.name for each in dataclasses.fields(eqx.Partial)], eqx.Partial.__match_args__


@program
def partial_signature_of_the_class(eqx):
    parameters = inspect.signature(eqx.Partial).parameters.values()
    return [(each.name, each.kind) for each in parameters]


@program
def partial_is_shown(eqx):
    return repr(eqx.Partial(affine, 1, shift=jnp.ones(2)))


@program
def partial_leaves_and_key_paths(eqx):
    partial = eqx.Partial(affine, 1, [2], shift=3)
    return [(jtu.keystr(path), leaf) for path, leaf in jtu.tree_leaves_with_path(partial)]


@program
def partial_equality(eqx):
    one = eqx.Partial(affine, 1, shift=2)
    others = [
        eqx.Partial(affine, *args, **kwargs) for args, kwargs in (((1,), {"shift": 2}), ((1,), {}))
    ]
    return [one == other for other in others]


@program(
    differs="the hash of a Module is that of its leaves, also where a dict is among its fields"
)
def partial_hash(eqx):
    return hash(eqx.Partial(affine, 1)) == hash(eqx.Partial(affine, 1))


@program
def partial_is_frozen(eqx):
    eqx.Partial(affine).func = everything


@program
def partial_copies(eqx):
    partial = eqx.Partial(affine, 2, shift=1)
    copies = copy.copy(partial), copy.deepcopy(partial), pickle.loads(pickle.dumps(partial))
    return [each(3) for each in copies], [each == partial for each in copies]


@program
def partial_of_partials(eqx):
    inner = functools.partial(affine, 2)
    return eqx.Partial(eqx.Partial(inner, 3), shift=1)(), eqx.Partial(eqx.Partial, affine, 2)(3)()


@program
def partial_of_a_method_and_of_a_module(eqx):
    class Model(eqx.Module):
        weight: Any

        def __call__(self, x):
            return self.weight * x

        def method(self, x):
            return self.weight + x

    model = Model(jnp.array(2.0))
    partials = eqx.Partial(model, 3.0), eqx.Partial(model.method, 3.0)
    doubled = jtu.tree_map(lambda x: 2 * x if eqx.is_array(x) else x, partials)
    return [float(each()) for each in (*partials, *doubled)]


@program
def partial_changed_by_tree_at(eqx):
    partial = eqx.tree_at(
        lambda partial: partial.keywords["shift"], eqx.Partial(affine, 1, shift=2), 5
    )
    return partial(1)


@program
def partial_is_transformed(eqx):
    partial = eqx.Partial(lambda scale, x: scale * x, jnp.array(3.0))
    return [
        float(eqx.filter_jit(partial)(jnp.array(2.0))),
        float(eqx.filter_jit(lambda partial, x: partial(x))(partial, jnp.array(2.0))),
        float(eqx.filter_grad(lambda partial: partial(2.0))(partial).args[0]),
        eqx.filter_vmap(partial)(jnp.arange(2.0)).tolist(),
        float(jax.jit(lambda args: eqx.Partial(partial.func, *args)(2.0))(partial.args)),
    ]


@program
def partial_is_traced_once_for_all_values(eqx):
    traces = []

    def scale(factor, x):
        traces.append(None)
        return factor * x

    outputs = [
        float(eqx.filter_jit(eqx.Partial(scale, jnp.array(factor)))(jnp.array(2.0)))
        for factor in (1.0, 2.0, 3.0)
    ]
    return outputs, len(traces)


@program
def partial_subclassed(eqx):
    class Named(eqx.Partial):
        name: str = "named"

    return Named(affine, 1)(2), Named(affine, 1).name


@program
def partial_in_the_body_of_a_class_is_not_bound(eqx):
    class Model(eqx.Module):
        method = eqx.Partial(everything, 1)

    return Model().method(2)


@program
def partial_parametrised(eqx):
    return eqx.Partial[int](affine, 1)(2)
