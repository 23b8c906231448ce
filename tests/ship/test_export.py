"""An exported program computes the function in any process, for any size of its named axes."""

import collections
import dataclasses
import functools
import importlib
import subprocess
import sys
from typing import Any, NamedTuple

import jax
import jax.export
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
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
layers = np.load("layers.npy", allow_pickle=True).item()
baked, passed = eqx.load_exported("baked"), eqx.load_exported("passed")
network = {"layers": layers, "shift": shift}
gradient = jax.grad(lambda images: baked.call(images)[:, 3].sum())(images)
np.savez("found.npz", all=baked.call(images), one=baked.call(images[:1]),
         passed=passed.call(network, images), gradient=gradient)
"""


X, Y = jnp.ones((3, 2)), jnp.ones(3)


def _linear(x):
    return 2 * x + 1


def test_process_without_the_module_computes_the_same(tmp_path, monkeypatch):
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
    layers = [
        {"weight": np.asarray(each.weight), "bias": np.asarray(each.bias)}
        for each in network.layers.layers
    ]
    given = {"layers": {"layers": tuple(layers)}, "images": images, "shift": network.shift}
    for name, value in given.items():
        np.save(tmp_path / f"{name}.npy", value)

    subprocess.run([sys.executable, "-c", ELSEWHERE], cwd=tmp_path, check=True, timeout=120)

    found, expected = np.load(tmp_path / "found.npz"), jax.vmap(network)(images)
    gradient = jax.grad(lambda images: jax.vmap(network)(images)[:, 3].sum())(images)
    np.testing.assert_allclose(found["all"], expected, rtol=1e-5)
    np.testing.assert_allclose(found["one"], expected[:1], rtol=1e-5)
    np.testing.assert_allclose(found["passed"], expected, rtol=1e-5)
    np.testing.assert_allclose(found["gradient"], gradient, rtol=1e-4, atol=1e-7)


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


def test_dynamic_names_axes():
    for dynamic, shapes in [
        (("batch",), "x: float32[batch, 4], y: float32[batch]"),
        ("batch", "x: float32[batch, 4], y: float32[batch]"),
        (("batch", "time"), "x: float32[batch, time], y: float32[batch]"),
        ({"x": {1: "time"}}, "x: float32[3, time], y: float32[3]"),
        ({"x": {-1: "time"}, "y": ["b"]}, "x: float32[3, time], y: float32[b]"),
        ({"x": (None, "time")}, "x: float32[3, time], y: float32[3]"),
        ((), "x: float32[3, 4], y: float32[3]"),
    ]:
        exported = eqx.export(lambda x, y: (x, y), jnp.ones((3, 4)), jnp.ones(3), dynamic=dynamic)
        assert shapes in repr(exported)
    data = {"x": jnp.ones((2, 3)), "mask": jnp.ones(2)}
    exported = eqx.export(lambda data: data, data, dynamic={"data['x']": {1: "time"}})
    assert "data: {'mask': float32[2], 'x': float32[2, time]}" in repr(exported)


def test_names_in_a_shape_count_and_weights_of_modules_have_no_batch():
    struct = jax.ShapeDtypeStruct(("n", "2*n"), jnp.float32)
    exported = eqx.export(lambda x, y: x.sum(1) + y.sum(), struct, jnp.ones(3))
    assert "(x: float32[n, 2*n], y: float32[3]) -> float32[n]" in repr(exported)
    assert exported.call(jnp.ones((2, 4)), jnp.ones(3)).shape == (2,)
    model = nn.Linear(4, 2, key=jax.random.key(0))
    exported = eqx.export(lambda model, x: jax.vmap(model)(x), model, jnp.ones((3, 4)))
    assert "Linear(weight=float32[2, 4], bias=float32[2]), x: float32[batch, 4]" in repr(exported)


def test_module_with_other_static_fields_is_refused():
    class Scale(eqx.Module):
        weight: jax.Array
        factor: float = eqx.field(static=True)

    exported = eqx.export(lambda it, x: it.factor * it.weight * x, Scale(jnp.ones(()), 2.0), 3.0)
    assert exported.call(Scale(jnp.ones(()), 2.0), 3.0) == 6
    assert exported.call({"weight": jnp.ones(())}, 3.0) == 6
    with pytest.raises(ValueError, match=r"it\.factor must be 2\.0, the static .*; it is 5\.0"):
        exported.call(Scale(jnp.ones(()), 5.0), 3.0)


@functools.partial(jax.tree_util.register_dataclass, data_fields=["x"], meta_fields=["factor"])
@dataclasses.dataclass
class Scaled:
    x: jax.Array
    factor: float


def test_node_or_function_with_another_static_part_is_refused():
    for first, other, message in [
        (jtu.Partial(jnp.sin, Y), jtu.Partial(jnp.cos, Y), r"\(static part\) .* <sin>, .*<cos>"),
        (Scaled(Y, 2.0), Scaled(Y, 3.0), r"it \(static part\) must be \(2\.0,\), .*\(3\.0,\)"),
        (functools.partial(jnp.add, 1), functools.partial(jnp.add, 2), r"it must be .*add.*, 1>"),
    ]:
        exported = eqx.export(lambda it: jnp.ones(()), first)
        assert exported.call(first) == 1
        with pytest.raises(ValueError, match=message):
            exported.call(other)
    first, other = frozenset([0, 8]), frozenset([8, 0])
    # Equal sets may have different orders.
    assert repr(first) != repr(other)
    assert eqx.export(lambda names: jnp.ones(2), first).call(other).shape == (2,)


def test_weak_types_keys_and_float64_are_arguments():
    half, x = jnp.asarray(0.5), jnp.ones(3, jnp.bfloat16)
    exported = eqx.export(lambda scale, x: scale * x, half, x)
    assert exported.call(half, x).dtype == jnp.bfloat16
    key = jax.random.key(0)
    exported = eqx.export(lambda key, x: x + jax.random.normal(key, x.shape), key, jnp.ones(3))
    found = exported.call(jax.random.clone(key), jnp.ones(2))
    np.testing.assert_allclose(found, 1 + jax.random.normal(key, (2,)))
    with jax.enable_x64(True):
        exported = eqx.export(_linear, jnp.ones(3, jnp.float64))
    with pytest.raises(TypeError, match=r"must be float64\[batch\].*jax_enable_x64', True\)"):
        exported.call(jnp.ones(3))


def test_frozen_weights_are_weights():
    plain = nn.Linear(3, 2, key=jax.random.key(0))
    frozen = nn.freeze(plain, lambda layer: layer.weight)
    for model in (plain, frozen):
        exported = eqx.export(lambda model: model, model)
        for given in (plain, frozen, {"weight": plain.weight, "bias": plain.bias}):
            np.testing.assert_array_equal(exported.call(given)["weight"], plain.weight)


def test_named_tuple_with_renamed_fields_is_read_back(tmp_path):
    pair = collections.namedtuple("Pair", "first class", rename=True)
    eqx.export(lambda x: pair(x, 2 * x), X).save(tmp_path / "pair")
    assert eqx.load_exported(tmp_path / "pair").call(X)._1.shape == X.shape


def test_bad_names_of_axes_are_refused():
    for dynamic, message in [
        ({"z": {0: "b"}}, "axes of 'z', but no array .* The arrays are: x"),
        ({"x": {1: "b"}}, "gives axis 1 of x the name 'b', but x has 1 axes"),
        ({"x": {0: 2}}, "has 2 for axis 0 of x: a name must be a string"),
        ({"x": 3}, "`dynamic` must contain names of axes, .*; got 3"),
        (None, "`dynamic` must contain names of axes, .*; got None"),
        (("a b",), r"The shape \('a b',\) of x is invalid"),
        ("a, b", r"is invalid: give a name for each axis, such as \('batch', 'time'\)"),
        ("", "is invalid: give a name for each axis"),
    ]:
        with pytest.raises(ValueError, match=message):
            eqx.export(_linear, jnp.ones(3), dynamic=dynamic)
    with pytest.raises(ValueError, match=r"axis 0 of y .* has size 2, but 'batch' has size 3 in x"):
        eqx.export(lambda x, y: x, jnp.ones(3), jnp.ones(2))


def test_gradients_exist_up_to_the_exported_order():
    exported = eqx.export(lambda x: x**3, jnp.ones(()), vjp_order=2)
    assert jax.grad(jax.grad(exported.call))(2.0) == pytest.approx(12.0)
    exported = eqx.export(_linear, jnp.ones(()))
    with pytest.raises(ValueError, match="without gradients: export it again with `vjp_order=1`"):
        jax.grad(exported.call)(2.0)


def test_repr_has_signature_platforms_gradients_and_versions():
    exported = eqx.export(_linear, jnp.ones(3), vjp_order=1)
    lines = repr(exported).splitlines()
    assert lines[0] == "Exported: _linear(x: float32[batch]) -> float32[batch]"
    assert [line.split() for line in lines[1:3]] == [
        ["platforms", "cpu,", "cuda"],
        ["gradients", "once"],
    ]
    assert f"eqxlike {eqx.__version__}, jax {jax.__version__}" in lines[4]
    assert "stablehlo.multiply" in exported.stablehlo


def test_function_with_a_callback_or_a_function_as_output_is_refused():
    def call_back(x):
        return eqx.filter_pure_callback(np.sin, x, result_shape_dtypes=x)

    for function, error, message in [
        (lambda x: (x, jnp.sin), TypeError, r"returned a value at output\[1\] that cannot"),
        (lambda x: jnp.sin, TypeError, "returned a value at output that cannot"),
        (call_back, ValueError, f"calls back to Python, .*: pure_callback at {__file__}:"),
        (3, TypeError, "3 is not a callable object: `export` expects a function"),
    ]:
        with pytest.raises(error, match=message):
            eqx.export(function, jnp.ones(3))


def test_error_of_the_function_explains_named_axes():
    with pytest.raises(ValueError, match="expected x of shape") as caught:
        eqx.export(nn.Linear(3, 2, key=jax.random.key(0)), jnp.ones(3))
    notes = "\n".join(caught.value.__notes__)
    assert "x: float32[batch]). Named axes may have any size" in notes
    with pytest.raises(TypeError) as caught:
        eqx.export(lambda x: jnp.arange(len(x)), X)
    assert "such as `len(x)`" in caught.value.__notes__[-1]
    exported = eqx.export(lambda x: jnp.arange(x.shape[0]), X)
    assert exported.call(jnp.ones((4, 2))).shape == (4,)


def test_wrong_platforms_are_refused():
    with pytest.raises(ValueError, match="some of 'cpu', 'cuda', 'rocm', 'tpu'; got 'gpu'"):
        eqx.export(_linear, jnp.ones(3), platforms=("gpu",))
    with pytest.raises(ValueError, match=r"was exported for platforms.*tpu"):
        eqx.export(_linear, jnp.ones(3), platforms=("tpu",)).call(jnp.ones(3))


def test_missing_flatbuffers_names_the_extra(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"pip install 'eqxlike\[export\]'"):
        eqx.export(_linear, jnp.ones(3))
