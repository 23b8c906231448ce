"""Exported programs: the numbers of the function in any process, for any size of named axes."""

import collections
import concurrent.futures
import copy
import dataclasses
import functools
import hashlib
import importlib
import json
import pickle
import struct
import subprocess
import sys
from typing import Any, NamedTuple

import jax
import jax.export
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import optax
import pytest
from sklearn.datasets import load_digits

import eqxlike as eqx
from eqxlike import nn

NETWORK = """
import eqxlike as eqx
import jax


class DigitsNetwork(eqx.Module):
    layers: eqx.nn.MLP
    shift: jax.Array

    def __call__(self, image):
        return jax.nn.log_softmax(self.layers((image - self.shift) / 16))


def make(key):
    layers = eqx.nn.MLP(64, 10, width_size=16, depth=1, key=key)
    return DigitsNetwork(layers, jax.numpy.full(64, 0.5))


def predict(network, images):
    return jax.vmap(network)(images)
"""

ELSEWHERE = """
import importlib.util, sys
import jax, numpy as np
import eqxlike as eqx

assert importlib.util.find_spec("digits_network") is None
images, shift = np.load("images.npy"), np.load("shift.npy")
layers = tuple(
    {"weight": np.load(f"w{layer}.npy"), "bias": np.load(f"b{layer}.npy")} for layer in (0, 1)
)
baked, passed = eqx.load_exported("baked"), eqx.load_exported("passed")
network = {"layers": {"layers": layers}, "shift": shift}
gradient = jax.grad(lambda images: baked.call(images)[:, 3].sum())(images)
np.savez("found.npz", all=baked.call(images), one=baked.call(images[:1]),
         passed=passed.call(network, images), gradient=gradient)
"""


X, Y = jnp.ones((3, 2)), jnp.ones(3)


def _linear(x):
    return 2 * x + 1


@pytest.fixture
def saved(tmp_path):
    """A file with a program of `_linear`."""
    path = tmp_path / "linear"
    eqx.export(_linear, jnp.ones(3)).save(path)
    return path


def test_digits_network_gives_the_same_numbers_where_its_module_is_not(tmp_path, monkeypatch):
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "digits_network.py").write_text(NETWORK)
    monkeypatch.syspath_prepend(str(tmp_path / "source"))
    module = importlib.import_module("digits_network")
    monkeypatch.delitem(sys.modules, "digits_network")
    network = module.make(jax.random.key(0))
    images = load_digits(return_X_y=True)[0][:5].astype(np.float32)
    struct = jax.ShapeDtypeStruct(("batch", 64), jnp.float32)
    eqx.export(jax.vmap(network), struct, vjp_order=1).save(tmp_path / "baked")
    eqx.export(module.predict, network, struct).save(tmp_path / "passed")
    first, second = network.layers.layers
    arrays = {"w0": first.weight, "b0": first.bias, "w1": second.weight, "b1": second.bias}
    for name, array in {**arrays, "images": images, "shift": network.shift}.items():
        np.save(tmp_path / f"{name}.npy", array)

    subprocess.run([sys.executable, "-c", ELSEWHERE], cwd=tmp_path, check=True, timeout=120)

    found, expected = np.load(tmp_path / "found.npz"), jax.vmap(network)(images)
    gradient = jax.grad(lambda images: jax.vmap(network)(images)[:, 3].sum())(images)
    np.testing.assert_allclose(found["all"], expected, rtol=1e-5)
    np.testing.assert_allclose(found["one"], expected[:1], rtol=1e-5)
    np.testing.assert_allclose(found["passed"], expected, rtol=1e-5)
    np.testing.assert_allclose(found["gradient"], gradient, rtol=1e-4, atol=1e-7)


