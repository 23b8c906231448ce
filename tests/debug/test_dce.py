"""`store_dce` and `inspect_dce` show the arrays that XLA removes from a program."""

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
    """A function that stores two arrays and applies `then` to them."""
    return lambda x: then(store((x, x + 1)))


def first(stored):
    return stored[0]


def added(store):
    return lambda carry, y: (carry + store((y, y + 1))[0], None)


# A function of one array that uses `store`, and the array.
PROGRAMS = {
    "one-used": (lambda store: over(store, first), X),
    "none-used": (lambda store: lambda x: (store((x, x + 1)), x)[1], X),
    "times-zero": (lambda store: over(store, lambda stored: 0 * stored[0] + stored[1]), N),
    "vmap": (lambda store: jax.vmap(over(store, first)), X),
    "scan": (lambda store: lambda xs: jax.lax.scan(added(store), 0.0, xs), X),
    "tree": (lambda store: lambda x: store({"a": [x, None], "b": "s", "c": 3, "d": x - 1})["d"], X),
    "no-array": (lambda store: lambda x: (store("text"), x)[1], X),
}


def printed(capsys, library, name):
    library.debug.inspect_dce(name)
    return capsys.readouterr().out.replace("equinox.", "eqxlike.")


def test_output_equals_the_output_of_equinox(capsys):
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


class Pair(eqxlike.Module):
    used: jax.Array
    unused: jax.Array
    name: str


def test_prints_modules_for_any_name(capsys):
    used = eqxlike.filter_jit(lambda pair: store_dce(pair, "module").used)
    jax.block_until_ready(used(Pair(X, X, "s")))
    assert "used=f32[3], unused=<DCE'd>, name='s'" in printed(capsys, eqxlike, "module")
    text = printed(capsys, eqxlike, "nobody")
    assert text == "Found 0 calls to `eqxlike.debug.store_dce`.\n"
    jax.block_until_ready(jax.jit(lambda x: store_dce(x))(X))
    assert "f32[3]" in printed(capsys, eqxlike, None)


@jax.tree_util.register_pytree_node_class
class Fresh:
    """A node whose metadata is never equal to itself."""

    def __init__(self, array):
        self.array = array

    def tree_flatten(self):
        return (self.array,), object()

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls(*children)


def test_metadata_of_nodes_need_not_be_equal():
    output = jax.jit(lambda x: store_dce(Fresh(x), "fresh").array)(X)
    np.testing.assert_array_equal(output, X)


def test_mismatched_calls_raise():
    for error, message, call in (
        (RuntimeError, "should be used inside of", lambda: store_dce(X)),
        (RuntimeError, "should be used inside of", lambda: jax.vmap(store_dce)(X)),
        (RuntimeError, "outside of", lambda: jax.jit(lambda x: (inspect_dce(), x)[1])(X)),
        (TypeError, "type: 'list'", lambda: jax.jit(lambda x: store_dce(x, ["name"]))(X)),
        (TypeError, "type: 'list'", lambda: inspect_dce(["name"])),
    ):
        with pytest.raises(error, match=message):
            call()


def entries_of(capsys, name):
    inspect_dce(name)
    return [each.split(":\n", 1)[1] for each in capsys.readouterr().out.split("Entry ")[1:]]


def test_each_trace_and_each_call_in_a_program_is_an_entry(capsys):
    function = jax.jit(over(lambda tree: store_dce(tree, "traces"), first))
    for size in (2, 2, 3):
        function(jnp.ones(size))
    assert entries_of(capsys, "traces") == ["(f32[2], <DCE'd>)\n", "(f32[3], <DCE'd>)\n"]

    def stored_twice(x):
        one = store_dce((x, x + 1), "twice")
        return store_dce((one[0], x + 2), "twice")[1]

    jax.jit(stored_twice)(X)
    assert entries_of(capsys, "twice") == ["(<DCE'd>, <DCE'd>)\n", "(<DCE'd>, f32[3])\n"]


def test_entry_of_a_program_that_has_not_run_says_so(capsys):
    store = lambda tree: store_dce(tree, "not run")
    jax.jit(over(store, first)).lower(X)
    jax.jit(lambda x: jax.lax.cond(x[0] > 0, over(store, first), jnp.sin, x))(X)
    assert entries_of(capsys, "not run") == ["<not run>\n", "<not run>\n"]


def test_inspect_waits_for_a_running_program(capsys):
    @jax.jit
    def slow(x):
        # A program with a product of matrices runs in another thread.
        return jax.lax.fori_loop(0, 400, lambda _, y: y @ y, jnp.zeros((300, 300)))[0, :3] + x

    stored = jax.jit(over(lambda tree: store_dce(tree, "waits"), first)).lower(X).compile()
    stored(slow(X))
    assert entries_of(capsys, "waits") == ["(f32[3], <DCE'd>)\n"]


def test_gradients_pass_through_store_dce(capsys):
    function = over(lambda tree: store_dce(tree, "gradient"), lambda stored: (stored[0] ** 2).sum())
    with jax.checking_leaks():
        gradient = jax.jit(jax.grad(function))(X)
    assert gradient.tolist() == [0, 2, 4]
    assert entries_of(capsys, "gradient") == ["(f32[3], <DCE'd>)\n"]
    jax.jit(jax.grad(lambda x: store_dce(3 * x, "linear")))(2.0)
    assert entries_of(capsys, "linear") == ["<DCE'd>\n"]


def test_keys_numpy_arrays_and_constants_count_as_arrays(capsys):
    tree = {"key": jax.random.key(0), "numpy": np.ones(2)}
    jax.jit(lambda x: store_dce(tree, "kinds")["key"])(X)
    assert entries_of(capsys, "kinds") == ["{'key': key<fry>[], 'numpy': <DCE'd>}\n"]
    for value in (0, 1):
        name = f"constant {value}"
        jax.jit(lambda x, value=value, name=name: store_dce((jnp.full(3, value), x), name)[0])(X)
        assert entries_of(capsys, name) == ["(i32[3], <DCE'd>)\n"]


def test_store_dce_keeps_weak_types_and_shardings():
    assert jax.jit(store_dce)(1.0).weak_type
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    x = jax.device_put(jnp.arange(4), jax.NamedSharding(mesh, jax.P("x")))
    stored = jax.jit(store_dce)(x)
    assert stored.tolist() == [0, 1, 2, 3]
    assert stored.sharding.is_equivalent_to(x.sharding, 1)


def test_leaves_are_not_kept_alive():
    leaf = type("Leaf", (), {})()
    reference = weakref.ref(leaf)
    stored = jax.jit(lambda x, leaf=leaf: store_dce((x, leaf), "alive")[0])
    stored(X).block_until_ready()
    del leaf, stored
    jax.effects_barrier()
    gc.collect()
    assert reference() is None
