"""Donation: by a word as in Equinox, and by the names of arguments."""

import warnings

import jax
import jax.numpy as jnp
import pytest

from eqxlike import Module, filter_jit, filter_value_and_grad
from eqxlike._transforms._jit._donation_warnings import DonationWarnings
from tests.transforms.jit.models import Affine, scaled


def donated(jit, donate, call):
    """Which of the arrays in a call are gone afterwards."""
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


def test_word_donates_the_arrays_of_a_wrapped_module():
    # The first that is passed is excepted, and not the module.
    for word, expected in {"all": [True] * 3, "all-except-first": [True, False, True]}.items():
        arrays = [jnp.ones(3) for _ in range(3)]
        filter_jit(AddsOne(arrays[0]), donate=word)(*arrays[1:])
        assert [array.is_deleted() for array in arrays] == expected


def test_names_donate_their_arguments_however_the_call_is_spelled():
    for names, expected in (
        (("model",), [True, True, False, False]),
        ("x", [False, False, True, False]),
        (["y", "x"], [False, False, True, True]),
        ((), [False, False, False, False]),
    ):
        for call in (BY_PLACE, BY_NAME, MIXED):
            assert donated(filter_jit, names, call) == expected


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
    "keyword only": ("y", lambda x, *, y: (x + 1, y + 1)),
    "variadic": ("y", lambda y, **rest: (y + 1, rest)),
    "gradient": ("y", filter_value_and_grad(lambda x, y: jnp.sum(x * y))),
    "compiled": ("y", filter_jit(lambda x, y: -x * y)),
    "module": ("y", AddsOne(jnp.ones(3))),
}


@pytest.mark.parametrize("name", DONATED)
def test_name_of_an_argument_of_any_callable_donates_it(name):
    donate, function = DONATED[name]
    x, y = jnp.ones(3), jnp.ones(3)
    filter_jit(function, donate=donate)(x=x, y=y)
    assert [x.is_deleted(), y.is_deleted()] == [False, True]


def test_unknown_name_or_word_is_an_error_at_decoration_that_lists_the_names():
    for donate in (("x", "unknown"), "al", "ALL", ("all",), ("none",)):
        with pytest.raises(ValueError, match="donate"):
            filter_jit(scaled, donate=donate)
    with pytest.raises(ValueError, match=r"'unknown'.*'x', 'scale'"):
        filter_jit(scaled, donate="unknown")


def test_buffer_that_was_not_usable_is_warned_of_or_passed_over_in_silence():
    total = lambda x, y: y.sum()
    for word in ("warn", "warn-except-first"):
        with pytest.warns(UserWarning, match="donated buffers were not usable"):
            filter_jit(total, donate=word)(1, jnp.ones(3))
    for word in ("all", "all-except-first"):
        assert filter_jit(total, donate=word)(1, jnp.ones(3)) == 3


def test_calls_that_hide_warnings_at_once_share_one_filter():
    before = list(warnings.filters)
    first, second = DonationWarnings(), DonationWarnings()
    first.silence()
    second.silence()
    assert len(warnings.filters) == len(before) + 1
    first.restore()
    assert len(warnings.filters) == len(before) + 1
    second.restore()
    assert list(warnings.filters) == before


def test_filters_of_warnings_are_as_before():
    def function(x):
        if x.shape == (4,):
            raise ValueError("boom")
        return x.sum()

    jitted = filter_jit(function, donate="all")
    before = list(warnings.filters)
    jitted.lower(jnp.ones(2)).compile()
    assert list(warnings.filters) == before
    for size in (3, 5):
        jitted(jnp.ones(size))
        assert list(warnings.filters) == before
    with pytest.raises(ValueError, match="boom"):
        jitted(jnp.ones(4))
    assert list(warnings.filters) == before


def used_up():
    """A model that a call has used up, and that call's function."""
    model = Affine(jnp.ones(3), jnp.ones(3))
    jitted = filter_jit(lambda model: Affine(2 * model.scale, model.shift), donate="all")
    jitted(model)
    return model, jitted


def notes_of(call):
    # The class is that of JAX, which is another one where it finds the array before it runs.
    with pytest.raises((RuntimeError, ValueError), match="deleted") as caught:
        call()
    return "\n".join(caught.value.__notes__)


def test_error_of_a_donated_model_used_again_names_argument_and_path():
    model, jitted = used_up()
    expected = "donated to a call: model.scale, model.shift. Use the output of that call"
    assert expected in notes_of(lambda: jitted(model))
    assert expected in notes_of(lambda: jitted(model=model))

    def other(x, *args, **kwargs):
        return args, kwargs

    shown = notes_of(lambda: filter_jit(other)(1, model, last=[model.scale]))
    assert "args[0].scale, args[0].shift, kwargs['last'][0]. Use the" in shown


def test_of_many_arrays_that_are_gone_the_first_are_named():
    arrays = [jnp.ones(2) + number for number in range(20)]
    filter_jit(lambda arrays: [2 * array for array in arrays], donate="all")(arrays)
    shown = notes_of(lambda: filter_jit(lambda tree: tree[0] + 1)([arrays[0], arrays]))
    assert "tree[0], tree[1][0], tree[1][1]" in shown
    assert "and 13 more. Use the" in shown


def test_deleted_array_that_is_no_argument_is_not_blamed_on_one():
    model, _ = used_up()
    with pytest.raises((RuntimeError, ValueError), match="deleted") as caught:
        filter_jit(lambda x: x + model.scale)(jnp.ones(3))
    assert "donated to a call" not in "".join(getattr(caught.value, "__notes__", []))


def test_error_of_a_buffer_that_is_donated_and_passed_again_names_both_paths():
    for tree in (jnp.ones(3), jax.random.key(0)):
        for donate in ("all", "x"):
            jitted = filter_jit(lambda x, other: (x, other), donate=donate)
            with pytest.raises(jax.errors.JaxRuntimeError, match="donate") as caught:
                jitted(tree, {"a": jnp.ones(3), "b": tree})
            shown = "\n".join(caught.value.__notes__)
            assert "share a buffer, and one is donated: x = other['b']. Pass a copy" in shown


def test_filter_of_the_user_for_the_same_warning_stays():
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Some donated buffers were not usable")
        before = list(warnings.filters)
        filter_jit(lambda x: x.sum(), donate="all")(jnp.ones(7))
        assert list(warnings.filters) == before
