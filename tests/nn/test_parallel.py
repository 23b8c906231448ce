import copy
import functools
import pickle
import re

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

import eqxlike as eqx
from eqxlike import nn

X = jnp.array([0.5, -1.0, 2.0])


def linear(key, out_features=4):
    return nn.Linear(3, out_features, key=key)


def linears(key, number=3):
    return [*map(linear, jr.split(key, number))]


def one_by_one(branches, x, *args, key=None):
    """The outputs of the branches, each called by itself."""
    keys = [None] * len(branches) if key is None else jr.split(key, len(branches))
    return [branch(x, *args, key=each) for branch, each in zip(branches, keys, strict=True)]


def assert_close(one, other):
    np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


class Scale(eqx.Module):
    """Multiplies by a leaf of any kind."""

    factor: object
    options: object = eqx.field(static=True, default=None)

    def __call__(self, x, *, key=None):
        return self.factor * x


def test_sum_of_linear_layers_is_the_layer_of_summed_weights(getkey):
    branches = linears(getkey())
    weight = sum(np.asarray(branch.weight) for branch in branches)
    bias = sum(np.asarray(branch.bias) for branch in branches)
    assert_close(nn.Parallel(branches)(X), weight @ X + bias)


def test_concatenated_linear_layers_are_the_layer_of_all_rows(getkey):
    branches = linears(getkey())
    weight = np.concatenate([branch.weight for branch in branches])
    bias = np.concatenate([branch.bias for branch in branches])
    assert_close(nn.Parallel(branches, "concatenate")(X), weight @ X + bias)


def test_function_gets_the_outputs_in_the_order_of_the_branches(getkey):
    first, last, other = *linears(getkey(), 2), nn.Identity()
    outputs = nn.Parallel([first, other, last], join=lambda outputs: outputs)(X)
    for output, expected in zip(outputs, [first(X), X, last(X)], strict=True):
        assert_close(output, expected)


def test_mixed_branches_are_concatenated_in_their_order(getkey):
    (first, last), other = linears(getkey(), 2), linear(getkey(), 2)
    model = nn.Parallel([first, other, last], "concatenate")
    assert model.places == ((0, 2), (1,))
    assert_close(model(X), np.concatenate([first(X), other(X), last(X)]))


def test_mixed_branches_are_summed(getkey):
    first, last = linears(getkey(), 2)
    other = nn.MLP(3, 4, 5, 1, key=getkey())
    model = nn.Parallel([first, other, last], "sum")
    assert_close(model(X), first(X) + other(X) + last(X))


@pytest.mark.parametrize("axis", [None, 0, 1, 2, -1, -3])
@pytest.mark.parametrize("num_mixed", [0, 1])
def test_outputs_are_concatenated_along_any_axis(axis, num_mixed, getkey):
    sizes = [(1, 3)] * 2 + [(2, 4)] * num_mixed
    branches = [nn.Conv2d(1, 2, size[1], padding="SAME", key=getkey()) for size in sizes]
    image = jr.normal(getkey(), (1, 5, 6))
    expected = np.concatenate(one_by_one(branches, image), 0 if axis is None else axis)
    assert_close(nn.Parallel(branches, "concatenate", axis=axis)(image), expected)


def test_outputs_that_are_trees_are_joined_leaf_by_leaf(getkey):
    cells = [nn.LSTMCell(3, 2, key=key) for key in jr.split(getkey(), 2)]
    carry = jnp.ones(2), jnp.zeros(2)
    branches = [nn.Lambda(functools.partial(cell, X)) for cell in cells]
    (h, c), (other_h, other_c) = one_by_one(branches, carry)
    for join, expected in (
        ("sum", (h + other_h, c + other_c)),
        ("concatenate", (np.append(h, other_h), np.append(c, other_c))),
    ):
        for output, each in zip(nn.Parallel(branches, join)(carry), expected, strict=True):
            assert_close(output, each)