def test_training_step_goes_on_from_what_it_returned():
    model = nn.Linear(2, 1, key=jax.random.key(0))
    optimiser = optax.adam(0.1)
    x, y = jnp.ones((3, 2)), jnp.zeros((3, 1))

    @eqx.filter_jit(donate=("state",))
    def step(model, state, x, y):
        loss, gradient = eqx.filter_value_and_grad(
            lambda model: jnp.mean((jax.vmap(model)(x) - y) ** 2)
        )(model)
        updates, state = optimiser.update(gradient, state)
        return eqx.apply_updates(model, updates), state, {"loss": loss, "what": "mse"}

    state = optimiser.init(eqx.filter(model, eqx.is_inexact_array))
    # Optax promotes dtypes.
    with jax.numpy_dtype_promotion("standard"):
        exported = eqx.export(step, model, state, x, y)
        found = exported.call(model, state, x, y)
        found = exported.call(*found[:2], x, y)
        expected = step(model, state, x, y)
        expected = step(*expected[:2], x, y)
    np.testing.assert_allclose(found[0]["weight"], expected[0].weight, rtol=1e-6)
    assert type(found[1][0]).__name__ == "ScaleByAdamState"
    assert found[1][0].count == 2
    assert found[2]["what"] == "mse"


def test_output_keeps_its_nodes():
    class Pair(NamedTuple):
        left: Any
        right: Any

    def nest(x):
        return {"a": (x, None), "b": [Pair(x, 3), 0.5, "text", True]}

    output = eqx.export(nest, jnp.ones(2), dynamic=()).call(jnp.ones(2))
    assert list(output) == ["a", "b"]
    assert output["a"][1] is None
    pair, *rest = output["b"]
    assert (pair.right, *rest) == (3, 0.5, "text", True)
    assert type(pair)._fields == ("left", "right")


@pytest.mark.parametrize(
    ("dynamic", "shapes"),
    [
        (("batch",), "x: float32[batch, 4], y: float32[batch]"),
        ("batch", "x: float32[batch, 4], y: float32[batch]"),
        (("batch", "time"), "x: float32[batch, time], y: float32[batch]"),
        ({"x": {1: "time"}}, "x: float32[3, time], y: float32[3]"),
        ({"x": {-1: "time"}, "y": ["b"]}, "x: float32[3, time], y: float32[b]"),
        ({"x": (None, "time")}, "x: float32[3, time], y: float32[3]"),
        ((), "x: float32[3, 4], y: float32[3]"),
    ],
)
def test_dynamic_names_axes(dynamic, shapes):
    exported = eqx.export(lambda x, y: (x, y), jnp.ones((3, 4)), jnp.ones(3), dynamic=dynamic)
    assert shapes in repr(exported)


def test_dynamic_names_an_array_by_its_path():
    data = {"x": jnp.ones((2, 3)), "mask": jnp.ones(2)}
    exported = eqx.export(lambda data: data, data, dynamic={"data['x']": {1: "time"}})
    assert "data: {'mask': float32[2], 'x': float32[2, time]}" in repr(exported)


def test_names_in_a_shape_count_and_others_are_fixed():
    struct = jax.ShapeDtypeStruct(("n", "2*n"), jnp.float32)
    exported = eqx.export(lambda x, y: x.sum(1) + y.sum(), struct, jnp.ones(3))
    assert "(x: float32[n, 2*n], y: float32[3]) -> float32[n]" in repr(exported)
    assert exported.call(jnp.ones((2, 4)), jnp.ones(3)).shape == (2,)


def test_weights_of_modules_have_no_batch():
    model = nn.Linear(4, 2, key=jax.random.key(0))
    exported = eqx.export(lambda model, x: jax.vmap(model)(x), model, jnp.ones((3, 4)))
    assert "Linear(weight=float32[2, 4], bias=float32[2]), x: float32[batch, 4]" in repr(exported)


def test_module_of_other_static_fields_is_refused():
    class Scale(eqx.Module):
        weight: jax.Array
        factor: float = eqx.field(static=True)

    exported = eqx.export(lambda it, x: it.factor * it.weight * x, Scale(jnp.ones(()), 2.0), 3.0)
    assert exported.call(Scale(jnp.ones(()), 2.0), 3.0) == 6
    assert exported.call({"weight": jnp.ones(())}, 3.0) == 6
    with pytest.raises(
        ValueError, match=r"it\.factor was 2\.0 when this was exported.*; it is 5\.0"
    ):
        exported.call(Scale(jnp.ones(()), 5.0), 3.0)


