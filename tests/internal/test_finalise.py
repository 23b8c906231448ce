"""Finalised functions give the same output and only use primitives of JAX."""

import jax
import jax.numpy as jnp
import pytest

import eqxlike
from eqxlike import internal, loops

X = jnp.array(0.5)


def names_in(jaxpr):
    """The names of all primitives in a jaxpr, including inner jaxprs of loops and functions."""
    found = set()
    for equation in jaxpr.eqns:
        found.add(equation.primitive.name)
        for param in jax.tree.leaves(list(equation.params.values())):
            inner = getattr(param, "jaxpr", param)
            if hasattr(inner, "eqns"):
                found |= names_in(inner)
    return found


def refusals(x):
    x = internal.nondifferentiable_backward(internal.nontraceable(x))
    return internal.nonbatchable(internal.nondifferentiable(x))


@jax.custom_vjp
def with_gradient(x):
    return 2.0 * x


with_gradient.defvjp(lambda x: (2.0 * x, None), lambda _, cotangent: (cotangent,))

PROGRAMS = {
    "refusals": lambda x: refusals(x) + 1.0,
    "questions to a batch": lambda x: jnp.where(
        internal.unvmap_any(x > 0) & internal.unvmap_all(x > 0), x, internal.unvmap_max(x)
    ),
    "checks": lambda x: internal.error_if(x, x < 0, "negative"),
    "derivatives": lambda x: jax.nn.relu(x) + jax.lax.stop_gradient(x),
    "rows": lambda x: refusals(jnp.arange(3.0).at[jnp.array([0, 2])].add(x)[1] + x),
    "jit": lambda x: jax.jit(lambda x: refusals(x))(x),
    "checkpoint": lambda x: jax.checkpoint(lambda x: refusals(x))(x),
    "custom_vjp": lambda x: with_gradient(refusals(x)),
    "cond": lambda x: jax.lax.cond(x > 0, lambda x: refusals(x), lambda x: -x, x),
    "scan": lambda x: jax.lax.scan(lambda c, _: (refusals(c) + 1.0, None), x, None, length=3)[0],
    "vmap": lambda x: jax.vmap(internal.nondifferentiable)(x[None])[0],
    "announcements": lambda x: internal.announce_transform(x, announce=lambda text: None),
}


def of_all(x):
    return {name: program(x) for name, program in PROGRAMS.items()}


FINALISED = {
    "finalise_fn": lambda function: internal.finalise_fn(function),
    "finalise_jaxpr": lambda function: jax.extend.core.jaxpr_as_fun(
        internal.finalise_jaxpr(jax.make_jaxpr(function)(X))
    ),
}


@pytest.mark.parametrize("way", FINALISED)
def test_finalised_programs_give_the_same_output_without_our_primitives(way):
    finalised = FINALISED[way](of_all)
    names = names_in(jax.make_jaxpr(finalised)(X).jaxpr)
    assert jax.tree.leaves(jax.jit(finalised)(X)) == jax.tree.leaves(jax.jit(of_all)(X))
    assert names & {str(each) for each in internal.primitive_finalisations} == set()


def test_finalised_loop_has_no_primitive_of_ours():
    def function(x):
        return loops.while_loop(
            lambda c: c[0] < 3,
            lambda c: (c[0] + 1, c[1].at[c[0]].set(x)),
            (jnp.array(0), jnp.zeros(4)),
            max_steps=4,
            buffers=lambda c: c[1],
            kind="bounded",
        )[1]

    finalised = internal.finalise_make_jaxpr(function)(X)
    known = names_in(jax.make_jaxpr(jax.jit(lambda x: x))(X).jaxpr)
    primitives = vars(jax.extend.core.primitives).values()
    exported = {each.name for each in primitives if isinstance(each, jax.extend.core.Primitive)}
    assert names_in(finalised.jaxpr) <= exported | known
    assert jnp.array_equal(jax.extend.core.jaxpr_as_fun(finalised)(X)[0], function(X))


def test_registered_primitive_is_finalised():
    impl, abstract_eval = map(internal.filter_primitive_def, (lambda x: 2 * x, lambda x: x))
    primitive = internal.create_vprim("doubled", impl, abstract_eval, None, None)

    def names():
        bind = lambda x: internal.filter_primitive_bind(primitive, x)
        return names_in(internal.finalise_make_jaxpr(bind)(X).jaxpr)

    before = names()
    internal.register_impl_finalisation(primitive)
    assert (before, names()) == ({"doubled"}, {"mul"})


def test_finalised_function_keeps_trees_shapes_and_constants():
    assert internal.finalise_fn(lambda tree: {"b": 2 * tree["a"]})({"a": X}) == {"b": 2 * X}
    _, shape = internal.finalise_make_jaxpr(lambda x: {"a": x}, return_shape=True)(X)
    assert shape["a"].shape == ()
    jaxpr = jax.make_jaxpr(lambda x: x + jnp.arange(2.0))(jnp.ones(2))
    found = internal.finalise_eval_jaxpr(jaxpr.jaxpr, jaxpr.consts, jnp.ones(2))
    assert found[0].tolist() == [1.0, 2.0]


def test_finalised_check_still_fails():
    checked = internal.finalise_fn(lambda x: eqxlike.error_if(x, x > 0, "positive"))
    with pytest.raises(eqxlike.EqxlikeRuntimeError, match="positive"):
        eqxlike.filter_jit(checked)(X)
