"""`Sequential`, `Parallel`, and shared nodes."""

import functools
from typing import Any

import equinox
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

import eqxlike as eqx
from eqxlike import Module, nn
from tests.nn.arrays import assert_close
from tests.nn.cases import Counter
from tests.nn.mistakes import each_mistake


class Add(Module):
    amount: int

    def __call__(self, x, *, key=None):
        return x + self.amount


class Record(Module):
    """Returns its input and its key."""

    def __call__(self, x, *, key=None):
        return (*x, None if key is None else jr.key_data(key).tolist())


def test_sequential_supports_indexing_slicing_iteration_and_len_like_a_tuple():
    layers = tuple(map(Add, range(3)))
    model = nn.Sequential(list(layers))
    assert (model[0], model[-1]) == (layers[0], layers[-1])
    assert isinstance(model[2:0:-1], nn.Sequential)
    assert model[2:0:-1].layers == layers[2:0:-1]
    assert tuple(model) == layers
    assert len(model) == 3
    with pytest.raises(IndexError):
        model[3]
    for index in ("a", True):
        with pytest.raises(TypeError, match="indexed by an integer or a slice, got"):
            model[index]


def test_every_layer_gets_its_own_key(getkey):
    key = getkey()
    model = nn.Sequential([Record(), Record()])
    assert model((), key=key) == tuple(jr.key_data(jr.split(jr.clone(key), 2)).tolist())
    assert model(()) == (None, None)


def make_counting():
    inner = nn.Sequential([Counter(), Add(100)])
    return nn.make_with_state(lambda: nn.Sequential([Counter(), Add(10), inner]))()


def test_state_passes_through_the_stateful_layers():
    model, state = make_counting()
    assert model.is_stateful()
    x, state = model(0, state)
    assert x == 112
    x, state = model(0, state=state)
    assert x == 114
    assert [leaf.tolist() for leaf in jax.tree.leaves(state)] == [2, 2]
    model, state = nn.Sequential([Add(1), nn.Sequential([Add(2)])]), object()
    assert not model.is_stateful()
    assert model(0, state) == (3, state)
    assert model(0) == nn.Sequential([])(3) == 3


def test_layer_may_declare_that_it_is_not_stateful():
    class Sometimes(Counter):
        def is_stateful(self):
            return False

        def __call__(self, x, *, key=None):
            return x

    assert nn.Sequential([Sometimes()])(3) == 3


def test_missing_state_is_an_error_that_names_the_layer():
    model, _ = make_counting()
    with pytest.raises(TypeError, match=r"Sequential needs the state, since layers\[0\].* Counter"):
        model(0)
    outer = nn.Sequential([nn.Lambda(model[1:])])
    with pytest.raises(TypeError, match=r"Sequential at .*layers\[0\].fn needs .* layers\[1\]"):
        outer(0)


def language_model(library):
    """An embedding and a readout that share their weight."""

    class LanguageModel(library.Module):
        shared: library.nn.Shared

        def __init__(self):
            embedding = library.nn.Embedding(5, 3, key=jr.key(0))
            pair = embedding, library.nn.Linear(3, 5, key=jr.key(1))
            self.shared = library.nn.Shared(pair, lambda p: p[1].weight, lambda p: p[0].weight)

        def __call__(self, token):
            embedding, linear = self.shared()
            return linear(embedding(token))

    return LanguageModel()


def arrays_of(model):
    return jax.tree.leaves(eqx.filter(model, eqx.is_array))


def test_shared_weight_has_the_output_and_gradient_of_equinox():
    results = []
    for library in (eqx, equinox):
        model = language_model(library)
        # The model stores the weight once.
        assert [each.shape for each in arrays_of(model)] == [(5, 3), (5,)]

        def loss(model):
            out = model(jnp.array(2))
            return jnp.sum(jnp.sin(out)), out

        gradient = library.filter_jit(library.filter_grad(loss, has_aux=True))(model)
        results.append(jax.tree.leaves(gradient))
    assert len(results[0]) == 3
    assert_close(*results)


