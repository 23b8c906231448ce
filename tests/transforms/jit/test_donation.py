"""Donation by words, as in Equinox, and by the names of arguments."""

import warnings

import equinox
import jax
import jax.numpy as jnp
import pytest

from eqxlike import Module, filter_jit, filter_value_and_grad
from eqxlike._transforms._jit._fast_path import DonationWarnings
from tests.transforms.jit.models import Affine, scaled


def donated(jit, donate, call):
    """Whether each array of a call is deleted after the call."""
    model = Affine(jnp.ones(3), jnp.ones(3))
    x, y = jnp.ones(3), jnp.ones(3)

    def function(model, x, y):
        return model.scale + 1, model.shift + 1, x + 1, y + 1

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        call(jit(function, donate=donate), model, x, y)
    return [array.is_deleted() for array in (model.scale, model.shift, x, y)]


BY_PLACE = lambda f, model, x, y: f(model, x, y)
BY_NAME = lambda f, model, x, y: f(y=y, x=x, model=model)
MIXED = lambda f, model, x, y: f(model, y=y, x=x)


class AddsOne(Module):
    weight: object

    def __call__(self, x, y):
        return self.weight + 1, x + 1, y + 1


def test_donate_all_includes_the_arrays_of_a_wrapped_module():
    # The exception is the first argument of the call, not the module.
    for word, expected in {"all": [True] * 3, "all-except-first": [True, False, True]}.items():
        arrays = [jnp.ones(3) for _ in range(3)]
        filter_jit(AddsOne(arrays[0]), donate=word)(*arrays[1:])
        assert [array.is_deleted() for array in arrays] == expected


def test_names_donate_positional_and_keyword_arguments():
    for names, expected in (
        (("model",), [True, True, False, False]),
        ("x", [False, False, True, False]),
        (["y", "x"], [False, False, True, True]),
        ((), [False, False, False, False]),
    ):
        for call in (BY_PLACE, BY_NAME, MIXED):
            assert donated(filter_jit, names, call) == expected
    with pytest.raises(ValueError, match="donate"):
        donated(equinox.filter_jit, ("x",), BY_PLACE)


def test_name_of_an_argument_of_a_method_or_of_self_donates_it():
    class Trainer(Module):
        rate: object

        @filter_jit(donate="state")
        def step(self, state):
            return self.rate * state

        @filter_jit(donate="self")
        def next(self):
            return Trainer(self.rate + 1)

    trainer, state = Trainer(jnp.ones(3)), jnp.ones(3)
    trainer.step(state)
    assert [trainer.rate.is_deleted(), state.is_deleted()] == [False, True]
    trainer.next()
    assert trainer.rate.is_deleted()


DONATED = {
    "keyword only": lambda x, *, y: (x + 1, y + 1),
    "variadic": lambda y, **rest: (y + 1, rest),
    "gradient": filter_value_and_grad(lambda x, y: jnp.sum(x * y)),
    "compiled": filter_jit(lambda x, y: -x * y),
    "module": AddsOne(jnp.ones(3)),
}


def test_name_of_an_argument_of_any_callable_donates_it():
    for name, function in DONATED.items():
        x, y = jnp.ones(3), jnp.ones(3)
        filter_jit(function, donate="y")(x=x, y=y)
        assert [x.is_deleted(), y.is_deleted()] == [False, True], name


def test_unknown_name_or_word_raises_at_decoration_and_lists_the_names():
    for donate in (("x", "unknown"), "al", "ALL", ("all",), ("none",)):
        with pytest.raises(ValueError, match="donate"):
            filter_jit(scaled, donate=donate)
    with pytest.raises(ValueError, match=r"'unknown'.*'x', 'scale'"):
        filter_jit(scaled, donate="unknown")


def test_donate_warn_warns_of_an_unusable_buffer_and_donate_all_does_not():
    total = lambda x, y: y.sum()
    for word in ("warn", "warn-except-first"):
        with pytest.warns(UserWarning, match="donated buffers were not usable"):
            filter_jit(total, donate=word)(1, jnp.ones(3))
    for word in ("all", "all-except-first"):
        assert filter_jit(total, donate=word)(1, jnp.ones(3)) == 3


def test_simultaneous_calls_that_hide_warnings_share_one_filter():
    before = list(warnings.filters)
    first, second = DonationWarnings(), DonationWarnings()
    first.silence()
    second.silence()
    assert len(warnings.filters) == len(before) + 1
    first.restore()
    assert len(warnings.filters) == len(before) + 1
    second.restore()
    assert list(warnings.filters) == before


def test_warning_filters_are_restored():
    def function(x):
        if x.shape == (4,):
            raise ValueError("boom")
        return x.sum()

    with warnings.catch_warnings():
        # A user's filter for the same warning is kept.
        warnings.filterwarnings("ignore", message="Some donated buffers were not usable")
        before = list(warnings.filters)
        jitted = filter_jit(function, donate="all")
        jitted.lower(jnp.ones(2)).compile()
        assert list(warnings.filters) == before
        for size in (3, 5):
            jitted(jnp.ones(size))
            assert list(warnings.filters) == before
        with pytest.raises(ValueError, match="boom"):
            jitted(jnp.ones(4))
        assert list(warnings.filters) == before


def used_up():
    """A model that was donated to a call, and the function of the call."""
    model = Affine(jnp.ones(3), jnp.ones(3))
    jitted = filter_jit(lambda model: Affine(2 * model.scale, model.shift), donate="all")
    jitted(model)
    return model, jitted


def notes_of(call):
    # JAX raises another class of error if it finds the deleted array before the program runs.
    with pytest.raises((RuntimeError, ValueError), match="deleted") as caught:
        call()
    return "\n".join(getattr(caught.value, "__notes__", []))


def test_error_of_a_donated_model_used_again_names_argument_and_path():
    model, jitted = used_up()
    expected = "donated to a call: model.scale, model.shift. Use the output of that call"
    assert expected in notes_of(lambda: jitted(model))
    assert expected in notes_of(lambda: jitted(model=model))
    other = filter_jit(lambda x, *args, **kwargs: (args, kwargs))
    shown = notes_of(lambda: other(1, model, last=[model.scale]))
    assert "args[0].scale, args[0].shift, kwargs['last'][0]. Use the" in shown
    shown = notes_of(lambda: filter_jit(lambda tree: tree)([model.scale, [model.shift] * 19]))
    assert "tree[0], tree[1][0], tree[1][1]" in shown
    assert "and 12 more. Use the" in shown
    # A deleted array that is not an argument is not reported as an argument.
    assert "donated" not in notes_of(lambda: filter_jit(lambda x: x + model.scale)(jnp.ones(3)))


def test_error_of_a_buffer_that_is_donated_and_passed_again_names_both_paths():
    for tree in (jnp.ones(3), jax.random.key(0)):
        for donate in ("all", "x"):
            jitted = filter_jit(lambda x, other: (x, other), donate=donate)
            with pytest.raises(jax.errors.JaxRuntimeError, match="donate") as caught:
                jitted(tree, {"a": jnp.ones(3), "b": tree})
            shown = "\n".join(caught.value.__notes__)
            assert "share a buffer, and one is donated: x = other['b']. Pass a copy" in shown
