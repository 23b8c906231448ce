"""What XLA leaves out of a program is shown, as by Equinox."""

import gc
import weakref

import equinox
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqxlike
from eqxlike.debug import inspect_dce, store_dce

X = jnp.arange(3.0)
N = jnp.arange(3)


def over(store, then):
    """A function that stores two arrays, of which `then` uses what it likes."""
    return lambda x: then(store((x, x + 1)))


def first(stored):
    return stored[0]


# From the storing identity to a function of one array, and the array.
PROGRAMS = {
    "one-used": (lambda store: over(store, first), X),
    "none-used": (lambda store: lambda x: (store((x, x + 1)), x)[1], X),
    "times-zero": (lambda store: over(store, lambda stored: 0 * stored[0] + stored[1]), N),
    "vmap": (lambda store: jax.vmap(over(store, first)), X),
    "scan": (
        lambda store: (
            lambda x: jax.lax.scan(lambda carry, y: (carry + store((y, y + 1))[0], None), 0.0, x)
        ),
        X,
    ),
    "tree": (
        lambda store: lambda x: store({"a": [x, None], "b": "text", "c": 3, "d": x - 1})["d"],
        X,
    ),
    "no-array": (lambda store: lambda x: (store("text"), x)[1], X),
}


def printed(capsys, library, name):
    library.debug.inspect_dce(name)
    return capsys.readouterr().out.replace("equinox.", "eqxlike.")


def test_prints_what_equinox_prints(capsys):
    texts, outputs = {}, {}
    for library in (eqxlike, equinox):
        functions = [
            make(lambda tree, name=name: library.debug.store_dce(tree, name))  # noqa: B023
            for name, (make, _) in PROGRAMS.items()
        ]
        run = jax.jit(lambda xs: [f(x) for f, x in zip(functions, xs, strict=True)])  # noqa: B023
        outputs[library] = jax.block_until_ready(run([x for _, x in PROGRAMS.values()]))
        texts[library] = [printed(capsys, library, name) for name in PROGRAMS]
    assert texts[eqxlike] == texts[equinox]
    assert eqxlike.tree_equal(outputs[eqxlike], outputs[equinox])


def test_prints_modules_and_any_name_or_none(capsys):
    eqx = eqxlike

    class Pair(eqx.Module):
        used: jax.Array
        unused: jax.Array
        name: str

    jax.block_until_ready(
        eqx.filter_jit(lambda pair: eqx.debug.store_dce(pair, "module").used)(Pair(X, X, "s"))
    )
    text = printed(capsys, eqx, "module")
    assert "used=f32[3], unused=<DCE'd>, name='s'" in text
    text = printed(capsys, eqx, "nobody")
    assert text == "Found 0 calls to `eqxlike.debug.store_dce`.\n"
    jax.block_until_ready(jax.jit(lambda x: eqx.debug.store_dce(x))(X))
    assert "f32[3]" in printed(capsys, eqx, None)


def test_what_cannot_be_stored_or_printed_is_an_error():
    for function in (store_dce, jax.vmap(store_dce)):
        with pytest.raises(RuntimeError, match="should be used inside of"):
            function(X)
    with pytest.raises(RuntimeError, match="should be used outside of"):
        jax.jit(lambda x: (inspect_dce(), x)[1])(X)
    with pytest.raises(TypeError, match="unhashable type: 'list'"):
        jax.jit(lambda x: store_dce(x, ["name"]))(X)
    with pytest.raises(TypeError, match="unhashable type: 'list'"):
        inspect_dce(["name"])


def entries_of(capsys, name):
    inspect_dce(name)
    return [each.split(":\n", 1)[1] for each in capsys.readouterr().out.split("Entry ")[1:]]


def test_each_trace_is_an_entry(capsys):
    function = jax.jit(over(lambda tree: store_dce(tree, "traces"), first))
    for size in (2, 2, 3):
        function(jnp.ones(size))
    assert entries_of(capsys, "traces") == ["(f32[2], <DCE'd>)\n", "(f32[3], <DCE'd>)\n"]


def test_two_calls_in_one_program_are_two_entries(capsys):
    def function(x):
        one = store_dce((x, x + 1), "twice")
        return store_dce((one[0], x + 2), "twice")[1]

    jax.jit(function)(X)
    assert entries_of(capsys, "twice") == ["(<DCE'd>, <DCE'd>)\n", "(<DCE'd>, f32[3])\n"]


def test_what_has_not_run_says_so(capsys):
    store = lambda tree: store_dce(tree, "not run")
    jax.jit(over(store, first)).lower(X)
    jax.jit(lambda x: jax.lax.cond(x[0] > 0, over(store, first), jnp.sin, x))(X)
    assert entries_of(capsys, "not run") == ["<not run>\n", "<not run>\n"]


def test_inspect_waits_for_a_program_that_is_still_running(capsys):
    @jax.jit
    def slow(x):
        # What has a product of matrices in it does not run on the thread that calls it.
        return jax.lax.fori_loop(0, 400, lambda _, y: y @ y, jnp.zeros((300, 300)))[0, :3] + x

    stored = jax.jit(over(lambda tree: store_dce(tree, "waits"), first)).lower(X).compile()
    stored(slow(X))
    assert entries_of(capsys, "waits") == ["(f32[3], <DCE'd>)\n"]


def test_gradients_pass(capsys):
    function = over(lambda tree: store_dce(tree, "gradient"), lambda stored: (stored[0] ** 2).sum())
    with jax.checking_leaks():
        gradient = jax.jit(jax.grad(function))(X)
    assert gradient.tolist() == [0, 2, 4]
    assert entries_of(capsys, "gradient") == ["(f32[3], <DCE'd>)\n"]
    jax.jit(jax.grad(lambda x: store_dce(3 * x, "linear")))(2.0)
    assert entries_of(capsys, "linear") == ["<DCE'd>\n"]


def test_keys_numpy_arrays_and_constants_are_arrays(capsys):
    tree = {"key": jax.random.key(0), "numpy": np.ones(2)}
    jax.jit(lambda x: store_dce(tree, "kinds")["key"])(X)
    assert entries_of(capsys, "kinds") == ["{'key': key<fry>[], 'numpy': <DCE'd>}\n"]
    for value in (0, 1):
        name = f"constant {value}"
        jax.jit(lambda x, value=value, name=name: store_dce((jnp.full(3, value), x), name)[0])(X)
        assert entries_of(capsys, name) == ["(i32[3], <DCE'd>)\n"]


def test_weak_types_and_shardings_stay():
    assert jax.jit(store_dce)(1.0).weak_type
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    x = jax.device_put(jnp.arange(4), jax.NamedSharding(mesh, jax.P("x")))
    stored = jax.jit(store_dce)(x)
    assert stored.tolist() == [0, 1, 2, 3]
    assert stored.sharding.is_equivalent_to(x.sharding, 1)


def test_leaves_are_not_kept_alive():
    class Leaf:
        pass

    leaf = Leaf()
    reference = weakref.ref(leaf)

    def run(leaf):
        jax.jit(lambda x: store_dce((x, leaf), "alive")[0])(X).block_until_ready()

    run(leaf)
    del leaf
    jax.effects_barrier()
    gc.collect()
    assert reference() is None