def test_several_nodes_may_be_computed_from_one_node():
    zeros = jnp.zeros((3, 2))
    pair = {"a": jnp.ones((2, 3)), "b": zeros, "c": zeros + 0}
    get = lambda t: (t["a"].T, 2 * t["a"].T)
    whole = nn.Shared(pair, where=lambda t: (t["b"], t["c"]), get=get)()
    np.testing.assert_array_equal(whole["b"], np.ones((3, 2)))
    np.testing.assert_array_equal(whole["c"], 2 * np.ones((3, 2)))
    message = r"where\(pytree\) is .* shape \(3,\) .*, and get\(pytree\) is .* shape \(2,\)"
    with pytest.raises(ValueError, match=message):
        nn.Shared((jnp.ones(3), jnp.ones(2)), lambda t: t[0], lambda t: t[1])
    with pytest.raises(ValueError, match="a node that `where` removes"):
        nn.Shared((jnp.ones(3), 1), lambda t: t[0], lambda t: t[0])


def test_layer_gets_a_key_if_the_call_has_a_key_or_the_layer_accepts_one():
    class Double(eqx.Module):
        bias: Any

        def __call__(self, x):
            return 2 * x + self.bias

    class Needs(Double):
        def __call__(self, x, *, key):
            return super().__call__(x) if key is None else -x

    def of_layers(make):
        mlp = nn.MLP(2, 2, 2, 2, activation=lambda x: x, key=jr.key(0))
        mlp = eqx.tree_at(lambda mlp: mlp.layers, mlp, tuple(make() for _ in mlp.layers))
        sequential = nn.Sequential([make(), make(), make()])
        return mlp, sequential, nn.ScanStack(lambda key: make(), 3, key=jr.key(0))

    x = np.array([1.0, 2.0], np.float32)
    doubling, needing = (
        of_layers(lambda make=make: make(np.zeros(2, "f"))) for make in (Double, Needs)
    )
    branches = nn.Parallel([Double(np.zeros(2, "f")), Double(np.ones(2, "f"))], "sum")

    @eqx.filter_jit
    def outputs(key):
        by_key = [each(x, key=jr.clone(key)) for each in needing]
        return [each(x) for each in doubling + needing], by_key, branches(x)

    without_key, by_key, of_branches = outputs(jr.key(0))
    for each in doubling:
        assert "Double" in str(nn.summary(each, x))  # `nn.summary` replaces the class of a layer
    expected = [8 * x] * len(without_key), [-x] * len(by_key), 4 * x + 1
    assert_close((without_key, by_key, of_branches), expected, rtol=1e-7, atol=0)
    np.testing.assert_allclose(nn.Sequential([jnp.tanh, abs])(-x), np.tanh(x), rtol=1e-6)
    with pytest.raises(TypeError, match="unexpected keyword argument 'key'"):
        nn.Sequential([Double(0.0)])(x, key=jr.key(0))


INPUT = jnp.array([0.5, -1.0, 2.0])


def linears(key, *sizes):
    keys = jr.split(key, len(sizes))
    return [nn.Linear(3, size, key=each) for size, each in zip(sizes, keys, strict=True)]


@eqx.filter_jit
def call(model, *args, key=None):
    """The output of a model, and the outputs of its branches."""
    keys = [None] * len(model) if key is None else jr.split(jr.clone(key), len(model))
    branches = [model[index] for index in range(len(model))]
    alone = [branch(*args, key=each) for branch, each in zip(branches, keys, strict=True)]
    return model(*args, key=key), alone


JOINS = [
    ("sum", (4, 4, 4), sum),
    ("concatenate", (4, 2, 3), np.concatenate),
    (jnp.stack, (4, 4), np.stack),
    (tuple, (4, 4), tuple),
]


