"""Reports on a function and its gradient."""

import functools

import jax
import jax.numpy as jnp
import pytest

import eqxlike as eqx
from eqxlike import graph, nn
from tests.graph.dense import X, loss, mlp


@functools.cache
def found():
    return graph.report(loss, mlp(), X, gradient=True)


def test_function_and_gradient_equal_separate_reports():
    whole = found().sides[0]
    assert [side.name for side in found().sides] == [row.name for row in found().layers]
    assert whole.flops == found().flops
    assert whole.gradient_flops == found().gradient.flops
    assert whole.operations == len(found().operations)
    assert "Function and gradient" in str(found())
    assert "Bytes stored" in str(found())


def test_gradient_of_a_dense_layer_is_two_products_and_the_sum_of_its_bias():
    first = next(side for side in found().sides if side.name == "model.layers[0]")
    # The gradient with respect to the input of the first layer is not needed.
    assert first.backward_flops == 2 * 5 * 3 * 4 + 4 * 4
    second = next(side for side in found().sides if side.name == "model.layers[1]")
    assert second.backward_flops == 2 * (2 * 5 * 4 * 2) + 2 * 4


def test_stored_bytes_equal_bytes_of_the_residuals():
    residuals = jax.tree_util.tree_leaves(
        jax.eval_shape(lambda model: jax.vjp(lambda x: jnp.sin(x) * x, model)[1], X)
    )
    report = graph.report(lambda x: jnp.sin(x) * x, X, gradient=True)
    stored = sum(each.size * each.dtype.itemsize for each in residuals if each.shape)
    # Storing the argument needs no additional memory.
    assert report.sides[0].stored_bytes == stored - X.nbytes
    assert {each.kind for each in report.stored} == {"cos", "sin"}


def test_rows_that_a_loop_stacks_for_its_gradient_are_stored():
    def of_carry(x):
        return jax.lax.scan(lambda carry, _: (carry * carry, None), x, None, length=7)[0]

    def of_result(x):
        return jax.lax.scan(lambda carry, _: (jnp.exp(carry), None), x, None, length=7)[0]

    for function in (of_carry, of_result):
        assert graph.report(function, X, gradient=True).sides[0].stored_bytes == 7 * X.nbytes


def test_checkpoint_stores_no_values_of_its_function():
    def kept(x):
        return jnp.sin(jnp.sin(x))

    plain = graph.report(kept, X, gradient=True)
    again = graph.report(jax.checkpoint(kept), X, gradient=True)
    assert plain.sides[0].stored_bytes == 2 * X.nbytes
    assert again.sides[0].stored_bytes == 0


def test_module_is_differentiated_with_respect_to_its_arrays():
    model = nn.Linear(3, 2, key=jax.random.key(0))
    report = graph.report(model, X[0], gradient=True)
    shapes = [each.aval.shape for each in report.gradient.jaxpr.jaxpr.outvars]
    assert shapes == [(2,), (2, 3), (2,)]
    assert [side.name for side in report.sides] == ["", "Linear"]


def test_layer_in_a_scan_keeps_its_path_in_the_gradient():
    stack = nn.ScanStack(lambda key: nn.MLP(3, 3, 3, 1, key=key), depth=2, key=jax.random.key(0))
    report = graph.report(stack, X[0], gradient=True)
    names = [side.name for side in report.sides]
    assert all(name.startswith("ScanStack") for name in names[1:])
    side = next(side for side in report.sides if side.name == "ScanStack.layers.layers[0]")
    assert side.backward_flops >= 2 * 2 * 9


def test_defaults_of_a_function_may_be_left_out():
    # A function of `filter_vmap` accepts no keywords, although its signature shows keywords.
    report = graph.report(eqx.filter_vmap(nn.Linear(3, 2, key=jax.random.key(0))), X, gradient=True)
    assert report.sides[1].gradient_flops == 2 * (2 * 5 * 3 * 2) + 5 * 2 + 4 * 2


def ones():
    return jnp.ones(2)


def test_nothing_to_differentiate_is_refused():
    with pytest.raises(ValueError, match=r"first argument of .*, of type ArrayImpl, has none"):
        graph.report(lambda n: n + n, jnp.arange(3), gradient=True)
    with pytest.raises(ValueError, match="pass an argument to ones"):
        graph.report(ones, gradient=True)
    with pytest.raises(ValueError, match=r"returns no floating-point array to differentiate"):
        graph.report(lambda x: x > 0, X, gradient=True)