@functools.partial(jax.tree_util.register_dataclass, data_fields=["x"], meta_fields=["factor"])
@dataclasses.dataclass
class Scaled:
    x: jax.Array
    factor: float


@pytest.mark.parametrize(
    ("first", "other", "message"),
    [
        (jtu.Partial(jnp.sin, Y), jtu.Partial(jnp.cos, Y), r"it\.static part was <sin> .*<cos>"),
        (Scaled(Y, 2.0), Scaled(Y, 3.0), r"it\.static part was \(2\.0,\) .*\(3\.0,\)"),
        (functools.partial(jnp.add, 1), functools.partial(jnp.add, 2), r"it was .*add.*, 1\)"),
    ],
)
def test_node_or_function_of_another_static_part_is_refused(first, other, message):
    exported = eqx.export(lambda it: jnp.ones(()), first)
    assert exported.call(first) == 1
    with pytest.raises(ValueError, match=message):
        exported.call(other)


def test_array_of_weak_type_gives_way_as_it_did():
    half, x = jnp.asarray(0.5), jnp.ones(3, jnp.bfloat16)
    exported = eqx.export(lambda scale, x: scale * x, half, x)
    assert exported.call(half, x).dtype == jnp.bfloat16


def test_frozen_weights_are_weights():
    plain = nn.Linear(3, 2, key=jax.random.key(0))
    frozen = nn.freeze(plain, lambda layer: layer.weight)
    for model in (plain, frozen):
        exported = eqx.export(lambda model: model, model)
        for given in (plain, frozen, {"weight": plain.weight, "bias": plain.bias}):
            np.testing.assert_array_equal(exported.call(given)["weight"], plain.weight)


def test_named_tuple_of_fields_that_were_renamed_is_read_back(tmp_path):
    pair = collections.namedtuple("Pair", "first class", rename=True)
    eqx.export(lambda x: pair(x, 2 * x), X).save(tmp_path / "pair")
    assert eqx.load_exported(tmp_path / "pair").call(X)._1.shape == X.shape


def test_set_is_told_in_one_order():
    first, other = frozenset([0, 8]), frozenset([8, 0])
    assert repr(first) != repr(other)
    assert eqx.export(lambda names: jnp.ones(2), first).call(other).shape == (2,)


def test_doubles_say_which_setting_they_need():
    with jax.enable_x64(True):
        exported = eqx.export(_linear, jnp.ones(3, jnp.float64))
    with pytest.raises(TypeError, match=r"must be float64\[batch\].*jax_enable_x64', True\)"):
        exported.call(jnp.ones(3))


def test_two_sizes_of_one_name_are_refused():
    with pytest.raises(ValueError, match=r"axis 0 of y 'batch'.*size 2, and that of x has 3"):
        eqx.export(lambda x, y: x, jnp.ones(3), jnp.ones(2))


@pytest.mark.parametrize(
    ("dynamic", "message"),
    [
        ({"z": {0: "b"}}, "axes of 'z', and there is no such array .* There are: x"),
        ({"x": {1: "b"}}, "names axis 1 of x 'b', and that has 1 axes"),
        ({"x": {0: 2}}, "has 2 for axis 0 of x: a name is a string"),
        ({"x": 3}, "`dynamic` has 3, and not names of axes"),
        (None, "`dynamic` has None, and not names of axes"),
        (("a b",), r"The shape \('a b',\) of x cannot be read"),
        ("a, b", r"'a, b' names 2 axes\. Give a name for each, as in \('batch', 'time'\)"),
        ("", "'' names 0 axes"),
    ],
)
def test_bad_names_of_axes_are_refused(dynamic, message):
    with pytest.raises(ValueError, match=message):
        eqx.export(_linear, jnp.ones(3), dynamic=dynamic)


