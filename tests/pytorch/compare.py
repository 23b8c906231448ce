"""Compares a layer of ours with a layer of PyTorch that has the same weights."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import torch

import eqxlike as eqx

TOLERANCES = {"float64": 1e-10, "float32": 1e-5}


def call_plainly(layer: Any, *inputs: Any) -> Any:
    return layer(*inputs)


@dataclasses.dataclass(frozen=True)
class Counterpart:
    """A layer of ours and its counterpart in PyTorch.

    - `ours`: makes our layer, called as `ours(key=, dtype=)`.
    - `theirs`: makes PyTorch's layer, called without arguments. The layer is a `torch.nn.Module`,
        or any callable if `parameters` is empty.
    - `in_shapes`: the shape of each input.
    - `parameters`: maps the path of each of our parameters to the path of PyTorch's, as in
        `{"weight": "weight"}`. Paths contain dots and integers. In a pair `("weight", to_ours)`,
        `to_ours` converts PyTorch's array, and its gradient, to our layout.
    - `call_ours`, `call_theirs`: call a layer, by default as `layer(*inputs)`, and return an array.
    """

    ours: Callable[..., Any]
    theirs: Callable[[], Any]
    in_shapes: tuple[tuple[int, ...], ...]
    parameters: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    call_ours: Callable[..., Any] = call_plainly
    call_theirs: Callable[..., Any] = call_plainly


def assert_computes_the_same(counterpart: Counterpart, dtype: str) -> None:
    """Compares outputs, and gradients of their sines with respect to parameters and inputs."""
    with jax.enable_x64(dtype == "float64"):
        _assert_computes_the_same(counterpart, dtype)


def _assert_computes_the_same(counterpart: Counterpart, dtype: str) -> None:
    torch.manual_seed(0)
    theirs = counterpart.theirs()
    if isinstance(theirs, torch.nn.Module):
        theirs = theirs.to(getattr(torch, dtype))
    ours = counterpart.ours(key=jr.key(0), dtype=jnp.dtype(dtype))
    own_paths = list(counterpart.parameters)
    their_parameters = [_theirs(theirs, path) for path in counterpart.parameters.values()]
    layouts = [
        entry[1] if isinstance(entry, tuple) else _unchanged
        for entry in counterpart.parameters.values()
    ]
    if own_paths:
        copies = [
            jnp.asarray(layout(parameter.detach().numpy()))
            for layout, parameter in zip(layouts, their_parameters, strict=True)
        ]
        assert [c.shape for c in copies] == [_ours(ours, path).shape for path in own_paths]
        ours = eqx.tree_at(lambda layer: [_ours(layer, path) for path in own_paths], ours, copies)
    random = np.random.default_rng(0)
    inputs = [random.normal(size=shape).astype(dtype) for shape in counterpart.in_shapes]

    def loss(arguments: Any) -> Any:
        layer, inputs = arguments
        out = counterpart.call_ours(layer, *inputs)
        return jnp.sum(jnp.sin(out)), out

    arguments = (ours, [jnp.asarray(x) for x in inputs])
    (_, out), (gradient, in_gradients) = eqx.filter_value_and_grad(loss, has_aux=True)(arguments)

    their_inputs = [torch.tensor(x, requires_grad=True) for x in inputs]
    their_out = counterpart.call_theirs(theirs, *their_inputs)
    torch.sin(their_out).sum().backward()

    tolerance = {"rtol": TOLERANCES[dtype], "atol": TOLERANCES[dtype]}
    assert out.dtype == dtype
    np.testing.assert_allclose(out, their_out.detach().numpy(), **tolerance)
    for own_path, parameter, layout in zip(own_paths, their_parameters, layouts, strict=True):
        theirs_in_our_layout = layout(parameter.grad.numpy())
        own = _ours(gradient, own_path)
        np.testing.assert_allclose(own, theirs_in_our_layout, **tolerance, err_msg=own_path)
    for own, their in zip(in_gradients, their_inputs, strict=True):
        their_gradient = np.zeros(their.shape) if their.grad is None else their.grad.numpy()
        np.testing.assert_allclose(own, their_gradient, **tolerance)


def _unchanged(array: np.ndarray) -> np.ndarray:
    return array


def _ours(tree: Any, path: str) -> Any:
    for name in path.split("."):
        tree = tree[int(name)] if name.isdigit() else getattr(tree, name)
    return tree


def _theirs(module: torch.nn.Module, entry: Any) -> torch.Tensor:
    return dict(module.named_parameters())[entry[0] if isinstance(entry, tuple) else entry]