@pytest.mark.parametrize(("join", "sizes", "expected"), JOINS)
def test_output_joins_the_outputs_of_the_branches(join, sizes, expected, getkey):
    output, alone = call(nn.Parallel(linears(getkey(), *sizes), join), INPUT)
    assert_close(output, expected(jax.device_get(alone)))


def test_outputs_that_are_trees_are_joined_leaf_by_leaf(getkey):
    cells = [nn.LSTMCell(3, 2, key=key) for key in jr.split(getkey(), 2)]
    branches = [nn.Lambda(functools.partial(cell, INPUT)) for cell in cells]
    for join, merge in (("sum", sum), ("concatenate", np.concatenate)):
        output, alone = call(nn.Parallel(branches, join), (jnp.ones(2), jnp.zeros(2)))
        assert_close(output, tuple(map(merge, zip(*jax.device_get(alone), strict=True))))


class Noise(eqx.Module):
    scale: float

    def __call__(self, x, mask=True, *, key=None):
        x = jnp.where(mask, x, 0)
        return x if key is None else x + self.scale * jr.normal(key, x.shape)


def test_each_branch_gets_its_own_key_and_further_arguments(getkey):
    model = nn.Parallel([Noise(1.0), nn.Parallel([Noise(2.0)]), Noise(3.0)], jnp.stack)
    mask = jnp.array([True, False, True])
    for key in (None, getkey()):
        output, alone = call(model, INPUT, mask, key=key)
        assert_close(output, jnp.stack(alone))
    assert (output[:, 1] != 0).all()
    assert_close(call(model, INPUT, mask)[0], np.array([[0.5, 0, 2]] * 3))


def test_module_as_the_join_is_trained(getkey):
    first, second, join = linears(getkey(), 3, 3, 1)
    model = nn.Parallel([first, second], nn.Sequential([nn.Lambda(sum), join]))
    gradient = eqx.filter_grad(lambda model: model(INPUT).sum())(model)
    assert_close(gradient.join[1].weight[0], first(INPUT) + second(INPUT))


def test_stateful_branches_keep_their_own_values():
    @nn.make_with_state
    def make():
        return nn.Parallel([Counter(5), nn.Lambda(jnp.negative), Counter(7)], tuple)

    model, state = make()
    assert model.is_stateful()
    outputs, state = model(jnp.array(1), state)
    assert [*map(int, outputs)] == [7, -1, 9]
    outputs, state = model(jnp.array(1), state=state)
    assert [*map(int, outputs)] == [8, -1, 10]
    assert (state.get(model[0].index), state.get(model[2].index)) == (7, 9)


def test_model_without_stateful_branches_returns_its_state_unchanged():
    model, state = nn.Parallel([nn.Identity(), nn.Identity()]), object()
    assert not model.is_stateful()
    assert model(1, state=state) == (2, state)


MISTAKES = {
    ValueError: {
        "needs at least one branch": lambda: nn.Parallel([]),
        "join must be 'sum', 'concatenate' or a function .*, got 'product'": (
            lambda: nn.Parallel([nn.Identity()], "product")
        ),
    },
    TypeError: {
        r"Parallel: branches\[1\] expected a layer, or a function": (
            lambda: nn.Parallel([nn.Identity(), 3])
        ),
        r"Parallel needs the state, since branches\[1\], of type Counter, is stateful": (
            lambda: nn.Parallel([nn.Identity(), Counter()])(0)
        ),
    },
}


@each_mistake(MISTAKES)
def test_mistakes_are_refused(error, words, call):
    with pytest.raises(error, match=words):
        call()


def test_outputs_that_cannot_be_joined_name_the_layer(getkey):
    for join, message in (("sum", r"one shape, got \(4,\) and \(1,\)"), (jnp.stack, "shape")):
        model = nn.Sequential([nn.Parallel(linears(getkey(), 4, 1), join)])
        with pytest.raises(ValueError, match=message) as caught:
            model(INPUT)
        note = "Raised while joining the outputs of Parallel at Sequential.layers[0]."
        assert note in caught.value.__notes__
