"""Enumerations compared with Equinox, and differences from Equinox."""

import builtins
import re

import equinox
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import pytest

import eqxlike
from eqxlike import Enumeration, filter_jit
from tests.beside_equinox import LIBRARIES


class Enumerations:
    """Enumerations that are defined with one of the libraries."""

    def __init__(self, eqx):
        class Base(eqx.Enumeration):
            a = "first"
            b = "second"
            c = ""

        class Derived(Base):
            d = "third"

        class Last(Derived):
            e = "fourth"

        class Other(eqx.Enumeration):
            a = "first"
            z = "other"

        class Joined(Other, Last):
            pass

        class Documented(eqx.Enumeration):
            """Says so."""

            _private = "x"
            twice = "x"

        class Empty(eqx.Enumeration):
            pass

        self.eqx = eqx
        self.Base, self.Derived, self.Last, self.Other = Base, Derived, Last, Other
        self.Joined, self.Documented, self.Empty = Joined, Documented, Empty
        self.several = jtu.tree_map(lambda *values: jnp.stack(values), Base.a, Base.b)
        self.abstract = jax.eval_shape(lambda: Base.b)


ENUMERATIONS = {eqx: Enumerations(eqx) for eqx in LIBRARIES.values()}


def texts_while_traced(e):
    texts = []

    def run(item):
        texts.extend([repr(item), e.Base[item], item.is_traced()])
        return item

    return jax.jit(run)(e.Base.b), texts


def known_while_traced(e):
    """The texts of items, during a trace, that do not depend on a tracer."""
    texts = []

    def run(x):
        is_a = e.Base.a == e.Base.a
        chosen = [e.Base.where(is_a, e.Base.b, e.Base.c), e.Joined.promote(e.Last.d)]
        texts.extend([bool(is_a), bool(e.Base.a != e.Base.a), e.Base.where(x, *chosen[:1] * 2)])
        texts.extend([*chosen, e.Base.where(x, e.Base.b, e.Base.c)])
        return x

    jax.jit(run)(True)
    return texts


