"""Each transformation is announced, as by Equinox."""

import equinox
import jax
import jax.numpy as jnp

import eqxlike

X = jnp.arange(3.0)


def square(announce):
    return lambda x: (announce(x) ** 2).sum()


PROGRAMS = {
    "eager": lambda announce: announce(X),
    "jit-vmap-vmap": lambda announce: jax.jit(jax.vmap(jax.vmap(lambda x: announce(x))))(X[None]),
    "vmap-of-some": lambda announce: jax.vmap(lambda x: announce((x, X))[0])(X),
    "jvp": lambda announce: jax.jvp(lambda x: announce(x), (X,), (X,)),
    "jit-grad": lambda announce: jax.jit(jax.grad(square(announce)))(X),
    "grad-of-some": lambda announce: jax.jit(jax.grad(lambda x: announce((x, X, 3))[0].sum()))(X),
    "vmap-jit-grad": lambda announce: jax.vmap(jax.jit(jax.grad(square(announce))))(X),
    "jit-hessian": lambda announce: jax.jit(jax.hessian(square(announce)))(X),
    "key": lambda announce: announce(jax.random.key(0)),
    "no-array": lambda announce: jax.jit(lambda x: (x, announce("text"))[0])(X),
}


def lines_of(library, program, name, intermediates):
    """What a program announces, and what it returns."""
    lines = []

    def announce(x):
        return library.debug.announce_transform(x, name, intermediates, lines.append)

    output = program(announce)
    return lines, output


CASES = [*((program, True) for program in PROGRAMS), ("jit-vmap-vmap", False), ("jvp", False)]


def test_announces_what_equinox_announces():
    for program, intermediates in CASES:
        # A name of its own: Equinox says nothing of what JAX has remembered from another program.
        name = f"{program}-{intermediates}"
        ours, theirs = (
            lines_of(library, PROGRAMS[program], name, intermediates)
            for library in (eqxlike, equinox)
        )
        assert ours[0] == theirs[0] != [], name
        assert eqxlike.tree_equal(ours[1], theirs[1]), name


def test_the_name_stands_in_brackets_before_each_line():
    for name in (None, 3, "", ("a", 1)):
        lines, _ = lines_of(eqxlike, PROGRAMS["eager"], name, False)
        assert lines == ["impl" if name is None else f"({name}) impl"]


def test_prints_by_default_and_passes_other_leaves_through(capsys):
    tree = {"array": X, "text": "s", "number": 2, "nothing": None}
    assert eqxlike.tree_equal(eqxlike.debug.announce_transform(tree), tree)
    assert capsys.readouterr().out == "impl\n"


def test_two_calls_with_one_name_are_both_announced():
    lines, _ = lines_of(
        eqxlike, lambda announce: jax.jit(lambda x: announce(announce(x)))(X), "x", False
    )
    assert lines == ["(x) abstract", "(x) abstract", "(x) mlir", "(x) mlir"]


def test_announce_need_not_be_hashable_and_says_nothing_of_what_is_compiled_already():
    class Lines(list):
        def __call__(self, line):
            self.append(line)

    lines = Lines()
    function = jax.jit(lambda x: eqxlike.debug.announce_transform(x, announce=lines))
    with jax.checking_leaks():
        function(X)
    assert lines == ["abstract", "mlir"]
    function(X + 1)
    assert lines == ["abstract", "mlir"]