@pytest.mark.parametrize("dtype", ["int8", "bool"])
def test_sum_has_the_dtype_of_the_outputs(dtype):
    branches = [Scale(jnp.ones((), dtype)), Scale(jnp.ones((), dtype))]
    x = jnp.ones(2, dtype)
    total = nn.Parallel(branches)(x)
    assert (total.dtype, total.tolist()) == (x.dtype, (x + x).tolist())


def test_numbers_are_summed():
    assert nn.Parallel([Scale(2), Scale(2), Scale(3)])(10) == 70


class Weigh(eqx.Module):
    weights: jax.Array

    def __call__(self, outputs):
        return self.weights @ jnp.stack(outputs)


def test_module_that_joins_is_trained(getkey):
    branches = linears(getkey())
    model = nn.Parallel(branches, Weigh(jnp.arange(3.0)))
    gradient = eqx.filter_grad(lambda model: jnp.sum(model(X)))(model)
    assert_close(gradient.function.weights, np.sum(one_by_one(branches, X), axis=1))


# How they are stored.


def test_branches_come_back_by_index_and_in_turn(getkey):
    branches = [*linears(getkey(), 2), nn.Identity(), linear(getkey())]
    model = nn.Parallel(branches, lambda outputs: outputs)
    assert len(model) == 4
    assert eqx.tree_equal(tuple(branches), model.unstack())
    assert eqx.tree_equal(branches, [*model])
    assert eqx.tree_equal(model[np.int64(1)], branches[1])
    assert eqx.tree_equal(model[-1], branches[3])
    assert model[2] is branches[2]


def test_equal_branches_are_stored_stacked(getkey):
    branches = [*linears(getkey(), 2), nn.Identity(), linear(getkey())]
    model = nn.Parallel(branches, lambda outputs: outputs)
    assert model.places == ((0, 1, 3), (2,))
    assert model.groups[0].weight.shape == (3, 4, 3)
    assert model.groups[1] is branches[2]


def programs(model, batch):
    """The forward pass of a batch and its gradient, as XLA gets them."""

    def loss(model, batch):
        return jnp.sum(jax.vmap(model)(batch) ** 2)

    forward = eqx.filter_jit(lambda model, batch: jax.vmap(model)(batch))
    return [
        eqx.filter_jit(function).lower(model, batch).as_text()
        for function in (forward, eqx.filter_grad(loss))
    ]


@pytest.mark.parametrize("join", ["sum", "concatenate"])
def test_equal_linear_layers_are_one_product_and_no_weights_are_copied(join, getkey):
    branches, batch = linears(getkey(), 7), jnp.ones((5, 3))
    for program, number in zip(programs(nn.Parallel(branches, join), batch), (1, 2), strict=True):
        assert program.count("stablehlo.dot_general") == number
        assert "stablehlo.concatenate" not in program
        from_weights = re.findall(r"stablehlo\.(\w+) [^\n]*: \(?tensor<7x4x3xf32>", program)
        assert set(from_weights) == {"dot_general"}


class Kept(eqx.Module):
    """Has a field for each kind of difference."""

    weight: jax.Array
    other: object = None
    options: object = eqx.field(static=True, default=None)

    def __call__(self, x, *, key=None):
        return x * jnp.sum(self.weight)


