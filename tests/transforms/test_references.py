"""Mutable arrays, `jax.Ref`, are read and written as in `jax.jit`, and never returned."""

from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import pytest

import eqxlike
from eqxlike import Module, filter_jit
from tests.transforms.models import SPLIT

X = jnp.arange(3.0)


def add_to(reference, x):
    reference[...] += x
    return 2 * reference[...]


class Counter(Module):
    total: Any
    step: Any = 1.0

    def __call__(self, x):
        return add_to(self.total, self.step * x)


# Functions of a reference and an array.
PROGRAMS = {
    "read and written": add_to,
    "filter_grad": lambda ref, x: eqxlike.filter_grad(
        lambda x, ref: (x * add_to(ref, jax.lax.stop_gradient(x))).sum()
    )(x, ref),
    "filter_vmap": lambda ref, x: eqxlike.filter_vmap(add_to, in_axes=0)(ref, x),
    "closed over": lambda ref, x: eqxlike.filter_vmap(lambda x: x + ref[...].sum())(x),
    "list in a Module": lambda ref, x: filter_jit(lambda it, x: it.total[0](x))(
        Counter([Counter(ref)]), x
    ),
    "made inside": lambda ref, x: add_to(jax.new_ref(x), ref[...]),
}


def test_reference_is_read_and_written_as_in_jax_jit():
    def ends(jit, program):
        jitted, ref, outputs = jit(program), jax.new_ref(X), []
        for _ in range(2):
            outputs.append(jitted(ref, X))
            # Its value also changes between the calls.
            ref[...] *= 2
        return [each.tolist() for each in (*outputs, ref[...])]

    for name, program in PROGRAMS.items():
        assert ends(filter_jit, program) == ends(jax.jit, program), name


def test_references_share_a_trace_but_not_their_values():
    traces = []

    @filter_jit
    def add(tree, x):
        traces.append(None)
        add_to(jtu.tree_leaves(tree)[0], x)

    for num_traces, held in enumerate((Counter, lambda ref: [Counter(ref)]), start=1):
        refs = [jax.new_ref(value * X) for value in (1.0, 10.0)]
        trees = [held(ref) for ref in refs]
        for _ in range(3):
            for tree in trees:
                add(tree, X)
        assert [float(ref[...][1]) for ref in refs] == [1 + 3, 10 + 3]
        assert len(traces) == num_traces


def test_reference_among_arguments_keeps_its_sharding():
    ref = jax.new_ref(jax.device_put(jnp.ones(4), SPLIT))
    jitted = filter_jit(lambda ref, x, y: (ref[...] + y, x), in_shardings=(SPLIT, None, SPLIT))
    total, _ = jitted(ref, jnp.ones(3), jnp.ones(4))
    assert total.sharding.is_equivalent_to(SPLIT, 1)


# --- returned references ---


OUTER = jax.new_ref(X)
TRACED = {
    "filter_eval_shape": lambda f: lambda x: eqxlike.filter_eval_shape(f, x),
    "filter_make_jaxpr": eqxlike.filter_make_jaxpr,
    "filter_closure_convert": lambda f: lambda x: eqxlike.filter_closure_convert(f, x),
}
RETURNED = {
    "argument": lambda ref: {"a": (ref, 1.0)},
    "made inside": lambda ref: {"a": (jax.new_ref(ref[...]), 1.0)},
    "closed over": lambda ref: {"a": (OUTER, 1.0)},
}


def test_error_of_a_returned_reference_names_its_path():
    words = (
        r"output\['a'\]\[0\], which <lambda> returns, is a mutable array reference "
        r"of type Ref\{float32\[3\]\}\. .* return its value, `reference\[\.\.\.\]`"
    )
    for function in RETURNED.values():
        ref = jax.new_ref(X)
        for _ in range(2):
            with pytest.raises(ValueError, match=words):
                filter_jit(function)(ref)
    with pytest.raises(ValueError, match=r"output\.total, which <lambda> returns, is a mutable"):
        filter_jit(lambda module: module)(Counter(jax.new_ref(X)))
    function = lambda x: (x, jax.new_ref(x))
    for traced in TRACED.values():
        with pytest.raises(ValueError, match=r"output\[1\], which .* returns, is a mutable array"):
            traced(function)(X)
    with pytest.raises(ValueError, match=r"output\[1\] has no axis in `out_axes`"):
        eqxlike.filter_vmap(function)(X)
    with pytest.raises(ValueError, match=r"output\[1\] is a mutable array reference, .* axis 1:"):
        eqxlike.filter_vmap(function, out_axes=(0, 1))(jnp.ones((2, 3)))


AUXILIARY = {
    "filter_grad": lambda f: eqxlike.filter_grad(f, has_aux=True)(X)[1],
    "filter_vjp": lambda f: eqxlike.filter_vjp(f, X, has_aux=True)[2],
    "filter_vmap": lambda f: eqxlike.filter_vmap(f, out_axes=0)(X)[1],
}


def test_uncompiled_function_may_return_a_reference_as_in_jax():
    for auxiliary in AUXILIARY.values():
        ref = auxiliary(lambda x: (x.sum(), jax.new_ref(2 * x)))
        ref[0] += 1
        assert (type(ref), ref[...].tolist()) == (jax.Ref, [1, 2, 4])


def test_error_of_a_reference_passed_twice_names_both_paths():
    ref = jax.new_ref(X)
    twice = lambda: filter_jit(lambda counter, x: x[0][...])(Counter(ref), [ref])
    closed_over = lambda: filter_jit(lambda counter: OUTER[...])(Counter(OUTER))
    for call, message, paths in (
        (twice, "only one reference", "counter.total = x[0]."),
        (closed_over, "both closed over and passed", "counter.total."),
    ):
        with pytest.raises(ValueError, match=message) as caught:
            call()
        assert caught.value.__notes__[-1].endswith(f"arguments of <lambda>: {paths}")
