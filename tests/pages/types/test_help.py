"""`help` shows readable signatures, and the typed options are options of JAX."""

import inspect
import pydoc

import jax
import pytest

import eqxlike as eqx
from eqxlike._transforms._signatures import GradOptions, JitOptions, PmapOptions, VmapOptions

DECORATORS = [eqx.filter_jit, eqx.filter_vmap, eqx.filter_checkpoint, eqx.filter_grad]


def first_line(thing) -> str:
    """The first line of `help` after the title."""
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
def test_help_shows_that_the_function_is_optional_and_its_signature(decorator):
    start = f"{decorator.__name__}(fun: collections.abc.Callable[..., typing.Any] = <missing>, *, "
    assert first_line(decorator).startswith(start)
    assert first_line(decorator(scale)) == "scale(x: float, times: int = 2) -> float"


@pytest.mark.parametrize("name", ["plain", "jitted"])
def test_help_shows_the_signatures_of_methods_and_modules(name):
    rest = "x: float, times: int = 2) -> float"
    assert first_line(getattr(Scale, name)) == f"{name}(self, {rest}"
    assert first_line(getattr(Scale(2.0), name)) == f"{name}({rest}"
    assert "Scale(factor: float) -> None" in pydoc.render_doc(Scale, renderer=pydoc.plaintext)


def test_help_shows_that_the_replacement_is_optional():
    line = first_line(eqx.tree_at)
    assert "replace: typing.Any | collections.abc.Sequence[typing.Any] = <missing>" in line


def test_typed_options_are_options_of_jax():
    for options, ours, theirs in (
        (JitOptions, eqx.filter_jit, jax.jit),
        (VmapOptions, eqx.filter_vmap, jax.vmap),
        (PmapOptions, eqx.filter_pmap, jax.pmap),
        (GradOptions, eqx.filter_grad, jax.value_and_grad),
    ):
        taken = {*inspect.signature(ours).parameters, *inspect.signature(theirs).parameters}
        assert set(options.__annotations__) <= taken
