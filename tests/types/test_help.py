"""What `help` shows of a function: a signature that one can read."""

import pydoc

import pytest

import eqxlike as eqx

DECORATORS = [
    eqx.filter_jit,
    eqx.filter_vmap,
    eqx.filter_pmap,
    eqx.filter_checkpoint,
    eqx.filter_grad,
    eqx.filter_value_and_grad,
]


def first_line(thing) -> str:
    """What `help` says after its title, which is empty but for the kind of thing."""
    return pydoc.render_doc(thing, renderer=pydoc.plaintext).splitlines()[2]


def scale(x: float, times: int = 2) -> float:
    return times * x


class Scale(eqx.Module):
    factor: float

    def plain(self, x: float, times: int = 2) -> float:
        return times * self.factor * x

    @eqx.filter_jit
    def jitted(self, x: float, times: int = 2) -> float:
        return times * self.factor * x


@pytest.mark.parametrize("decorator", DECORATORS)
def test_help_says_that_the_function_may_be_left_out(decorator):
    start = f"{decorator.__name__}(fun: collections.abc.Callable[..., typing.Any] = <missing>, *, "
    assert first_line(decorator).startswith(start)


def test_help_says_that_the_replacement_may_be_left_out():
    line = first_line(eqx.tree_at)
    assert "replace: typing.Any | collections.abc.Sequence[typing.Any] = <missing>" in line
    assert " at 0x" not in line


@pytest.mark.parametrize("decorator", DECORATORS)
def test_help_shows_the_signature_of_a_decorated_function(decorator):
    assert first_line(decorator(scale)) == "scale(x: float, times: int = 2) -> float"


@pytest.mark.parametrize("name", ["plain", "jitted"])
def test_help_shows_the_signature_of_a_method(name):
    signature = f"{name}(self, x: float, times: int = 2) -> float"
    assert first_line(getattr(Scale, name)) == signature


@pytest.mark.parametrize("name", ["plain", "jitted"])
def test_help_shows_the_signature_of_a_bound_method(name):
    assert first_line(getattr(Scale(2.0), name)) == f"{name}(x: float, times: int = 2) -> float"


def test_help_shows_the_parameters_of_a_module():
    assert "Scale(factor: float) -> None" in pydoc.render_doc(Scale, renderer=pydoc.plaintext)
