"""What `help` shows of a function, a signature that one can read, and the options that it names."""

import inspect
import pydoc

import jax
import pytest

import eqxlike as eqx
from eqxlike._transforms._signatures import GradOptions, JitOptions, PmapOptions, VmapOptions

DECORATORS = [eqx.filter_jit, eqx.filter_vmap, eqx.filter_checkpoint, eqx.filter_grad]


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
def test_help_says_that_the_function_may_be_left_out_and_shows_its_signature(decorator):
    start = f"{decorator.__name__}(fun: collections.abc.Callable[..., typing.Any] = <missing>, *, "
    assert first_line(decorator).startswith(start)
    assert first_line(decorator(scale)) == "scale(x: float, times: int = 2) -> float"


@pytest.mark.parametrize("name", ["plain", "jitted"])
def test_help_shows_the_signature_of_a_method_bound_or_not_and_of_a_module(name):
    rest = "x: float, times: int = 2) -> float"
    assert first_line(getattr(Scale, name)) == f"{name}(self, {rest}"
    assert first_line(getattr(Scale(2.0), name)) == f"{name}({rest}"
    assert "Scale(factor: float) -> None" in pydoc.render_doc(Scale, renderer=pydoc.plaintext)


def test_help_says_that_the_replacement_may_be_left_out():
    line = first_line(eqx.tree_at)
    assert "replace: typing.Any | collections.abc.Sequence[typing.Any] = <missing>" in line


def test_options_of_which_type_checkers_are_told_are_those_that_jax_takes():
    for options, ours, theirs in (
        (JitOptions, eqx.filter_jit, jax.jit),
        (VmapOptions, eqx.filter_vmap, jax.vmap),
        (PmapOptions, eqx.filter_pmap, jax.pmap),
        (GradOptions, eqx.filter_grad, jax.value_and_grad),
    ):
        taken = {*inspect.signature(ours).parameters, *inspect.signature(theirs).parameters}
        assert set(options.__annotations__) <= taken