PROGRAMS = {
    "classes": {
        "len": lambda e: [len(each) for each in (e.Base, e.Derived, e.Last, e.Joined, e.Empty)],
        "repr of a class": lambda e: repr(e.Base),
        "instance of the base": lambda e: isinstance(e.Base.a, e.eqx.Enumeration),
        "instance of a superclass": lambda e: isinstance(e.Derived.a, e.Base),
        "instance of a subclass": lambda e: isinstance(e.Base.a, e.Derived),
        "docstring": lambda e: e.Documented.__doc__,
        "private item": lambda e: e.Documented._private,
        "items of joined": lambda e: [getattr(e.Joined, name) for name in "azbcde"],
        "messages that are equal": lambda e: e.Documented._private == e.Documented.twice,
    },
    "items": {
        "repr": lambda e: [repr(e.Base.b), str(e.Base.c), f"{e.Derived.a}"],
        "print": lambda e: e.eqx.tree_pformat({"x": [e.Base.b]}),
        "leaves": lambda e: jtu.tree_leaves_with_path(e.Derived.d),
        "dtype": lambda e: (e.Base.a._value.dtype, e.Base.a._value.shape),
        "one structure": lambda e: jtu.tree_structure(e.Base.a) == jtu.tree_structure(e.Base.b),
        "tree_equal": lambda e: [e.eqx.tree_equal(e.Base.a, each) for each in (e.Base.a, e.Base.b)],
        "hash": lambda e: hash(e.Base.a),
        "filter": lambda e: e.eqx.filter(e.Base.a, e.eqx.is_inexact_array),
        "abstract": lambda e: (e.abstract, e.abstract.is_traced(), e.Base[e.abstract]),
        "out of range": lambda e: jtu.tree_map(lambda value: value + 3, e.Base.a),
        "below range": lambda e: jtu.tree_map(lambda value: value - 1, e.Base.a),
        "no index": lambda e: jtu.tree_map(lambda value: True, e.Base.a),
    },
    "comparison": {
        "equal": lambda e: [e.Base.a == e.Base.a, e.Base.a == e.Base.b],
        "not equal": lambda e: [e.Base.a != e.Base.a, e.Base.a != e.Base.b],
        "equal to an int": lambda e: e.Base.a == 0,
        "equal to another": lambda e: e.Base.a == e.Other.a,
        "not equal to another": lambda e: e.Base.a != e.Other.a,
        "several": lambda e: [e.several, e.several == e.Base.b, e.several != e.several],
    },
    "messages": {
        "message": lambda e: [e.Base[e.Base.b], e.Base[e.Base.c], e.Derived[e.Derived.a]],
        "messages of several": lambda e: e.Base[e.several],
        "message of a superclass": lambda e: e.Derived[e.Base.a],
        "message of an index": lambda e: e.Base[0],
        "iteration": lambda e: list(e.Base),
    },
    "where": {
        "where": lambda e: [e.Base.where(pred, e.Base.a, e.Base.b) for pred in (True, False)],
        "where of NumPy": lambda e: e.Base.where(np.bool_(False), e.Base.a, e.Base.b),
        "where of an array": lambda e: e.Base.where(np.array(False), e.Base.a, e.Base.b),
        "where of one": lambda e: e.Base.where(jnp.array(True), e.Base.a, e.Base.a) is e.Base.a,
        "where of several": lambda e: e.Base.where(True, e.several, e.several),
        "where of a vector": lambda e: e.Base.where(jnp.array([True, False]), e.Base.a, e.Base.b),
        "where of an int": lambda e: e.Base.where(1, e.Base.a, e.Base.b),
        "where of another": lambda e: e.Base.where(True, e.Base.a, e.Other.a),
    },
    "promote": {
        "promoted equal": lambda e: e.Derived.promote(e.Base.b) == e.Derived.b,
        "promote from each of joined": lambda e: [
            e.Joined.promote(each) for each in (e.Other.z, e.Other.a, e.Last.c, e.Last.e, e.Base.a)
        ],
        "promote jitted": lambda e: jax.jit(e.Joined.promote)(e.Last.d),
        "promote from itself": lambda e: e.Base.promote(e.Base.a),
        "promote down": lambda e: e.Base.promote(e.Derived.a),
    },
    "transformations": {
        "traced": texts_while_traced,
        "known while traced": known_while_traced,
        "vmap where": lambda e: jax.vmap(lambda x: e.Base.where(x > 1, e.Base.a, e.Base.b))(
            jnp.arange(3)
        ),
    },
    "errors at runtime": {"error_if true": lambda e: e.Base.a.error_if(jnp.ones(2), True)},
}


def output(program, eqx):
    """The output of a program as text, or the builtin base class of its exception."""
    try:
        return repr(program(ENUMERATIONS[eqx]))
    except Exception as error:
        return next(each for each in type(error).__mro__ if each in vars(builtins).values())


@pytest.mark.parametrize("topic", PROGRAMS)
def test_program_gives_the_output_of_equinox(topic):
    ours, theirs = (
        {name: output(program, eqx) for name, program in PROGRAMS[topic].items()}
        for eqx in (eqxlike, equinox)
    )
    assert ours == theirs


# --- definitions --------------------------------------------------------------------------------


def test_docstring_lists_the_items_without_items_of_a_mixin():
    class Mixin:
        constant = "text"

    class Result(Mixin, Enumeration):
        silent = ""
        long = "two\nlines"

    assert Result.__doc__ == (
        "An enumeration with the items:\n\n- `silent`\n- `long`: two\n    lines"
    )
    assert (len(Result), Result.constant) == (2, "text")


