"""A program for type checkers. It is also checked with Equinox instead of eqxlike.

A line has an error if and only if it ends in `# mistake`. The comment after each `reveal_type` is
the type that pyright reports.
"""

# ruff: noqa: B018

import abc
import functools
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, PRNGKeyArray

import eqxlike as eqx
from eqxlike import nn

Value = TypeVar("Value")


def wants_function(function: Callable[[Array], Array]) -> None: ...


# Modules with generated and custom `__init__`s.


class Affine(eqx.Module):
    scale: Array
    shift: float = 0.0
    name: str = eqx.field(static=True, default="affine")

    def __call__(self, x: Array) -> Array:
        return self.scale * x + self.shift

    def repeated(self, x: Array, count: int) -> list[Array]:
        return [self(x)] * count

    @classmethod
    def ones(cls, size: int) -> "Affine":
        return cls(jnp.ones(size))

    @property
    def size(self) -> int:
        return self.scale.size


class Model(eqx.Module):
    layer: nn.Linear
    count: int

    def __init__(self, size: int, *, key: PRNGKeyArray):
        self.layer = nn.Linear(size, size, key=key)
        self.count = "one"  # mistake

    @eqx.filter_jit
    def __call__(self, x: Array) -> Array:
        return self.layer(x)


class Inherited(Affine):
    extra: int = 3


class Converted(eqx.Module):
    numbers: Array = eqx.field(converter=jnp.asarray)
    axis: int = eqx.field(static=True)
    labels: list[str] = eqx.field(default_factory=list)


class Box(eqx.Module, Generic[Value]):
    content: Value

    def open(self) -> Value:
        return self.content


key = jax.random.key(0)
x = jnp.ones(3)
affine = Affine(x)
model = Model(3, key=key)

reveal_type(affine)  # Affine
reveal_type(affine.size)  # int
reveal_type(affine.repeated)  # (x: Array, count: int) -> list[Array]
reveal_type(Affine.ones(3))  # Affine
reveal_type(model.layer)  # Linear
reveal_type(model(x))  # Array
reveal_type(Converted(x, 0).numbers)  # Array
reveal_type(Box(affine).open())  # Affine

Affine()  # mistake
Affine(x, "no number")  # mistake
Converted([1.0])  # mistake
Model("3", key=key)  # mistake
affine.scail  # mistake
affine("text")  # mistake
affine.added = 1  # mistake
model.layer.wieght  # mistake


# Abstract classes.


class Abstract(eqx.Module):
    size: eqx.AbstractVar[int]

    @abc.abstractmethod
    def loss(self, x: Array) -> Array: ...


class Concrete(Abstract):
    size: int

    @eqx.filter_jit
    def loss(self, x: Array) -> Array:
        return x


class Wrong(Abstract):
    size: int

    @eqx.filter_jit
    def loss(self, x: str) -> Array:  # mistake
        return x  # mistake


Abstract()  # mistake
Concrete()  # mistake


# Transformed functions.


def predict(model: Affine, x: Array, steps: int = 2) -> tuple[Array, int]:
    return model(x), steps


def loss(model: Affine, x: Array, steps: int = 2) -> Array:
    return model(x).sum()


def same(value: Value, count: int) -> Value:
    return value


reveal_type(eqx.filter_jit(predict)(affine, x))  # tuple[Array, int]
reveal_type(eqx.filter_jit(donate="all")(predict)(affine, x, steps=3))  # tuple[Array, int]
reveal_type(eqx.filter_jit(same)(affine, 1))  # Affine
reveal_type(eqx.filter_jit(affine)(x))  # Array
reveal_type(eqx.filter_jit(nn.Linear)(3, 3, key=key))  # Linear
reveal_type(eqx.filter_jit(functools.partial(predict, affine))(x))  # tuple[Array, int]
reveal_type(eqx.filter_jit(nn.LayerNorm(3))(x, None)[0])  # Array
wants_function(eqx.filter_jit(affine))
eqx.filter_jit(predict)(affine, x, "two")  # mistake
eqx.filter_jit(predict, donate="everything")  # mistake
eqx.filter_jit(3)  # mistake

reveal_type(eqx.filter_vmap(loss))  # (model: Affine, x: Array, steps: int = 2) -> Array
reveal_type(eqx.filter_vmap(in_axes=(None, 0))(loss)(affine, x))  # Array
reveal_type(eqx.filter_vmap(same)(affine, 1))  # Affine
eqx.filter_vmap(predict)(affine, x, "two")  # mistake
eqx.filter_vmap(predict, in_axis=0)  # mistake

reveal_type(eqx.filter_pmap(predict)(affine, x))  # tuple[Array, int]
reveal_type(eqx.filter_pmap(axis_name="devices")(loss)(affine, x))  # Array
eqx.filter_pmap(predict, donate="some")  # mistake