def test_repr_says_what_it_takes_where_it_runs_and_who_made_it():
    exported = eqx.export(_linear, jnp.ones(3), vjp_order=1)
    lines = repr(exported).splitlines()
    assert lines[0] == "Exported: _linear(x: float32[batch]) -> float32[batch]"
    assert [line.split() for line in lines[1:3]] == [
        ["platforms", "cpu,", "cuda"],
        ["gradients", "once"],
    ]
    assert f"eqxlike {eqx.__version__}, jax {jax.__version__}" in lines[4]


def test_stablehlo_is_text():
    assert "stablehlo.multiply" in eqx.export(_linear, jnp.ones(3)).stablehlo


def test_gradient_of_a_gradient():
    exported = eqx.export(lambda x: x**3, jnp.ones(()), vjp_order=2)
    assert jax.grad(jax.grad(exported.call))(2.0) == pytest.approx(12.0)


def test_gradient_that_was_not_exported_says_how():
    exported = eqx.export(_linear, jnp.ones(()))
    with pytest.raises(ValueError, match="without gradients: export it again with `vjp_order=1`"):
        jax.grad(exported.call)(2.0)


def test_keys_are_passed():
    key = jax.random.key(0)
    exported = eqx.export(lambda key, x: x + jax.random.normal(key, x.shape), key, jnp.ones(3))
    found = exported.call(jax.random.clone(key), jnp.ones(2))
    np.testing.assert_allclose(found, 1 + jax.random.normal(key, (2,)))


def test_a_call_compiles_once_for_a_shape():
    exported = eqx.export(_linear, jnp.ones(3))
    assert [float(exported.call(np.ones(2, np.float32))[0]) for _ in range(2)] == [3.0, 3.0]
    assert len(exported._runner._call_trees.traces) == 1


def test_a_warm_call_compares_nothing_again(monkeypatch):
    model, x = nn.MLP(2, 3, width_size=4, depth=1, key=jax.random.key(0)), jnp.ones((5, 2))
    exported = eqx.export(lambda model, x: jax.vmap(model)(x), model, x)
    expected = exported.call(model, x)
    for name in ("as_given", "arrays_in", "build"):
        monkeypatch.delattr(f"eqxlike._export._run.{name}")
    other = jax.tree.map(lambda leaf: 1 * leaf if eqx.is_array(leaf) else leaf, model)
    np.testing.assert_array_equal(exported.call(other, x), expected)


def _scaled(model, scale, x):
    return scale * model(x)


def test_what_was_compared_for_one_call_does_not_pass_another():
    model = nn.Linear(2, 3, key=jax.random.key(0))
    exported = eqx.export(_scaled, model, 1.0, jnp.ones(2), dynamic=())
    calls = [(model, 1.0, X[0])] * 2
    assert [exported.call(*each).shape for each in calls] == [(3,)] * 2
    for wrong, message in [
        ((model, 1, X[0]), "scale was 1.0"),
        ((model, -1.0, X[0]), "scale was 1.0"),
        ((model, 1.0, Y), r"x must be float32\[2\]; it is float32\[3\]"),
        ((nn.Linear(2, 3, use_bias=False, key=jax.random.key(0)), 1.0, X[0]), "model.use_bias was"),
        ((nn.Linear(2, 4, key=jax.random.key(0)), 1.0, X[0]), "model.out_features was 3"),
    ]:
        for _ in range(2):
            with pytest.raises((TypeError, ValueError), match=message):
                exported.call(*wrong)
    np.testing.assert_allclose(exported.call(*calls[0]), model(X[0]), rtol=1e-6)


def test_numbers_that_are_equal_are_told_apart():
    exported = eqx.export(lambda x: jnp.array([jnp.sign(1 / x), x]), jnp.ones(()), dynamic=())
    for number in (0.0, -0.0, 0, 2.5, np.float32(3), -0.0, 0.0):
        expected = [np.copysign(1, number), number]
        np.testing.assert_array_equal(exported.call(number), expected)


