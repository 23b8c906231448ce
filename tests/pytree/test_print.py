"""Printing. A test with the parameter `eqx` runs on Equinox and on eqxlike, which must agree."""

import dataclasses
import re
from typing import Any

import equinox
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import pytest

import eqxlike
from eqxlike import tree_pformat
from tests.beside_equinox import both
from tests.pytree.trees import Point


@dataclasses.dataclass
class Plain:
    x: Any
    y: int = 3


def list_in_itself():
    node = [1]
    node.append(node)
    return node


SAMPLES = [
    *(Point(1, jnp.ones(2)), Plain(jnp.ones(2), 4), list_in_itself(), np.sum, jax.nn.relu),
    *(jnp.ones((2, 3)), jnp.ones(2, jnp.bfloat16), jnp.ones(2, jnp.complex64), jnp.ones(2, bool)),
    *(jnp.array(1.0), jax.random.key(0), np.ones(2), jax.ShapeDtypeStruct((2, 3), jnp.bfloat16)),
    *(jax.eval_shape(lambda: 1.0), jax.eval_shape(lambda: jax.random.key(0))),
]
PARTIAL = jtu.Partial(max, 1)


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
def test_text_agrees_with_equinox(options):
    # `test_jax_partial_is_indented_like_other_nodes` tests partials.
    for sample in SAMPLES if "indent" in options else [*SAMPLES, PARTIAL]:
        texts = [eqx.tree_pformat(sample, **options) for eqx in (eqxlike, equinox)]
        assert without_addresses(texts[0]) == without_addresses(texts[1])


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


def test_text_of_modules_agrees_with_equinox():
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


def test_pprint_prints_the_text_of_pformat(capsys):
    for options in OPTIONS:
        assert eqxlike.tree_pprint(SAMPLES, **options) is None
        assert capsys.readouterr().out == tree_pformat(SAMPLES, **options) + "\n"


@both
def test_tracer_prints_like_its_array(eqx):
    texts = []

    def function(x):
        texts.append(eqx.tree_pformat([x]))
        return x

    jax.eval_shape(function, jnp.ones(3))
    jax.vmap(function)(jnp.ones((3, 2)))
    jax.linearize(function, jnp.ones(3, jnp.bfloat16))
    assert texts == ["[f32[3]]", "[f32[2]]", "[bf16[3]]"]


# Equinox ignores `indent` and indents a partial by two spaces.
def test_jax_partial_is_indented_like_other_nodes():
    text = tree_pformat(PARTIAL, width=1, indent=4)
    assert text.splitlines()[1:3] == ["    func=<built-in function max>,", "    args=("]
    assert "\n  func" in equinox.tree_pformat(PARTIAL, width=1, indent=4)
