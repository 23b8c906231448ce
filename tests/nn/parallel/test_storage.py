import jax
import jax.numpy as jnp
import numpy as np

import eqxlike as eqx
from eqxlike import nn
from tests.nn.parallel.branches import Scale, X, assert_close, call, linear, linears


def test_equal_branches_are_stored_stacked_and_come_back_by_index(getkey):
    branches = [*linears(getkey(), 2), nn.Identity(), linear(getkey())]
    model = nn.Parallel(branches, lambda outputs: outputs)
    assert len(model) == 4
    assert eqx.tree_equal(tuple(branches), model.unstack())
    assert eqx.tree_equal(branches, [*model])
    assert eqx.tree_equal(model[np.int64(1)], branches[1])
    assert eqx.tree_equal(model[-1], branches[3])
    assert model[2] is branches[2]
    assert model.places == ((0, 1, 3), (2,))
    assert model.groups[0].weight.shape == (3, 4, 3)
    assert model.groups[1] is branches[2]


def test_equal_linear_layers_are_one_product_and_no_outputs_are_copied(getkey):
    for join in ("sum", "concatenate"):
        model = nn.Parallel(linears(getkey(), 7), join)
        program = str(jax.make_jaxpr(jax.vmap(model))(jnp.ones((5, 3))))
        assert program.count("dot_general[") == 1
        assert "concatenate" not in program


class Kept(eqx.Module):
    weight: jax.Array
    other: object = None

    def __call__(self, x, *, key=None):
        return x * jnp.sum(self.weight)


ONES = jnp.ones(2)
DIFFERENT = {
    "shape": (Kept(ONES), Kept(jnp.ones(3))),
    "dtype": (Kept(ONES), Kept(jnp.ones(2, jnp.bfloat16))),
    "weak type": (Scale(jnp.float32(2.0)), Scale(jnp.asarray(2.0))),
    "missing array": (Kept(ONES), Kept(ONES, ONES)),
    "number": (Kept(ONES, 1.0), Kept(ONES, 2.0)),
    "frozen": (Kept(ONES), nn.freeze(Kept(ONES))),
}


def test_branches_that_differ_in_more_than_values_stand_alone():
    for branches in DIFFERENT.values():
        model = nn.Parallel(branches, lambda outputs: outputs)
        assert model.places == ((0,), (1,))
        assert [*map(id, model)] == [*map(id, branches)]


class Sine(eqx.Module):
    """Calls NumPy, which `jax.vmap` is not told how to map."""

    weight: jax.Array

    def __call__(self, x, *, key=None):
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return jax.pure_callback(np.sin, shape, self.weight * x)


def test_branches_that_cannot_be_mapped_run_one_by_one_on_demand():
    branches = [Sine(jnp.array(1.0)), Sine(jnp.array(2.0))]
    model = nn.Parallel(branches, stack=False)
    assert model.places == ((0,), (1,))
    assert_close(model(X), np.sin(X) + np.sin(2 * X))


def test_weak_branches_stay_weak():
    branches, x = [Scale(jnp.asarray(2.0)), Scale(jnp.asarray(3.0))], jnp.ones(2, jnp.bfloat16)
    model = nn.Parallel(branches)
    assert model.places == ((0, 1),)
    assert model(x).dtype == jnp.bfloat16


def test_arrays_of_numpy_are_stacked():
    model = nn.Parallel([Scale(np.full(3, factor, np.float32)) for factor in (2, 3)])
    assert model.places == ((0, 1),)
    assert_close(model(X), 5 * X)


def test_branches_with_references_stand_alone():
    class Add(eqx.Module):
        reference: object

        def __call__(self, x, *, key=None):
            return x + self.reference[...]

    model = nn.Parallel([Add(jax.new_ref(jnp.array(value))) for value in (1.0, 2.0)])
    assert model.places == ((0,), (1,))
    assert model(jnp.array(10.0)) == 23


def test_equal_branches_without_arrays_run_each(getkey):
    sines = nn.Parallel([nn.Lambda(jnp.sin), nn.Lambda(jnp.sin)])
    dropouts = nn.Parallel([nn.Dropout(), nn.Dropout()], tuple)
    assert_close(call(sines, X), 2 * np.sin(X))
    first, second = call(dropouts, np.ones(100, np.float32), key=getkey())
    assert np.not_equal(first, second).any()