def test_arguments_may_be_passed_by_name():
    exported = eqx.export(lambda x, y: x - y, jnp.ones(2), jnp.ones(2))
    for found in (exported.call(x=X[0], y=3 * X[0]), exported.call(X[0], y=3 * X[0])):
        np.testing.assert_array_equal(found, [-2, -2])
    for args, kwargs, came in [
        ((), {"x": X[0]}, "x"),
        ((X[0], X[0]), {"x": X[0]}, "x, y, x"),
        ((X[0],), {"z": X[0]}, "x, z"),
        ((X[0],), {"x": X[0]}, "x, x"),
    ]:
        with pytest.raises(TypeError, match=rf"takes \(x: .*\); it got \({came}\)\."):
            exported.call(*args, **kwargs)


def test_a_program_that_is_mapped_says_what_to_export():
    exported = eqx.export(lambda x: 2 * x, jnp.ones(2))
    with pytest.raises(NotImplementedError) as caught:
        jax.vmap(exported.call)(X)
    assert "export a function of batches" in "".join(caught.value.__notes__)


def test_numbers_that_change_compile_no_more():
    exported = eqx.export(lambda x, rates: x * rates["a"], jnp.ones(()), {"a": jnp.ones(())})
    given = [(n, {"a": n / 2}) for n in range(1, 5)]
    for x, rates in given:
        assert float(exported.call(x, rates)) == x * rates["a"]
        assert float(exported.call(x, {"a": jnp.float32(2)})) == 2 * x
    runner = exported._runner
    # With the tree as it is, and with its arrays taken out.
    assert (len(runner._call_trees.traces), len(runner._call_arrays.traces)) == (1, 1)


def test_children_in_any_order_are_those_of_their_names():
    exported = eqx.export(lambda tree: {"z": tree["b"], "a": tree["a"]}, {"b": X, "a": Y})
    for given in ({"b": X, "a": 2 * Y}, {"a": 2 * Y, "b": X}):
        found = exported.call(given)
        np.testing.assert_array_equal(found["z"], X)
        np.testing.assert_array_equal(found["a"], 2 * Y)


def test_fields_of_a_module_come_back_by_name():
    model = nn.Linear(2, 3, key=jax.random.key(0))
    found = eqx.export(lambda model: [model], model).call(model)[0]
    np.testing.assert_array_equal(found["bias"], model.bias)
    np.testing.assert_array_equal(found["weight"], model.weight)


class _Labelled(eqx.Module):
    x: jax.Array
    labels: list = eqx.field(static=True)


def test_a_static_list_that_was_changed_is_another_program():
    labelled = _Labelled(Y, ["a"])
    exported = eqx.export(lambda labelled: labelled.x, labelled)
    for _ in range(2):
        exported.call(labelled)
    labelled.labels.append("b")
    with pytest.raises(ValueError, match=r"labelled.labels was \['a'\] when this was exported"):
        exported.call(labelled)


def test_programs_are_called_from_threads():
    exported = eqx.export(lambda x, n: x + n, jnp.ones(2), jnp.ones(()))
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda n: exported.call(X[0], float(n)), range(200)))
    np.testing.assert_array_equal(found, [[n + 1, n + 1] for n in range(200)])


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda it: pickle.loads(pickle.dumps(it))])
def test_a_copy_is_the_same_program(copied):
    exported = copied(eqx.export(_linear, jnp.ones(3)))
    assert exported.call(jnp.ones(1)) == 3


@pytest.fixture(scope="module")
def taking():
    tree = {"a": jnp.ones((3, 2)), "b": (jnp.ones(3), "mean")}
    return eqx.export(lambda tree, function, x: x, tree, jnp.tanh, jnp.ones(3))


GOOD = {"a": X, "b": (Y, "mean")}


