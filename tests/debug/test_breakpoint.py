"""Where a test takes `eqx`, the same program holds on Equinox, whose behaviour is the measure."""

import io

import jax
import jax.numpy as jnp
import pytest

import eqxlike
from eqxlike.debug import breakpoint_if
from tests.beside_equinox import both

X = jnp.arange(4.0)


class Debugger:
    """JAX's debugger with a file for a terminal, in which somebody has typed `commands`."""

    def __init__(self, commands="c\n" * 10):
        self.output = io.StringIO()
        self.options = {
            "backend": "cli",
            "stdin": io.StringIO(commands),
            "stdout": self.output,
        }

    def text(self):
        jax.effects_barrier()
        return self.output.getvalue()

    def num_entered(self):
        return self.text().count("Entering jdb")


def above(eqx, debugger, limit, **options):
    """An identity with a breakpoint for numbers above `limit`."""

    def function(x):
        eqx.debug.breakpoint_if(x > limit, **debugger.options, **options)
        return x

    return function


PREDS = {
    "true": (True, 1),
    "false": (False, 0),
    "array": (jnp.array(True), 1),
    "one-of-several": (jnp.array([False, True]), 1),
    "none-of-several": (jnp.array([False, False]), 0),
    "empty": (jnp.zeros((0,), bool), 0),
    "number": (2, 1),
    "numbers": (jnp.array([0.0, 0.5]), 1),
}


@both
@pytest.mark.parametrize("pred", PREDS)
def test_is_entered_if_the_predicate_is_true_somewhere(eqx, pred):
    debugger = Debugger()
    assert eqx.debug.breakpoint_if(PREDS[pred][0], **debugger.options) is None
    assert debugger.num_entered() == PREDS[pred][1]


# From a function of a number to what calls it with the numbers 0 to 3.
CALLS = {
    "jit": lambda f: jax.jit(f)(X[3]),
    "filter_jit": lambda f: eqxlike.filter_jit(f)(X[3]),
    "vmap": lambda f: jax.vmap(f)(X),
    "jit-vmap": lambda f: jax.jit(jax.vmap(f))(X),
    "jit-grad": lambda f: jax.jit(jax.grad(f))(X[3]),
    "vmap-grad": lambda f: jax.vmap(jax.grad(f))(X),
    "scan": lambda f: jax.lax.scan(lambda carry, x: (carry, f(x)), 0, X),
}


NUM_ENTERED = {"vmap": 4, "jit-vmap": 4, "vmap-grad": 4, "scan": 2}


@both
@pytest.mark.parametrize("call", CALLS)
def test_is_entered_where_the_predicate_holds_and_for_a_whole_batch(eqx, call):
    debugger = Debugger()
    jax.block_until_ready(CALLS[call](above(eqx, debugger, 1)))
    assert debugger.num_entered() == NUM_ENTERED.get(call, 1)


@both
@pytest.mark.parametrize("call", ["jit", "jit-vmap"])
def test_is_not_entered_where_the_predicate_holds_nowhere(eqx, call):
    debugger = Debugger()
    jax.block_until_ready(CALLS[call](above(eqx, debugger, 5)))
    assert debugger.num_entered() == 0


@both
def test_opens_in_the_frame_of_the_caller(eqx):
    debugger = Debugger("p x\nbt\nc\n")
    jax.block_until_ready(jax.jit(above(eqx, debugger, 1))(X[3]))
    assert "(jdb) Array(3., dtype=float32)\n(jdb) Traceback:" in debugger.text()
    assert "breakpoint_if(x > limit" in debugger.text().splitlines()[-2]


@both
def test_options_go_to_the_breakpoint(eqx):
    debugger = Debugger("bt\nc\n")
    jax.block_until_ready(jax.jit(above(eqx, debugger, 1, num_frames=1, ordered=True))(X[3]))
    assert debugger.text().count('File "') == 1


@both
@pytest.mark.parametrize("pred", ["text", None], ids=repr)
def test_a_predicate_of_another_kind_is_an_error(eqx, pred):
    with pytest.raises(TypeError):
        eqx.debug.breakpoint_if(pred)


def test_the_error_of_a_wrong_predicate_says_what_came():
    with pytest.raises(TypeError, match="as `pred`; it was given an object of type str"):
        breakpoint_if("text")  # pyright: ignore[reportArgumentType]


def test_a_token_is_refused_since_nothing_could_depend_on_it():
    with pytest.raises(TypeError, match=r"no `token`.*Pass `ordered=True`"):
        breakpoint_if(jnp.array(True), token=X)


def test_leaks_no_tracers():
    debugger = Debugger()
    with jax.checking_leaks():
        jax.block_until_ready(jax.jit(jax.vmap(above(eqxlike, debugger, 5)))(X))
    assert debugger.num_entered() == 0
