"""`backward_nan` prints cotangents in the backward pass and raises if one is NaN."""

import equinox
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqxlike
from eqxlike.debug import backward_nan

X = jnp.array([1.0, 2.0])


def root(watch):
    """A function whose value at zero is finite, and whose derivative is NaN."""
    return lambda x: jnp.where(x > 0, jnp.sqrt(watch(x)), 0.0).sum()


def product_of_scan(watch):
    return lambda x: jax.lax.scan(lambda c, y: (watch(c * y), None), 1.0, x)[0]


def of_tree(watch):
    other = {"text": "s", "nothing": None, "constant": jnp.arange(2)}
    return lambda x: watch({**other, "x": x, "twice": 2 * x})["twice"].sum()


class Scale(eqxlike.Module):
    factor: jax.Array
    name: str = eqxlike.field(static=True)


# Functions of `X` that use `watch`.
GRADIENTS = {
    "grad": lambda watch: jax.grad(root(watch)),
    "jit-grad": lambda watch: jax.jit(jax.grad(root(watch))),
    "jit-vmap-grad": lambda watch: jax.jit(jax.vmap(jax.grad(root(watch)))),
    "jit-vmap-grad-scan": lambda watch: jax.jit(
        lambda x: jax.vmap(jax.grad(product_of_scan(watch)))(x[None])[0]
    ),
    "grad-tree": lambda watch: jax.jit(jax.grad(of_tree(watch))),
    "grad-of-grad": lambda watch: jax.jit(jax.grad(lambda x: jax.grad(root(watch))(x)[0] ** 2)),
    "grad-without-use": lambda watch: jax.grad(lambda x: (0 * watch(x) + x).sum()),
    "complex": lambda watch: jax.grad(lambda x: jnp.abs(watch(jax.lax.complex(x, x))).sum()),
}


def output_of(capsys, library, gradient, *options, x=X):
    """The sorted output of the backward pass, and the gradient."""
    output = GRADIENTS[gradient](lambda y: library.debug.backward_nan(y, *options))(x)
    jax.block_until_ready(output)
    jax.effects_barrier()
    return sorted(capsys.readouterr().out.split("   primals=")), output


def test_output_equals_the_output_of_equinox(capsys):
    for gradient in GRADIENTS:
        terminate = gradient != "jit-vmap-grad-scan"
        ours, theirs = (
            output_of(capsys, library, gradient, None, terminate) for library in (eqxlike, equinox)
        )
        assert ours[0] == theirs[0] != [""], gradient
        assert eqxlike.tree_equal(ours[1], theirs[1]), gradient


ZERO = jnp.array([0.0, 1.0])
TREE = {"array": X, "text": "s", "number": 2, "float": 2.0, "nothing": None}


def test_only_the_backward_pass_prints_and_begins_with_the_name(capsys):
    assert eqxlike.tree_equal(backward_nan(TREE), TREE)
    assert capsys.readouterr().out == ""
    for name in (3, ""):
        assert f"{name}:\n" in output_of(capsys, eqxlike, "grad", name)[0]


def test_nan_is_printed_before_the_error(capsys):
    for gradient in ("grad", "jit-grad", "jit-vmap-grad"):
        with pytest.raises(RuntimeError, match="NaN"):
            output_of(capsys, eqxlike, gradient, x=ZERO)
        assert "nan" in capsys.readouterr().out


def test_nan_in_primals_infinity_and_terminate_false_do_not_raise(capsys):
    lines, gradient = output_of(capsys, eqxlike, "jit-grad", None, False, x=ZERO)
    assert "cotangents=Array([nan, 0.5], dtype=float32)" in lines[1]
    np.testing.assert_array_equal(gradient, [np.nan, 0.5])
    gradient = jax.grad(lambda x: jnp.sqrt(backward_nan(x)).sum())(ZERO)
    assert gradient.tolist() == [np.inf, 0.5]
    gradient = jax.grad(lambda x: (2 * backward_nan(x)).sum())(jnp.array([np.nan]))
    assert gradient.tolist() == [2]


def test_error_names_the_leaf_and_the_place_of_the_call():
    def of_tree(x):
        watched = backward_nan({"a": jnp.sum(x), "b": [x]}, name="parts")
        return watched["a"] + root(lambda _: watched["b"][0])(x)

    def of_list(x):
        return sum((leaf * jnp.nan).sum() for leaf in backward_nan([3 * x, x, 2 * x])[1:])

    for gradient, message in (
        (jax.grad(of_tree), r"(?s)cotangent of parts\['b'\]\[0\].*test_nan.py:\d+ in .*of_tree"),
        (eqxlike.filter_jit(jax.grad(root(backward_nan))), "NaN in the cotangent of x, which"),
        (jax.grad(of_list), r"cotangent of x\[1\]"),
    ):
        with pytest.raises(eqxlike.EqxlikeRuntimeError, match=message):
            gradient(ZERO)


def test_output_names_the_place_of_the_nan(capsys):
    watch = lambda x: backward_nan(x, None, False)
    for function, line in [
        (root(watch), ": 1 of 2 elements, the first"),
        (lambda x: watch({"a": x})["a"].sum() * jnp.nan, "['a']: 2 of 2"),
        (lambda x: watch(x.sum()) * jnp.nan, "\n"),
    ]:
        jax.grad(function)(ZERO)
        jax.effects_barrier()
        assert f"       NaN in cotangents{line}" in capsys.readouterr().out


def test_static_leaves_fields_and_key_data_are_printed(capsys):
    def function(x):
        return backward_nan((Scale(x, "s"), 3, "text"))[0].factor.sum()

    jax.grad(function)(X)
    out = capsys.readouterr().out
    assert "   primals=(Scale(factor=Array([1., 2.], dtype=float32), name='s'), 3, 'text')" in out
    assert "cotangents=(Scale(factor=Array([1., 1.], dtype=float32), name='s'), None, None)" in out
    jax.jit(jax.vmap(jax.grad(lambda x: backward_nan((x, jax.random.key(3)))[0])))(X)
    jax.effects_barrier()
    assert capsys.readouterr().out.count("Array([0, 3], dtype=uint32)") == 2


def test_forward_mode_prints_nothing(capsys):
    def derivative(x):
        return jax.jvp(lambda y: backward_nan((y, jnp.arange(2)))[0] ** 2, (x,), (x,))

    for transform in (lambda f: f, jax.jit, jax.vmap):
        value, tangent = transform(derivative)(X)
        assert (value.tolist(), tangent.tolist()) == ([1, 4], [2, 8])
    assert jax.jvp(backward_nan, (2.0,), (1.0,)) == (2, 1)
    assert jax.jacfwd(jax.jacfwd(lambda x: backward_nan(x) ** 3))(2.0) == 12
    assert capsys.readouterr().out == ""
    with jax.checking_leaks():
        hessian = jax.jit(jax.hessian(lambda x: (backward_nan(x) ** 3).sum()))(X)
    assert hessian.tolist() == [[6, 0], [0, 12]]
    assert capsys.readouterr().out.count("cotangents=") == 1
    assert jax.grad(lambda x: 3 * backward_nan(x))(2.0) == 3


def test_each_member_of_a_batch_prints_the_shared_primals(capsys):
    product = lambda x, y: backward_nan(x) * y
    jax.vmap(jax.grad(product), in_axes=(None, 0))(jnp.array(3.0), X)
    text = "   primals=Array(3., dtype=float32)\ncotangents=Array({}., dtype=float32)\n"
    assert capsys.readouterr().out == text.format(1) + text.format(2)
