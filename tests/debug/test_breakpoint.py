"""`breakpoint_if` opens the debugger of JAX if a predicate is true."""

import io

import jax
import jax.numpy as jnp
import pytest

import eqxlike
from eqxlike.debug import breakpoint_if

X = jnp.arange(4.0)


class Debugger:
    """Options with which JAX's debugger reads `commands` and writes to a string."""

    def __init__(self, commands="c\n" * 10):
        self.output = io.StringIO()
        stdin = io.StringIO(commands)
        self.options = {"backend": "cli", "stdin": stdin, "stdout": self.output}

    def text(self):
        jax.effects_barrier()
        return self.output.getvalue()

    def num_entered(self):
        return self.text().count("Entering jdb")


def above(debugger, limit, **options):
    """An identity with a breakpoint for numbers above `limit`."""

    def function(x):
        breakpoint_if(x > limit, **debugger.options, **options)
        return x

    return function


PREDS = {
    "true": (True, 1),
    "false": (False, 0),
    "array": (jnp.array(True), 1),
    "none-of-several": (jnp.array([False, False]), 0),
    "empty": (jnp.zeros((0,), bool), 0),
    "numbers": (jnp.array([0.0, 0.5]), 1),
}


def test_opens_if_any_element_of_the_predicate_is_true():
    debuggers = [Debugger() for _ in PREDS]

    def function():
        for (pred, _), debugger in zip(PREDS.values(), debuggers, strict=True):
            # Reading all frames would take most of the debugger's time.
            assert breakpoint_if(pred, num_frames=1, **debugger.options) is None

    jax.jit(function)()
    found = dict(zip(PREDS, (debugger.num_entered() for debugger in debuggers), strict=True))
    assert found == {name: number for name, (_, number) in PREDS.items()}


# Calls with the numbers 0 to 3, and how often the debugger opens for numbers above 1.
CALLS = {
    "once": (lambda f, x: f(x[3]), 1),
    "vmap": (lambda f, x: jax.vmap(f)(x), 4),
    "grad": (lambda f, x: jax.grad(f)(x[3]), 1),
    "scan": (lambda f, x: jax.lax.scan(lambda carry, x: (carry, f(x)), 0, x), 2),
}


def test_opens_for_each_member_of_a_batch_if_one_member_is_true():
    debuggers = {(name, 1): Debugger() for name in CALLS} | {("vmap", 5): Debugger()}

    @eqxlike.filter_jit
    def function(x):
        return [
            CALLS[name][0](above(debugger, limit, num_frames=1), x)
            for (name, limit), debugger in debuggers.items()
        ]

    with jax.checking_leaks():
        jax.block_until_ready(function(X))
    for (name, limit), debugger in debuggers.items():
        assert debugger.num_entered() == (CALLS[name][1] if limit == 1 else 0), (name, limit)


def test_opens_in_the_frame_of_the_caller_and_passes_options():
    debugger = Debugger("p x\nbt\nc\n")
    above(debugger, 1)(X[3])
    jax.effects_barrier()
    assert "(jdb) Array(3., dtype=float32)\n(jdb) Traceback:" in debugger.text()
    assert "breakpoint_if(x > limit" in debugger.text().splitlines()[-2]
    debugger = Debugger("bt\nc\n")
    options = {"num_frames": 1, "ordered": True}
    jax.block_until_ready(jax.jit(above(debugger, 1, **options))(X[3]))
    assert debugger.text().count('File "') == 1


def test_token_and_text_raise():
    with pytest.raises(TypeError, match="not a valid JAX array type"):
        breakpoint_if("text")  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match=r"no `token`.*Pass `ordered=True`"):
        breakpoint_if(jnp.array(True), token=X)