@pytest.mark.parametrize(
    ("args", "error", "message"),
    [
        ((GOOD,), TypeError, r"takes \(tree: .*, which is 3 in all; it got 1"),
        ((GOOD, jnp.tanh, [1.0]), TypeError, r"x must be float32\[batch\]; it is of type list"),
        ((GOOD, jnp.tanh, X), ValueError, r"x must be float32\[batch\]; it is float32\[3, 2\]"),
        ((GOOD, jnp.tanh, jnp.ones(3, int)), TypeError, r"x must be .*; it is int32\[3\]"),
        ((GOOD, jnp.sin, Y), ValueError, "function was <tanh> when this was exported"),
        ((Y, jnp.tanh, Y), TypeError, r"tree must be {'a': .*}; it is float32\[3\]"),
        (({"a": X}, jnp.tanh, Y), TypeError, r"tree\['b'\] is missing"),
        (({**GOOD, "c": 1}, jnp.tanh, Y), TypeError, r"tree\['c'\] is one too many"),
        (({"a": X, "b": (Y, 1)}, jnp.tanh, Y), ValueError, r"tree\['b'\]\[1\] was 'mean'"),
        (({"a": X[:2], "b": (Y, "mean")}, jnp.tanh, Y), ValueError, "and batch is 2 in what came"),
        (({**GOOD, "a": X[:0]}, jnp.tanh, Y), ValueError, r"from 1 upwards; it is float32\[0, 2\]"),
    ],
)
def test_argument_that_does_not_fit_is_named(taking, args, error, message):
    with pytest.raises(error, match=message):
        taking.call(*args)


@pytest.mark.parametrize(
    ("dtype", "number"),
    [("int4", 100), ("uint8", 300), ("int32", 2**40), ("uint8", -1), ("float32", 10**400)],
)
def test_number_that_is_too_large_is_refused(dtype, number):
    exported = eqx.export(lambda x: x, jnp.zeros((), dtype))
    assert exported.call(3) == 3
    with pytest.raises(TypeError, match=rf"x must be {dtype}\[\]; it is {number}"):
        exported.call(number)


def test_true_is_not_one():
    exported = eqx.export(lambda x, n: x * n, jnp.ones(2), 1)
    with pytest.raises(ValueError, match=r"n was 1 when this was exported.*; it is True"):
        exported.call(jnp.ones(2), True)


@pytest.mark.parametrize(
    ("function", "error", "message"),
    [
        (lambda x: (x, jnp.sin), TypeError, r"returned something at output\[1\] that no file"),
        (lambda x: jnp.sin, TypeError, "returned something at output that no file"),
        (lambda x: eqx.error_if(x, x.sum() > 0, "no"), ValueError, "calls back: error_if at "),
        (
            lambda x: eqx.filter_pure_callback(np.sin, x, result_shape_dtypes=x),
            ValueError,
            f"calls back: pure_callback at {__file__}:",
        ),
        (lambda x: jax.debug.print("{}", x), ValueError, r"calls back: jax\.debug\.print at"),
        (3, TypeError, "expects a function and its arguments, got 3"),
    ],
)
def test_function_that_cannot_leave_is_refused(function, error, message):
    with pytest.raises(error, match=message):
        eqx.export(function, jnp.ones(3))


def test_function_of_one_example_is_told_of_its_batch():
    with pytest.raises(ValueError, match="expected x of shape") as caught:
        eqx.export(nn.Linear(3, 2, key=jax.random.key(0)), jnp.ones(3))
    notes = "\n".join(caught.value.__notes__)
    assert "x: float32[batch]) was exported. Axes that go by name" in notes


def test_platform_that_is_not_known_is_refused():
    with pytest.raises(ValueError, match="must be of 'cpu', 'cuda', 'rocm', 'tpu'; got 'gpu'"):
        eqx.export(_linear, jnp.ones(3), platforms=("gpu",))


def test_program_for_another_platform_says_so():
    with pytest.raises(ValueError, match=r"was exported for platforms.*cuda"):
        eqx.export(_linear, jnp.ones(3), platforms=("cuda",)).call(jnp.ones(3))


def test_missing_flatbuffers_names_the_extra(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"pip install 'eqxlike\[export\]'"):
        eqx.export(_linear, jnp.ones(3))


