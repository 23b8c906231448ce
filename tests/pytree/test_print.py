"""Where a test takes `eqx`, the same program holds on Equinox, whose behaviour is the measure."""

import dataclasses
import re
from typing import Any, NamedTuple

import equinox
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import pytest

import eqxlike
from eqxlike import tree_pformat
from tests.beside_equinox import both


class Point(NamedTuple):
    x: Any
    y: Any


@dataclasses.dataclass
class Plain:
    x: Any
    y: int = 3


def list_in_itself():
    node = [1]
    node.append(node)
    return node


SAMPLES = {
    "named tuple": Point(1, jnp.ones(2)),
    "dataclass": Plain(jnp.ones(2), 4),
    "list in itself": list_in_itself(),
    "float32": jnp.ones((2, 3)),
    "bfloat16": jnp.ones(2, jnp.bfloat16),
    "complex64": jnp.ones(2, jnp.complex64),
    "bool": jnp.ones(2, bool),
    "weak scalar": jnp.array(1.0),
    "key": jax.random.key(0),
    "numpy": np.ones(2),
    "struct": jax.ShapeDtypeStruct((2, 3), jnp.bfloat16),
    "weak struct": jax.eval_shape(lambda: 1.0),
    "key struct": jax.eval_shape(lambda: jax.random.key(0)),
    "function": np.sum,
    "custom jvp": jax.nn.relu,
    "jax partial": jtu.Partial(max, 1),
}


def without_addresses(text):
    return re.sub(r"0x[0-9a-f]+", "0x", text)


OPTIONS = [
    {},
    {"short_arrays": False},
    {"struct_as_array": True},
    {"short_arrays": False, "struct_as_array": True},
    {"width": 20, "indent": 4},
    {"truncate_leaf": lambda node: isinstance(node, list | jax.Array | Plain)},
]


@pytest.mark.parametrize("options", OPTIONS, ids="-".join)
def test_prints_as_equinox_does(options):
    # Where Equinox indents by two spaces, whatever `indent` says: see below.
    samples = {**SAMPLES, "jax partial": None} if "indent" in options else SAMPLES
    ours, theirs = (
        {
            name: without_addresses(eqx.tree_pformat(sample, **options))
            for name, sample in samples.items()
        }
        for eqx in (eqxlike, equinox)
    )
    assert ours == theirs


def make_tree_of_modules(eqx):
    class Inner(eqx.Module):
        x: Any
        hidden: Any = eqx.field(default=1, repr=False)
        name: str = eqx.field(static=True, default="inner")

        def method(self):
            return self.x

    class Own(eqx.Module):
        x: Any

        def __repr__(self):
            return "own"

    class Outer(Inner):
        others: Any = None

    inner = Inner(jnp.ones((2, 3)))
    return {
        "outer": Outer([inner, np.ones(2)], others=(Own(1), Point(inner, None))),
        "methods": [inner.method, Inner.method],
        "classes": [Inner],
    }


def test_prints_modules_as_equinox_does():
    def texts(eqx):
        tree = make_tree_of_modules(eqx)
        texts = [eqx.tree_pformat(part, **options) for part in tree.values() for options in OPTIONS]
        return [
            without_addresses(text)
            .replace(eqx.__name__, "library")
            .replace("_ModuleMeta", "ModuleMeta")
            for text in texts
        ]

    assert texts(eqxlike) == texts(equinox)
    outer = make_tree_of_modules(eqxlike)["outer"]
    assert tree_pformat(outer) == repr(outer)


def test_pprint_prints_what_pformat_says(capsys):
    for options in OPTIONS:
        assert eqxlike.tree_pprint(SAMPLES, **options) is None
        assert capsys.readouterr().out == tree_pformat(SAMPLES, **options) + "\n"


@both
def test_a_tracer_prints_as_its_array(eqx):
    texts = []

    def function(x):
        texts.append(eqx.tree_pformat([x]))
        return x

    jax.eval_shape(function, jnp.ones(3))
    jax.vmap(function)(jnp.ones((3, 2)))
    jax.linearize(function, jnp.ones(3, jnp.bfloat16))
    assert texts == ["[f32[3]]", "[f32[2]]", "[bf16[3]]"]


# In Equinox it is two spaces for these, whatever `indent` says.
def test_a_jax_partial_is_indented_like_all_else():
    text = tree_pformat(jtu.Partial(max, 1), width=1, indent=4)
    assert text.splitlines()[1:3] == ["    func=<built-in function max>,", "    args=("]
    assert "\n  func" in equinox.tree_pformat(jtu.Partial(max, 1), width=1, indent=4)