ONES = jnp.ones(2)
DIFFERENT = {
    "shape": (Kept(ONES), Kept(jnp.ones(3))),
    "dtype": (Kept(ONES), Kept(jnp.ones(2, jnp.bfloat16))),
    "weak type": (Scale(jnp.float32(2.0)), Scale(jnp.asarray(2.0))),
    "missing array": (Kept(ONES), Kept(ONES, ONES)),
    "function": (Kept(ONES, jnp.sin), Kept(ONES, jnp.cos)),
    "number": (Kept(ONES, 1.0), Kept(ONES, 2.0)),
    "type of number": (Kept(ONES, 1), Kept(ONES, True)),
    "static field": (Kept(ONES, options=1), Kept(ONES, options=True)),
    "class": (nn.LayerNorm(2), nn.RMSNorm(2)),
    "frozen": (Kept(ONES), nn.freeze(Kept(ONES))),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_branches_that_differ_in_more_than_values_stand_alone(name):
    branches = DIFFERENT[name]
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
    assert_close(nn.Parallel([nn.Lambda(jnp.sin), nn.Lambda(jnp.sin)])(X), 2 * jnp.sin(X))
    x = jnp.ones(100)
    first, second = nn.Parallel([nn.Dropout(), nn.Dropout()], tuple)(x, key=getkey())
    assert (first != second).any()


# Keys and state.


class Noise(eqx.Module):
    scale: jax.Array

    def __call__(self, x, *, key=None):
        return x if key is None else x + self.scale * jr.normal(key, x.shape)


def test_each_branch_gets_the_key_that_it_gets_one_by_one(getkey):
    branches = [Noise(jnp.array(1.0)), nn.Dropout(0.5), Noise(jnp.array(2.0)), nn.Dropout(0.5)]
    model, key = nn.Parallel(branches, jnp.stack), getkey()
    assert model.places == ((0, 2), (1, 3))
    assert_close(model(X, key=key), one_by_one(branches, X, key=jr.clone(key)))


def test_branches_get_no_key_without_one():
    assert_close(nn.Parallel([Noise(jnp.array(1.0)), Noise(jnp.array(2.0))])(X), 2 * X)


def test_further_arguments_go_to_every_branch(getkey):
    class Masked(eqx.Module):
        linear: nn.Linear

        def __call__(self, x, mask, *, key=None):
            return jnp.where(mask, self.linear(x), 0)

    branches = [*map(Masked, linears(getkey()))]
    mask = jnp.array([True, False, True, False])
    assert_close(nn.Parallel(branches)(X, mask), sum(one_by_one(branches, X, mask)))


class Counter(nn.StatefulLayer):
    """Adds `start` and how often it was called."""

    start: jax.Array
    index: nn.StateIndex

    def __init__(self, start, init=0):
        self.start = jnp.array(start)
        self.index = nn.StateIndex(init)

    def __call__(self, x, state, *, key=None):
        count = state.get(self.index) + 1
        return x + self.start + count, state.set(self.index, count)


def test_equal_stateful_branches_have_each_a_value_of_their_own():
    model, state = nn.make_with_state(lambda: nn.Parallel([Counter(10), Counter(20)], tuple))()
    assert model.places == ((0, 1),)
    assert state.get(model.groups[0].index).tolist() == [0, 0]
    assert [*map(int, model(0, state)[0])] == [11, 21]


def test_branches_begin_with_their_own_initial_values():
    branches = [Counter(0, init=jnp.array(value)) for value in (5, 7)]
    model, state = nn.make_with_state(lambda: nn.Parallel(branches, tuple))()
    assert [*map(int, model(0, state)[0])] == [6, 8]


@pytest.mark.parametrize("others", [[], [nn.Lambda(jnp.negative)]])
def test_stateful_branches_compute_what_they_do_one_by_one(others, getkey):
    def make():
        return nn.BatchNorm(3, mode="batch", batched=True)

    norms = [nn.make_with_state(make)() for _ in range(2)]
    model, state = nn.make_with_state(
        lambda: nn.Parallel([make(), *others, make()], "concatenate", axis=-1)
    )()
    for _ in range(2):
        x = jr.normal(getkey(), (5, 3))
        y, state = model(x, state)
        outputs = [norm(x, norm_state) for norm, norm_state in norms]
        norms = [(norm, new) for (norm, _), (_, new) in zip(norms, outputs, strict=True)]
        first, second = (output for output, _ in outputs)
        assert_close(y, np.concatenate([first, *(other(x) for other in others), second], -1))
    expected = [state for _, state in norms]
    for stacked, *each in zip(*map(jax.tree.leaves, (state, *expected)), strict=True):
        assert_close(stacked, each)


@pytest.mark.parametrize("name", ["positional", "keyword"])
def test_state_comes_back_beside_the_output(name):
    model, state = nn.make_with_state(lambda: nn.Parallel([Counter(1), nn.Identity()]))()
    assert model.is_stateful()
    x, state = model(0, state) if name == "positional" else model(0, state=state)
    assert (x, state.get(model.groups[0].index)) == (2, 1)


def test_layer_that_stands_in_a_state_already_keeps_its_place():
    counter, state = nn.make_with_state(Counter)(0)
    model = nn.Parallel([counter, counter], tuple)
    assert model.places == ((0,), (1,))
    outputs, state = model(0, state)
    assert [*map(int, outputs)] == [1, 2]


def test_model_without_stateful_branches_returns_the_state_that_it_got():
    model, state = nn.Parallel([nn.Identity(), nn.Identity()]), object()
    assert not model.is_stateful()
    assert model(1, state=state) == (2, state)
    _, some_state = nn.make_with_state(Counter)(0)
    assert model(1, some_state) == (2, some_state)


def test_missing_state_is_an_error_that_names_the_branch():
    model, _ = nn.make_with_state(
        lambda: nn.Sequential([nn.Lambda(nn.Parallel([nn.Identity(), Counter(0)]))])
    )()
    message = (
        r"Parallel at Sequential.layers\[0\].fn needs the state, since branches\[1\], of type "
        r"Counter, is stateful: write `y, state = model\(x, state\)`"
    )
    with pytest.raises(TypeError, match=message):
        model(0)


# Within other things, and other things within.


def test_gradient_is_that_of_the_branches_one_by_one(getkey):
    branches = [*linears(getkey()), nn.MLP(3, 4, 5, 1, key=getkey())]
    batch = jr.normal(getkey(), (5, 3))

    @eqx.filter_jit
    @eqx.filter_value_and_grad
    def parallel(model):
        return jnp.sum(eqx.filter_vmap(model)(batch) ** 2)

    @eqx.filter_jit
    @eqx.filter_value_and_grad
    def separate(branches):
        return jnp.sum(sum(jax.vmap(branch)(batch) for branch in branches) ** 2)

    value, gradient = parallel(nn.Parallel(branches))
    expected, gradients = separate(branches)
    assert_close(value, expected)
    for index, each in enumerate(gradients):
        for one, other in zip(*map(jax.tree.leaves, (gradient[index], each)), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


def test_keys_of_a_batch_are_of_each_example_and_branch(getkey):
    branches = [Noise(jnp.array(1.0)), nn.Dropout(0.5), Noise(jnp.array(2.0))]
    model, batch, keys = nn.Parallel(branches), jnp.ones((2, 3)), jr.split(getkey(), 2)
    y = eqx.filter_vmap(lambda x, key: model(x, key=key))(batch, keys)
    for index in range(2):
        expected = sum(one_by_one(branches, batch[index], key=jr.clone(keys)[index]))
        assert_close(y[index], expected)


def nested_counters():
    return nn.Parallel([nn.Parallel([Counter(1), Counter(2)], tuple) for _ in range(2)], tuple)


def test_parallel_branches_within_parallel_branches():
    model, state = nn.make_with_state(nested_counters)()
    assert model.places == model.groups[0].places == ((0, 1),)
    outputs, state = model(0, state)
    assert jax.tree.map(int, outputs) == ((2, 3), (2, 3))


def test_parallel_branches_in_a_stack_and_stacks_as_branches(getkey):
    def block(key):
        return nn.Parallel([nn.Linear(3, 3, key=each) for each in jr.split(key)])

    def stack(key):
        return nn.ScanStack(block, 2, key=key)

    stacks = [*map(stack, jr.split(getkey()))]
    model = nn.Parallel(stacks)
    assert model.groups[0].layers.groups[0].weight.shape == (2, 2, 2, 3, 3)
    expected = sum(nn.Sequential(each.unstack())(X) for each in stacks)
    assert_close(model(X), expected)


@pytest.mark.parametrize("copied", [lambda m: pickle.loads(pickle.dumps(m)), copy.deepcopy])
def test_copies_are_equal_and_compute_the_same(copied, getkey):
    model = nn.Parallel([*linears(getkey()), nn.Linear(3, 4, False, key=getkey())])
    assert eqx.tree_equal(copied(model), model)
    assert_close(copied(model)(X), model(X))


def test_tree_at_reaches_the_stacked_weights(getkey):
    model = nn.Parallel(linears(getkey()))
    zero = eqx.tree_at(lambda m: m.groups[0].weight, model, replace_fn=jnp.zeros_like)
    assert_close(zero(X), model.groups[0].bias.sum(0))
    assert not zero[1].weight.any()


def test_branches_frozen_beforehand_are_not_trained(getkey):
    first, second, third = linears(getkey())
    model = nn.Parallel([first, nn.freeze(second), third])
    assert model.places == ((0, 2), (1,))
    gradient = eqx.filter_grad(lambda model: jnp.sum(model(X)))(model)
    assert gradient.groups[0].weight.shape == (2, 4, 3)
    assert gradient.groups[1].weight is None


def test_stack_is_frozen_as_any_layer(getkey):
    model = nn.freeze(nn.Parallel(linears(getkey())), lambda m: m.groups[0].bias)
    gradient = eqx.filter_grad(lambda model: jnp.sum(model(X)))(model)
    assert gradient.groups[0].bias is None
    assert gradient.groups[0].weight.shape == model.groups[0].weight.shape


def test_branches_go_into_inference_mode():
    model = nn.Parallel([nn.Dropout(0.5), nn.Dropout(0.5), nn.Sequential([nn.Dropout(0.1)])])
    assert_close(nn.tree_inference(model)(X), 3 * X)


def test_layers_in_branches_are_replaced(getkey):
    model = nn.Parallel([*linears(getkey(), 2), nn.LayerNorm(3)], tuple)
    adapted = nn.replace_layers(
        model, nn.Linear, lambda layer, key: nn.LoRALinear(layer, rank=2, key=key), key=getkey()
    )
    assert [type(branch).__name__ for branch in adapted] == ["LoRALinear"] * 2 + ["LayerNorm"]
    for output, expected in zip(adapted(X), model(X), strict=True):
        assert_close(output, expected)


def test_whole_stack_is_replaced_by_what_has_no_arrays(getkey):
    model = nn.Parallel(linears(getkey()))
    assert_close(nn.replace_layers(model, nn.Linear, lambda _: nn.Identity())(X), 3 * X)


def test_summary_counts_what_is_stacked_once(getkey):
    summary = nn.summary(nn.Parallel(linears(getkey())), X)
    row = summary.rows[1]
    assert (row.path, row.type_name, row.num_calls) == (".groups[0]", "Linear", 1)
    assert row.num_parameters == 3 * (4 * 3 + 4)
    assert row.flops == 3 * nn.summary(linear(getkey()), X).flops


def test_posterior_of_each_branch_is_its_own(getkey):
    branches, key = linears(getkey()), getkey()
    model = nn.to_bayesian(nn.Parallel(branches, jnp.stack))
    expected = one_by_one([*map(nn.to_bayesian, branches)], X, key=jr.clone(key))
    assert_close(model(X, key=key), expected)


# What is refused.


def test_no_branch_is_refused():
    with pytest.raises(ValueError, match=r"^Parallel needs at least one branch\.$"):
        nn.Parallel([])


def test_branch_that_cannot_be_called_is_refused_by_index():
    message = r"^Parallel: branches\[1\] cannot be called; it is a list of length 0\.$"
    with pytest.raises(TypeError, match=message):
        nn.Parallel([nn.Identity(), []])


@pytest.mark.parametrize("join", ["product", None, 1, ["sum"]])
def test_unknown_join_is_refused_with_those_that_are_known(join):
    message = rf"^join must be 'sum', 'concatenate' or a function .*, got {re.escape(repr(join))}\."
    with pytest.raises(ValueError, match=message):
        nn.Parallel([nn.Identity()], join)


@pytest.mark.parametrize(("join", "shown"), [("sum", "'sum'"), (jnp.stack, "a function")])
def test_axis_beside_another_join_is_refused(join, shown):
    message = rf"^axis is for join='concatenate' alone, and join is {shown}\.$"
    with pytest.raises(ValueError, match=message):
        nn.Parallel([nn.Identity()], join, axis=0)


@pytest.mark.parametrize("index", ["a", slice(2), 1.0])
def test_other_index_is_refused(index):
    message = f"indexed by an integer, got {type(index).__name__}"
    with pytest.raises(TypeError, match=message):
        nn.Parallel([nn.Identity()])[index]


@pytest.mark.parametrize("index", [2, -3])
def test_index_past_the_end_is_refused(index):
    with pytest.raises(IndexError, match=f"Parallel of 2 branches has no branch {index}"):
        nn.Parallel([nn.Identity(), nn.Identity()])[index]


def returning(output):
    return nn.Lambda(lambda x: output)


def zeros(*shape):
    return np.zeros(shape, np.float32)


MISFITS = {
    "shapes to sum": (
        "sum",
        {},
        [zeros(4), zeros(4), zeros(5)],
        r"cannot sum what branches\[0\] and branches\[2\] return: outputs\[0\] is an array of "
        r"shape \(4,\) and dtype float32, and outputs\[2\] is an array of shape \(5,\) and dtype",
    ),
    "shapes in a tree": (
        "sum",
        {},
        [{"a": zeros(4)}, {"a": zeros()}],
        r"outputs\[0\]\['a'\] is .* \(4,\) .*, and outputs\[1\]\['a'\] is .* \(\) and",
    ),
    "trees": (
        "sum",
        {},
        [(zeros(4),), zeros(4)],
        r"outputs\[0\] is a tuple of length 1, and outputs\[1\] is an array",
    ),
    "text": (
        "sum",
        {},
        [zeros(4), "a"],
        r"cannot sum what branches\[1\] returns: outputs\[1\] is a leaf of type str, and no array",
    ),
    "numbers of axes": (
        "concatenate",
        {},
        [zeros(4), zeros(4, 1)],
        r"cannot concatenate what branches\[0\] and branches\[1\] return: .* \(4,\) .* \(4, 1\)",
    ),
    "another axis": (
        "concatenate",
        {"axis": -1},
        [zeros(4, 1), zeros(3, 2)],
        r"outputs\[0\] is an array of shape \(4, 1\) .* outputs\[1\] is an array of shape \(3, 2\)",
    ),
    "no such axis": (
        "concatenate",
        {"axis": 1},
        [zeros(4), zeros(4)],
        r"cannot concatenate what branches\[0\] returns: outputs\[0\] is an array of shape \(4,\) "
        "and dtype float32, which has no axis 1",
    ),
}


@pytest.mark.parametrize("name", MISFITS)
def test_outputs_that_do_not_fit_are_refused_by_branch(name):
    join, options, outputs, message = MISFITS[name]
    model = nn.Sequential([nn.Parallel([*map(returning, outputs)], join, **options)])
    with pytest.raises(ValueError, match=r"^Parallel at Sequential.layers\[0\] .*" + message):
        model(X)


def test_error_in_branches_that_run_as_one_says_where_they_are(getkey):
    model = nn.Sequential([nn.Parallel([*linears(getkey(), 2), nn.Identity()])])
    with pytest.raises(ValueError, match=r"Linear expected x of shape \(3,\)") as caught:
        model(jnp.ones(2))
    note = "It happened in branches 0, 1 of Parallel at Sequential.layers[0], which run as one."
    assert note in caught.value.__notes__


def test_scalars_of_equal_branches_are_not_concatenated(getkey):
    model = nn.Parallel([linear(key, "scalar") for key in jr.split(getkey())], "concatenate")
    with pytest.raises(ValueError, match=r"branches\[0\] returns: .* shape \(\) .*has no axis 0"):
        model(X)


def test_plain_function_as_a_branch_says_how_to_wrap_it():
    model = nn.Parallel([nn.Identity(), jnp.sin])
    with pytest.raises(TypeError, match="unexpected keyword argument 'key'") as error:
        model(jnp.ones(2))
    note = "It happened in branch 1 of Parallel. Branches are called with `key=`: wrap a plain"
    assert any(each.startswith(note) for each in error.value.__notes__)