reveal_type(eqx.filter_checkpoint(loss))  # (model: Affine, x: Array, steps: int = 2) -> Array
reveal_type(eqx.filter_checkpoint(same)(affine, 1))  # Affine
eqx.filter_checkpoint(loss)(affine)  # mistake

reveal_type(eqx.filter_grad(loss))  # (model: Affine, x: Array, steps: int = 2) -> Unknown
reveal_type(eqx.filter_grad(predict, has_aux=True)(affine, x))  # tuple[Unknown, int]
eqx.filter_grad(loss)(affine, "text")  # mistake
eqx.filter_grad(loss, has_au=True)  # mistake

reveal_type(eqx.filter_value_and_grad()(loss)(affine, x))  # tuple[Array, Unknown]
reveal_type(eqx.filter_value_and_grad(predict, has_aux=True)(affine, x)[0])  # tuple[Array, int]
eqx.filter_value_and_grad(loss)(affine, "text")  # mistake

reveal_type(eqx.filter_jvp(predict, (affine, x), (affine, x)))  # tuple[tuple[Array, int], Unknown]
eqx.filter_jvp(loss, affine, x)  # mistake

reveal_type(eqx.filter_vjp(loss, affine, x)[0])  # Array
reveal_type(eqx.filter_vjp(loss, affine, x)[1](x))  # tuple[Unknown, ...]
reveal_type(eqx.filter_vjp(predict, affine, x, has_aux=True)[2])  # int
eqx.filter_vjp(loss, affine, "text")  # mistake
eqx.filter_vjp(loss, affine, x, has_aux=True)  # mistake

reveal_type(eqx.filter_closure_convert(loss, affine, x)(affine, x))  # Array
reveal_type(eqx.Partial(predict, affine)(x))  # tuple[Array, int]
reveal_type(eqx.module_update_wrapper(affine, loss)(affine, x))  # Array
reveal_type(eqx.debug.assert_max_traces(max_traces=1)(loss)(affine, x))  # Array
eqx.filter_make_jaxpr(loss)(affine)  # mistake


# Functions with unknown types.


def transform(known: Callable[..., Array], unknown, x: Array) -> None:
    eqx.filter_jit(known)(x)
    eqx.filter_jit(unknown)(x)
    eqx.filter_jit(eqx.filter_vmap(unknown))(x)
    eqx.filter_vmap(eqx.filter_jit(eqx.filter_value_and_grad(unknown)))(x)
    eqx.filter_vmap(in_axes=0)(eqx.filter_checkpoint(unknown))(x)
    eqx.filter_jit(eqx.filter_vmap(lambda x: x.sum()))(x)
    eqx.filter_vjp(known, *[x, x])
    reveal_type(eqx.filter_jit(eqx.filter_vmap(known))(x))  # Array


# Methods, decorated in the body of their class.


class Methods(eqx.Module):
    scale: Array

    @eqx.filter_jit
    def jitted(self, x: Array, steps: int = 1) -> Array:
        return x

    @eqx.filter_jit(donate="all")
    def donating(self, x: Array) -> Array:
        return x

    @eqx.filter_vmap
    def mapped(self, x: Array) -> Array:
        return x

    @eqx.filter_value_and_grad(has_aux=True)
    def value_and_gradient(self, x: Array) -> tuple[Array, int]:
        return x, 1

    @eqx.filter_checkpoint
    def checkpointed(self, x: Array) -> Array:
        return x

    @classmethod
    @eqx.filter_jit
    def of_class(cls, x: Array) -> Array:
        return x

    @staticmethod
    @eqx.filter_jit
    def static(x: Array) -> Array:
        return x

    @property
    @eqx.filter_jit
    def computed(self) -> Array:
        return self.scale

    @eqx.filter_jit
    @eqx.filter_vmap
    @eqx.filter_value_and_grad
    def nested(self, x: Array) -> Array:
        return x

    @eqx.filter_jit
    def untyped(self, *args, **kwargs):
        return 3


class Overriding(Methods):
    def jitted(self, x: Array, steps: int = 1) -> Array:
        return super().jitted(x, steps)

    @eqx.filter_jit
    def checkpointed(self, x: str) -> Array:  # mistake
        return self.scale


