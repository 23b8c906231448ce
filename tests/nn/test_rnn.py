import equinox
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

import eqxlike as eqx
from eqxlike import nn
from tests.nn.arrays import normal

CELLS = ["GRUCell", "LSTMCell"]


def hidden_for(name, size=4):
    return (jnp.ones(size), jnp.ones(size)) if name == "LSTMCell" else jnp.ones(size)


@pytest.mark.parametrize(("name", "use_bias"), [("GRUCell", True), ("LSTMCell", False)])
def test_same_key_gives_equinox_weights_and_outputs(name, use_bias, getkey):
    x, hidden = normal(getkey(), (3,)), hidden_for(name)

    @eqx.filter_jit
    def cells_and_outputs(key):
        ours = getattr(nn, name)(3, 4, use_bias, key=key)
        theirs = getattr(equinox.nn, name)(3, 4, use_bias, key=jr.clone(key))
        return ours, theirs, [cell(x, hidden) for cell in (ours, theirs)]

    ours, theirs, outputs = cells_and_outputs(getkey())
    for own, their in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_array_equal(own, their)
    for own, their in zip(*map(jax.tree.leaves, outputs), strict=True):
        np.testing.assert_allclose(own, their, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", CELLS)
def test_initializers_draw_the_parameters(name, getkey):
    cell = getattr(nn, name)(
        3,
        4,
        weight_init=jax.nn.initializers.orthogonal(),
        bias_init=jax.nn.initializers.zeros,
        key=getkey(),
    )
    weight = np.asarray(cell.weight_hh)
    np.testing.assert_allclose(weight.T @ weight, np.eye(4), atol=1e-5)
    assert not np.any(cell.bias)


@pytest.mark.parametrize("name", CELLS)
def test_wrong_shapes_are_named(name, getkey):
    cell = getattr(nn, name)(3, 4, key=getkey())
    with pytest.raises(ValueError, match=rf"{name} expected input of shape \(3,\), got .*\(5,\)"):
        cell(jnp.ones(5), hidden_for(name))
    with pytest.raises(ValueError, match=rf"{name} expected hidden.* of shape \(4,\), got"):
        cell(jnp.ones(3), hidden_for(name, 2))


def test_error_says_where_in_the_model_the_cell_stands(getkey):
    class Encoder(eqx.Module):
        cells: list

        def __call__(self, x):
            return self.cells[1](x, jnp.zeros(4))

    model = Encoder([nn.GRUCell(3, 4, key=getkey()), nn.GRUCell(3, 4, key=getkey())])
    with pytest.raises(ValueError, match=r"GRUCell at Encoder\.cells\[1\] expected input"):
        eqx.filter_jit(model)(jnp.ones(2))


@pytest.mark.parametrize("name", CELLS)
def test_step_of_a_batch_neither_stacks_weights_nor_turns_the_batch_over(name, getkey):
    # Both cost time in each step, and kernels to compile.
    cell = getattr(nn, name)(3, 4, key=getkey())
    hidden = jax.tree.map(lambda each: jnp.ones((2, 4)), hidden_for(name))
    program = str(jax.make_jaxpr(jax.vmap(cell))(jnp.ones((2, 3)), hidden))
    assert "dot_general" in program
    assert "concatenate" not in program
    assert "transpose" not in program