def test_redefined_item_gets_the_new_message_and_a_warning():
    base = ENUMERATIONS[eqxlike].Base
    with pytest.warns(UserWarning, match="a has two different messages, 'first' and 'ag") as caught:

        class Again(base):
            a = "again"
            b = "second"

    assert ([each.filename for each in caught], len(Again)) == ([__file__], 3)
    assert Again[Again.a] == Again[Again.promote(base.a)] == "again"


def test_enumerations_with_a_common_base_are_joined_by_name():
    base, last = ENUMERATIONS[eqxlike].Base, ENUMERATIONS[eqxlike].Last

    class Left(base):
        left = "left"

    class Right(base):
        right = "right"

    class Both(Left, Right):
        own = "own"

    assert [*vars(Both)["_eqxlike_messages"]] == ["a", "b", "c", "left", "right", "own"]
    promoted = [Both[Both.promote(each)] for each in (Right.right, Right.b, Left.left, base.a)]
    assert promoted == ["right", "second", "left", "first"]
    # Promotion to a subclass with a single base computes nothing.
    assert jax.make_jaxpr(last.promote)(ENUMERATIONS[eqxlike].Derived.d).eqns == []


def define(**items):
    return type(Enumeration)("Result", (Enumeration,), items)


def test_invalid_definitions_raise_and_name_the_item():
    for name in ("where", "promote"):
        with pytest.raises(ValueError, match=f"cannot have an item named `{name}`"):
            define(**{name: "x"})
    for name in ("mro", "register", "is_traced", "error_if", "name", "value"):
        result = define(**{"first": "x", name: "y"})
        assert result[getattr(result, name)] == "y"
    for message in (1, None, b"x", ("x",), lambda self: "x", property(len)):
        expected = rf"Result\.wrong must be a str.* it is of type {type(message).__name__}"
        with pytest.raises(TypeError, match=expected):
            define(fine="x", wrong=message)
    with pytest.raises(TypeError, match=r"no instances but its items: write `Base\.<name of"):
        ENUMERATIONS[eqxlike].Base()


# --- messages -----------------------------------------------------------------------------------

MESSAGES = [
    (lambda e: e.Base.a == 0, "An item of {}Base can only be compared with an item of {}Base; it "),
    (lambda e: e.Base.a == 0, "it got 0 of"),
    (lambda e: e.Other.a == e.Base.a, "it got an item of {}Base."),
    (lambda e: e.Base.a != e.Derived.a, "`Derived.promote(...)` turns items of {}Base into items"),
    (lambda e: e.Derived.a != e.Base.a, "got an item of {}Base. `Derived.promote(...)`"),
    (lambda e: e.Base[jnp.array(0)], "message; it got an array of shape () and dtype int32."),
    (lambda e: e.Derived[e.Base.a], "got an item of {}Base. `Derived.promote(...)` turns"),
    (lambda e: e.Base.where(np.array([True]), 2, 3), "dtype bool. For a batch, use `jax.vmap`."),
    (lambda e: e.Base.where(True, e.Base.a, e.Other.a), "it got an item of {}Other."),
    (lambda e: e.Derived.promote("a"), "that {}Derived extends; it got 'a' of type str."),
    (lambda e: e.Base.promote(e.Derived.d), "{}Base extends; it got an item of {}Derived."),
]


def test_error_names_the_expected_and_the_given_value():
    prefix = f"{__name__}.Enumerations.__init__.<locals>."
    for program, message in MESSAGES:
        with pytest.raises(ValueError, match=re.escape(message.replace("{}", prefix))):
            program(ENUMERATIONS[eqxlike])


def test_error_if_raises_the_message_of_the_item():
    def run(x, item):
        return item.error_if(x, x > 0)

    item = ENUMERATIONS[eqxlike].Base.b
    for function in (run, filter_jit(run)):
        assert function(jnp.array(-1.0), item) == -1
        with pytest.raises(RuntimeError, match=r"^second"):
            function(jnp.array(1.0), item)