methods = Methods(x)
reveal_type(methods.jitted)  # (x: Array, steps: int = 1) -> Array
reveal_type(Methods.jitted)  # (self: Methods, x: Array, steps: int = 1) -> Array
reveal_type(methods.donating)  # (x: Array) -> Array
reveal_type(methods.mapped)  # (x: Array) -> Array
reveal_type(methods.value_and_gradient)  # (x: Array) -> tuple[tuple[Array, int], Unknown]
reveal_type(methods.checkpointed)  # (x: Array) -> Array
reveal_type(methods.of_class)  # (x: Array) -> Array
reveal_type(methods.static(x))  # Array
reveal_type(methods.computed)  # Array
reveal_type(methods.nested(x))  # tuple[Array, Unknown]
methods.untyped(1, times=2)
wants_function(methods.jitted)
methods.jitted(x, "one")  # mistake
methods.checkpointed("text")  # mistake


# Trees.

reveal_type(eqx.combine(affine, affine))  # Affine
reveal_type(eqx.tree_at(lambda affine: affine.shift, affine, replace_fn=abs))  # Affine
reveal_type(eqx.apply_updates(affine, affine))  # Affine
reveal_type(nn.inference_mode(affine))  # Affine
reveal_type(eqx.error_if(x, True, "Wrong."))  # Array
reveal_type(eqx.filter_shard(affine, None))  # Affine
reveal_type(eqx.tree_deserialise_leaves("model.eqx", affine))  # Affine
reveal_type(eqx.tree_equal(affine, affine))  # bool | Array
reveal_type(eqx.if_array(0))  # if_array
eqx.tree_at(lambda affine: affine.scail, affine, x)  # mistake
eqx.partition(affine)  # mistake
eqx.if_array("0")  # mistake
eqx.tree_serialise_leaves(1, affine)  # mistake


# Layers, and their state.

reveal_type(nn.Linear(3, 3, key=key)(x))  # Array
reveal_type(nn.MLP(3, 3, 8, 1, key=key)(x))  # Array
reveal_type(nn.Conv2d(1, 1, 3, key=key)(x))  # Array
reveal_type(nn.LSTMCell(3, 3, key=key)(x, (x, x))[0])  # Array
reveal_type(nn.Dropout()(x, key=key))  # Array
reveal_type(nn.LayerNorm(3)(x))  # Array
reveal_type(nn.Embedding(3, 3, key=key)(x))  # Array
reveal_type(nn.RotaryPositionalEmbedding(4)(x))  # Array
reveal_type(nn.MultiheadAttention(1, 3, key=key)(x, x, x))  # Array
reveal_type(nn.MaxPool2d(2)(x))  # Array
reveal_type(nn.PReLU(0.1)(x))  # Array
reveal_type(nn.Lambda(jnp.tanh)(x))  # Array
reveal_type(nn.Sequential([nn.Lambda(jnp.tanh)])(x))  # Array
reveal_type(nn.WeightNorm(nn.Linear(3, 3, key=key)).layer)  # Linear
reveal_type(nn.Shared(model, lambda model: model.layer, lambda model: model.layer))  # Shared
nn.Linear(3, 3)  # mistake
nn.Linear(3, 3, key=key)("text")  # mistake
nn.BatchNorm(3, "batch", mode="bach")  # mistake

reveal_type(nn.make_with_state(Model)(3, key=key)[0])  # Model
reveal_type(nn.make_with_state(Model)(3, key=key)[1])  # State
norm, state = nn.make_with_state(nn.BatchNorm)(3, "batch", mode="batch")
index = nn.StateIndex(x)
reveal_type(norm(x, state))  # tuple[Array, State]
reveal_type(state.get(index))  # Array
reveal_type(state.set(index, x))  # State
reveal_type(nn.SpectralNorm(nn.Linear(3, 3, key=key), "weight", key=key).layer)  # Linear
nn.make_with_state(Model)("3", key=key)  # mistake
state.get(1)  # mistake


# Enumerations.


class Result(eqx.Enumeration):
    successful = "All went well."
    diverged = "It diverged."


reveal_type(Result.successful == Result.diverged)  # Array
reveal_type(Result.where(x, Result.successful, Result.diverged))  # Result
Result.nothing  # mistake


# A training loop without mistakes.


@eqx.filter_jit
def train(model: Model, optimiser_state: Any, x: Array) -> tuple[Model, Any, Array]:
    @eqx.filter_value_and_grad
    def loss(model: Model) -> Array:
        return jnp.mean(jax.vmap(model)(x))

    value, gradient = loss(model)
    parameters = eqx.filter(model, eqx.is_inexact_array)
    updates, optimiser_state = optimiser.update(gradient, optimiser_state, parameters)
    return eqx.apply_updates(model, updates), optimiser_state, value


optimiser = optax.adam(1e-3)
optimiser_state = optimiser.init(eqx.filter(model, eqx.is_inexact_array))
for _ in range(10):
    model, optimiser_state, value = train(model, optimiser_state, x)
    print(value.item())
parameters, static = eqx.partition(model, eqx.is_array)
model = eqx.combine(parameters, static)
print(model.layer.weight)