def test_file_cut_short_anywhere_is_refused(saved):
    content = saved.read_bytes()
    for size in (0, 5, 16, 40, 70, 300, len(content) - 1):
        saved.write_bytes(content[:size])
        with pytest.raises(ValueError, match=r"is cut off|is no exported program") as caught:
            eqx.load_exported(saved)
        assert str(saved) in str(caught.value)


def test_flipped_bit_anywhere_is_refused(saved):
    content = saved.read_bytes()
    for place in [*range(72), *range(72, len(content), 97), len(content) - 1]:
        saved.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        with pytest.raises(ValueError, match=r"is damaged|is cut off|is no exported program"):
            eqx.load_exported(saved)


def test_another_kind_of_file_is_refused(tmp_path):
    np.save(tmp_path / "array.npy", np.ones(3))
    with pytest.raises(ValueError, match=r"array\.npy is no exported program"):
        eqx.load_exported(tmp_path / "array.npy")


def _rewritten(content: bytes, version: int = 1, **changes: Any) -> bytes:
    """The file, sound, with another format or other entries in its header."""
    _, header_size, program_size = struct.unpack("<IQQ", content[16:36])
    header = json.loads(content[68 : 68 + header_size]) | changes
    text, program = json.dumps(header).encode(), content[68 + header_size :]
    prefix = struct.pack("<IQQ", version, len(text), program_size)
    checksum = hashlib.sha256(prefix + text + program).digest()
    return content[:16] + prefix + checksum + text + program


def test_newer_format_is_refused_by_name(saved):
    saved.write_bytes(_rewritten(saved.read_bytes(), version=2))
    with pytest.raises(ValueError, match="newer version of eqxlike, in format 2; this one reads"):
        eqx.load_exported(saved)


def test_newer_jax_is_refused_by_name(saved):
    changes = {"calling_convention_version": 99, "versions": {"jax": "9.9"}}
    saved.write_bytes(_rewritten(saved.read_bytes(), **changes))
    with pytest.raises(
        ValueError, match=r"by jax 9\.9, with calling convention 99; jax .* reads 9"
    ):
        eqx.load_exported(saved)


def test_operation_that_this_jax_does_not_know_is_refused_by_name(saved, monkeypatch):
    saved.write_bytes(_rewritten(saved.read_bytes(), versions={"jax": "99.0"}))

    def unknown(self):
        raise jax.errors.JaxRuntimeError("Failed to deserialize StableHLO\nand more")

    monkeypatch.setattr(jax.export.Exported, "mlir_module", unknown)
    with pytest.raises(
        ValueError, match=r"by jax 99\.0, and jax .* cannot read it \(Failed"
    ) as caught:
        eqx.load_exported(saved)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "changes",
    [
        {"inputs": {"is": "pickle"}},
        {"inputs": None},
        {"inputs": {"is": "array", "shape": [], "dtype": "float32"}},
        {"parameters": []},
        {"platforms": 3},
        {"vjp_order": "once"},
        {"vjp_order": float("inf")},
        {"versions": ["jax"]},
        {"more": 1},
    ],
    ids=str,
)
def test_header_of_something_else_is_refused(saved, changes):
    saved.write_bytes(_rewritten(saved.read_bytes(), **changes))
    with pytest.raises(ValueError, match="its header tells of no program"):
        eqx.load_exported(saved)


def test_what_cannot_be_written_leaves_the_old_file(saved, monkeypatch):
    before = saved.read_bytes()
    monkeypatch.setattr("os.replace", lambda *paths: (_ for _ in ()).throw(OSError("full")))
    with pytest.raises(OSError, match="full"):
        eqx.export(_linear, jnp.ones(3)).save(saved)
    assert saved.read_bytes() == before
    assert list(saved.parent.iterdir()) == [saved]


def test_folder_that_is_not_there_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="missing/program"):
        eqx.export(_linear, jnp.ones(3)).save(tmp_path / "missing" / "program")
