"""`announce_transform` announces each transformation as Equinox does."""

import equinox
import jax
import jax.numpy as jnp

import eqxlike

X = jnp.arange(3.0)


def square(announce):
    return lambda x: (announce(x) ** 2).sum()


def scanned(announce):
    return lambda x: jax.lax.scan(lambda carry, _: (announce(x), None), 0.0, None, length=2)[0]


PROGRAMS = {
    "eager": lambda announce: announce(X),
    "jit-vmap-vmap": lambda announce: jax.jit(jax.vmap(jax.vmap(lambda x: announce(x))))(X[None]),
    "vmap-of-some": lambda announce: jax.vmap(lambda x: announce((x, X))[0])(X),
    "jvp": lambda announce: jax.jvp(lambda x: announce(x), (X,), (X,)),
    "jit-grad": lambda announce: jax.jit(jax.grad(square(announce)))(X),
    "grad-of-some": lambda announce: jax.jit(jax.grad(lambda x: announce((x, X, 3))[0].sum()))(X),
    "vmap-jit-grad": lambda announce: jax.vmap(jax.jit(jax.grad(square(announce))))(X),
    "jit-hessian": lambda announce: jax.jit(jax.hessian(square(announce)))(X),
    # The batch of a scan is traced twice.
    "vmap-scan": lambda announce: jax.vmap(scanned(announce))(X),
    "key": lambda announce: announce(jax.random.key(0)),
    "no-array": lambda announce: jax.jit(lambda x: (x, announce("text"))[0])(X),
}


def lines_of(library, program, name, intermediates):
    """The announcements and the output of a program."""
    lines = []

    def announce(x):
        return library.debug.announce_transform(x, name, intermediates, lines.append)

    output = program(announce)
    return lines, output


CASES = [*((program, True) for program in PROGRAMS), ("jit-vmap-vmap", False), ("jvp", False)]


def test_announcements_equal_those_of_equinox():
    for program, intermediates in CASES:
        # Each program has another name, because Equinox does not announce a cached program.
        name = f"{program}-{intermediates}"
        ours, theirs = (
            lines_of(library, PROGRAMS[program], name, intermediates)
            for library in (eqxlike, equinox)
        )
        assert ours[0] == theirs[0] != [], name
        assert eqxlike.tree_equal(ours[1], theirs[1]), name


def test_prints_by_default_and_returns_other_leaves(capsys):
    tree = {"array": X, "text": "s", "number": 2, "nothing": None}
    assert eqxlike.tree_equal(eqxlike.debug.announce_transform(tree), tree)
    for name in (3, "", ("a", 1)):
        eqxlike.debug.announce_transform(X, name)
    assert capsys.readouterr().out == "impl\n(3) impl\n() impl\n(('a', 1)) impl\n"


def test_two_calls_with_one_name_are_both_announced():
    lines, _ = lines_of(
        eqxlike, lambda announce: jax.jit(lambda x: announce(announce(x)))(X), "x", False
    )
    assert lines == ["(x) abstract", "(x) abstract", "(x) mlir", "(x) mlir"]


def test_announce_may_be_unhashable_and_is_not_called_for_a_compiled_program():
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
