"""`filter_shard_map` on two devices."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import eqxlike
from eqxlike import filter_grad, filter_jit, filter_shard_map, filter_vmap
from tests.transforms.models import MESH, ROWS, WHOLE

X = jnp.arange(8.0).reshape(4, 2)

on_mesh = functools.partial(filter_shard_map, mesh=MESH)


def centred(x):
    return x - jax.lax.pmean(x.mean(), "data")


class Scale(eqxlike.Module):
    weight: Any
    name: str

    def __call__(self, x):
        return self.weight * centred(x)

    @on_mesh(in_specs=(None, ROWS), out_specs=ROWS)
    def method(self, x):
        return self(x)


SCALE = Scale(jnp.array(2.0), "double")


def test_each_device_calls_any_kind_of_callable_on_its_part():
    for mapped in (
        on_mesh(SCALE, in_specs=ROWS, out_specs=ROWS),
        on_mesh(SCALE.__call__, in_specs=(ROWS,), out_specs=ROWS),
        on_mesh(lambda x: SCALE(x), in_specs={"x": ROWS}, out_specs=ROWS),
        on_mesh(functools.partial(Scale.__call__, SCALE), in_specs=ROWS, out_specs=ROWS),
        SCALE.method,
    ):
        np.testing.assert_array_equal(mapped(X), 2 * (X - X.mean()))
    assert "all_reduce" in on_mesh(centred, in_specs=ROWS, out_specs=ROWS).lower(X).as_text()


def test_specs_are_given_by_position_or_name_and_static_values_pass_through():
    def function(model, data, label="x", *more, factor=1.0, **named):
        shares = [data["x"] * factor, *more, named.get("last")]
        return {"shares": shares, "weight": model.weight, "label": (label, model.name, max)}

    out_specs = {"shares": ROWS, "weight": WHOLE, "label": None}
    by_place = on_mesh(function, in_specs=(WHOLE, {"x": ROWS}), out_specs=out_specs)
    output = by_place(SCALE, {"x": X}, factor=3.0)
    assert output["label"] == ("x", "double", max)
    np.testing.assert_array_equal(output["shares"][0], 3 * X)
    in_specs = {"model": Scale(WHOLE, "double"), "data": ROWS, "more": (ROWS,), "last": ROWS}
    by_name = on_mesh(function, in_specs=in_specs, out_specs=out_specs)
    output = by_name(SCALE, {"x": X}, "y", X + 1, last=X + 2)
    assert output["label"] == ("y", "double", max)
    for place, share in enumerate(output["shares"]):
        np.testing.assert_array_equal(share, X + place)


def test_traces_once_for_each_structure():
    traces = []

    @on_mesh(in_specs=(ROWS, None, None), out_specs=ROWS)
    def function(x, weight, label):
        traces.append(label)
        return weight * centred(x)

    for weight in (1.0, 2.0):
        for label in ("a", "b"):
            out = function(X, jnp.array(weight), label)
            np.testing.assert_array_equal(out, weight * (X - X.mean()))
    assert traces == ["a", "b"]


@pytest.mark.parametrize(
    ("axis_type", "is_context"), [(AxisType.Auto, True), (AxisType.Explicit, False)]
)
def test_composes_with_other_transformations_on_any_mesh(axis_type, is_context):
    mesh = jax.make_mesh((2,), ("data",), axis_types=(axis_type,))
    given: Any = {} if is_context else {"mesh": mesh}

    @filter_shard_map(**given, in_specs=(WHOLE, ROWS), out_specs=WHOLE)
    def loss(model, x):
        return jax.lax.pmean((model(x) ** 2).mean(), "data")

    def expected(weight, x):
        return ((weight * (x - x.mean())) ** 2).mean()

    def run():
        gradient_of = filter_jit(filter_grad(loss))
        gradient = gradient_of(SCALE, X).weight
        # The next training step is called with an array from the first step.
        moved = Scale(SCALE.weight + 0 * gradient, SCALE.name)
        np.testing.assert_allclose(gradient_of(moved, X).weight, gradient)
        xs = jnp.stack([X, 3 * X])
        return gradient, filter_vmap(loss, in_axes=(None, 0))(SCALE, xs)

    if is_context:
        with jax.set_mesh(mesh):
            gradient, losses = run()
    else:
        gradient, losses = run()
        placed = jax.device_put(X, NamedSharding(mesh, ROWS))
        np.testing.assert_allclose(loss(SCALE, placed), expected(2.0, X))
    np.testing.assert_allclose(gradient, jax.grad(expected)(2.0, X), rtol=1e-6)
    np.testing.assert_allclose(losses, [expected(2.0, X), expected(2.0, 3 * X)], rtol=1e-6)


def test_failed_check_on_one_device_raises_and_prints_its_message(capfd):
    checked = on_mesh(
        lambda x: eqxlike.error_if(x, x > 6, "too large"), in_specs=ROWS, out_specs=ROWS
    )
    with pytest.raises(eqxlike.EqxlikeRuntimeError, match="too large"):
        checked(X)
    assert "too large" in capfd.readouterr().err
    assert checked(X - 1).sum() == 20


OF_MODEL = {"mesh": jax.make_mesh((2, 1), ("data", "model")), "axis_names": {"model"}}
ERRORS = [
    ({"in_specs": PartitionSpec("model")}, (X,), ["P('model',)", "x", "(4, 2)", "'data': 2"]),
    ({"in_specs": ({"a": ROWS},)}, ({"a": X[:3]},), ["x['a']", "(3, 2)", "2 equal parts"]),
    ({"in_specs": ("data",)}, (X,), ["'data' for x", "PartitionSpec"]),
    ({"in_specs": PartitionSpec(None, None, "data")}, (X,), ["3 entries", "2 axes"]),
    ({"in_specs": {}}, (X,), ["no spec for the argument x"]),
    ({"in_specs": {"x": ROWS, "y": ROWS}}, (X,), ["'y'", "the arguments are x"]),
    ({"in_specs": (ROWS, ROWS)}, (X,), ["the arguments are x"]),
    ({"in_specs": ([ROWS],)}, (X,), ["in_specs", "x", "prefix"]),
    ({"in_specs": ROWS, **OF_MODEL}, (X,), ["'data' is not one of `axis_names`"]),
    ({"in_specs": ROWS, "mesh": None}, (X,), ["mesh=", "jax.set_mesh"]),
    ({"in_specs": ROWS, "out_specs": (ROWS,)}, (X,), ["out_specs", "prefix"]),
    ({"in_specs": ROWS, "out_specs": WHOLE}, (X,), ["out_specs", "replicated"]),
    ({"in_specs": ROWS, "out_specs": PartitionSpec("model")}, (X,), ["out_specs", "'model'"]),
]


def test_error_names_the_spec_and_the_argument():
    for options, args, words in ERRORS:
        options = {"mesh": MESH, "out_specs": ROWS, **options}
        with pytest.raises(ValueError, match=r"_specs|mesh") as caught:
            filter_shard_map(lambda x: x, **options)(*args)
        assert not [word for word in words if word not in str(caught.value)], str(caught.value)
