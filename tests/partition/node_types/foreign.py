"""Nodes that others registered with JAX: Flax, Equinox, JAX itself and users."""

import dataclasses
import functools
from typing import Any

import equinox
import flax.core
import flax.struct
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from flax import nnx

from tests.partition.node_types.kind import Kind, array, read, read_fields, text, twice
from tests.partition.node_types.modules import Box


@flax.struct.dataclass
class Struct:
    content: Any
    mode: Any = flax.struct.field(pytree_node=False, default="a")


@functools.partial(jtu.register_dataclass, data_fields=["content"], meta_fields=["mode"])
@dataclasses.dataclass
class Dataclass:
    content: Any
    mode: Any = "a"


class Foreign:
    """A node whose aux data may change."""

    def __init__(self, content, mode="a"):
        self.content = content
        self.mode = mode


jtu.register_pytree_node(
    Foreign,
    lambda value: ((value.content,), value.mode),
    lambda mode, children: Foreign(*children, mode),
)


class ForeignWithList:
    """A node that makes its aux data of what may change."""

    def __init__(self, content, modes):
        self.content = content
        self.modes = modes


jtu.register_pytree_node(
    ForeignWithList,
    lambda value: ((value.content,), tuple(value.modes)),
    lambda modes, children: ForeignWithList(children[0], list(modes)),
)


class EquinoxBox(equinox.Module):
    content: Any
    mode: Any = equinox.field(static=True, default="a")


read_content = read_fields("content", "mode")


def read_boxes(value):
    """What stands in the innermost box, and the modes on the way."""
    modes = []
    while hasattr(value, "content"):
        modes.append(text(value.mode))
        value = value.content
    return read(value), modes


def set_mode(value):
    value.mode = f"{value.mode} changed"


def set_inner_mode(value):
    value.content.content.content.mode = "changed"


def nested(number):
    """Nodes of others and Modules of ours in turn."""
    inner = Foreign(Box([array(number), number]), f"mode{number}")
    return Foreign(Box(Dataclass(inner, mode=("b", number))))


def nnx_model(number):
    return nnx.split(nnx.Dropout(number / 4, rngs=nnx.Rngs(0)))


FOREIGN = {
    "flax-struct": Kind(twice(lambda n: Struct(array(n), f"mode{n}")), read_content),
    "flax-struct-equal-modes": Kind(
        lambda: [Struct(array(1), mode) for mode in (1, 1.0, True)], read_content
    ),
    "flax-struct-of-statics": Kind(lambda: [Struct(n) for n in (1, 1.0, True)], read_content),
    "flax-frozen-dict": Kind(twice(lambda n: flax.core.FrozenDict(a=array(n), b={"c": n}))),
    "registered-dataclass": Kind(
        twice(lambda n: Dataclass(array(n), f"mode{n}")), read_content, set_mode
    ),
    "foreign": Kind(twice(lambda n: Foreign(array(n), f"mode{n}")), read_content, set_mode),
    "foreign-equal-modes": Kind(
        lambda: [Foreign(array(1), mode) for mode in (1, 1.0, True)], read_content
    ),
    "foreign-with-list": Kind(
        twice(lambda n: ForeignWithList(array(n), [n])),
        read_fields("content", "modes"),
        lambda value: value.modes.append("more"),
    ),
    "foreign-of-modules": Kind(twice(nested), read_boxes, set_inner_mode),
    "struct-of-structs": Kind(
        twice(lambda n: Struct([Struct(array(n), n), Struct(array(n), "b")])), read
    ),
    "jax-partial": Kind(
        lambda: [jtu.Partial(jnp.add, array(1)), jtu.Partial(jnp.subtract, array(1))],
        lambda partial: partial(1.0),
    ),
    "equinox-module": Kind(twice(lambda n: EquinoxBox((array(n), n), n)), read_boxes),
    "equinox-of-ours": Kind(twice(lambda n: EquinoxBox(Box([array(n), n], n))), read_boxes),
    "ours-of-equinox": Kind(twice(lambda n: Box(EquinoxBox([array(n), n], n))), read_boxes),
    "equinox-mlp": Kind(
        twice(lambda n: equinox.nn.MLP(1, 1, 2, 1, key=jax.random.key(n))),
        lambda model: model(jnp.ones(1)),
    ),
    "nnx-state": Kind(
        twice(lambda n: nnx.state(nnx.Linear(1, 2, rngs=nnx.Rngs(n)))), jtu.tree_leaves
    ),
    "treedef": Kind(lambda: [jtu.tree_structure([1]), jtu.tree_structure((1,))], text),
}
