"""Progress that is shown from inside compiled programs."""

import importlib.util
import io
import re
import sys
import types
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import pytest

import eqxlike as eqx
from eqxlike import loops
from eqxlike.loops._progress._board import Board, Level, Shown


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def stream():
    return io.StringIO()


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch):
    monkeypatch.delenv("EQXLIKE_PROGRESS", raising=False)
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("TERM", "xterm")


def all_lines(total, stream, description="", **options):
    """A bar each of whose calls is a line."""
    return loops.progress(total, description, kind="lines", interval_s=0, stream=stream, **options)


def steps_in(stream):
    """The numbers of steps that were shown."""
    jax.effects_barrier()
    return [int(number) for number in re.findall(r"step (\d+)", stream.getvalue())]


def in_lax_scan(bar, x, count, num_steps):
    def body(carry, step):
        bar.update(step, carry)
        return jnp.where(step < count, jnp.sin(carry), carry), None

    return jax.lax.scan(body, x, jnp.arange(num_steps))[0]


def in_scan(kind):
    def run(bar, x, count, num_steps):
        def body(carry, step):
            bar.update(step, carry)
            return jnp.where(step < count, jnp.sin(carry), carry), None

        return loops.scan(body, x, jnp.arange(num_steps), kind=kind)[0]

    return run


def in_while_loop(kind, checkpoints=None):
    def run(bar, x, count, num_steps):
        def body(carry):
            bar.update(*carry)
            return carry[0] + 1, jnp.sin(carry[1])

        return loops.while_loop(
            lambda carry: carry[0] < count,
            body,
            (jnp.array(0), x),
            max_steps=num_steps,
            kind=kind,
            checkpoints=checkpoints,
        )[1]

    return run


def in_fori_loop(bar, x, count, num_steps):
    def body(step, x):
        bar.update(step, x)
        return jnp.sin(x)

    return loops.fori_loop(0, count, body, x, max_steps=num_steps, kind="checkpointed")


LOOPS = {
    "jax.lax.scan": in_lax_scan,
    "scan, checkpointed": in_scan("checkpointed"),
    "while_loop, lax": in_while_loop("lax"),
    "while_loop, checkpointed": in_while_loop("checkpointed"),
    "while_loop, few carries": in_while_loop("checkpointed", 2),
    "while_loop, bounded": in_while_loop("bounded"),
    "fori_loop": in_fori_loop,
}
NUM_STEPS = 5
COUNTS = jnp.array([2, NUM_STEPS, 3])
WAYS = {
    "jit": lambda f: jax.jit(f)(1.0, jnp.array(NUM_STEPS)),
    "vmap": lambda f: jax.jit(jax.vmap(f))(jnp.arange(3.0), COUNTS),
    "grad": lambda f: jax.jit(jax.grad(f))(1.0, jnp.array(NUM_STEPS)),
    "hessian": lambda f: jax.jit(jax.hessian(f))(1.0, jnp.array(NUM_STEPS)),
    "grad of vmap": lambda f: jax.jit(
        jax.grad(lambda x: jnp.sum(jax.vmap(f, (None, 0))(x, COUNTS)))
    )(1.0),
}
IS_REVERSE = {"grad", "hessian", "grad of vmap"}


@pytest.mark.parametrize(
    ("loop", "way"),
    [
        (loop, way)
        for loop in LOOPS
        for way in WAYS
        # That one has no reverse mode.
        if loop != "while_loop, lax" or way not in IS_REVERSE
    ],
)
def test_each_step_counts_once_in_every_loop_and_mode(stream, loop, way):
    def run(x, count):
        return LOOPS[loop](all_lines(NUM_STEPS, stream), x, count, NUM_STEPS)

    WAYS[way](run)
    assert steps_in(stream) == [1, 2, 3, 4, 5]


def test_a_run_has_a_bar_of_its_own(stream):
    run = jax.jit(lambda x: in_lax_scan(all_lines(2, stream), x, 2, 2))
    run(1.0)
    run(1.0)
    assert steps_in(stream) == [1, 2, 1, 2]


def test_a_bar_made_outside_goes_on_from_call_to_call(stream):
    bar = all_lines(4, stream)

    @eqx.filter_jit
    def run(bar, start):
        def body(carry, step):
            bar.update(start + step)
            return carry, None

        jax.lax.scan(body, None, jnp.arange(2))

    run(bar, jnp.array(0))
    run(bar, jnp.array(2))
    assert steps_in(stream) == [1, 2, 3, 4]


def test_function_run_again_by_checkpoint_counts_once(stream):
    bar = all_lines(3, stream)
    run = jax.checkpoint(lambda x: in_lax_scan(bar, x, 3, 3))
    jax.jit(jax.grad(run))(1.0)
    assert steps_in(stream) == [1, 2, 3]


@pytest.mark.parametrize("way", ["jit", "vmap", "grad"])
def test_nothing_is_compiled_when_it_is_off(way):
    def run(is_shown):
        def of_x(x, count):
            bar = loops.progress(NUM_STEPS, kind="off")

            def body(carry, step):
                inner = bar.inner(step, 3)
                if is_shown:
                    inner.update(step)
                    bar.update(0, carry)
                    bar.update(step, carry)
                return jnp.sin(carry), None

            x = jax.lax.scan(body, x, jnp.arange(NUM_STEPS))[0]
            if is_shown:
                bar.close(x)
            return x

        return of_x

    def jaxpr(is_shown):
        return str(jax.make_jaxpr(lambda: WAYS[way](run(is_shown)))())

    assert jaxpr(is_shown=True) == jaxpr(is_shown=False)


def test_environment_turns_it_off(monkeypatch, stream):
    monkeypatch.setenv("EQXLIKE_PROGRESS", "off")

    def run(x):
        all_lines(3, stream).update(0)
        return x

    assert str(jax.make_jaxpr(run)(1.0)) == str(jax.make_jaxpr(lambda x: x)(1.0))


CALLS = [
    # A known length: at most 1000, evenly, and the last.
    (5, 5, {}, [1, 2, 3, 4, 5]),
    (2500, 2500, {}, [*range(3, 2500, 3), 2500]),
    (10, 10, {"every": 4}, [4, 8, 10]),
    # An unknown one: 128 in each doubling.
    (None, 300, {}, [*range(1, 257), *range(258, 301, 2)]),
    (None, 10, {"every": 4}, [4, 8]),
    (0, 0, {}, []),
]


@pytest.mark.parametrize(("total", "num_steps", "options", "shown"), CALLS)
def test_python_is_called_rarely(stream, total, num_steps, options, shown):
    @jax.jit
    def run():
        bar = all_lines(total, stream, **options)
        return in_lax_scan(bar, 1.0, num_steps, num_steps)

    run()
    assert steps_in(stream) == shown


def test_number_of_a_step_may_have_a_small_dtype(stream):
    def body(carry, step):
        all_lines(1000, stream, every=100).update(step)
        return carry, None

    jax.lax.scan(body, None, jnp.arange(127, dtype=jnp.int8))
    assert steps_in(stream) == [100]


def epochs_of(stream, num_epochs, num_batches):
    def run(x):
        epochs = all_lines(num_epochs, stream, "epochs")

        def epoch(x, number):
            batches = epochs.inner(number, num_batches, "batches")

            def batch(index, x):
                batches.update(index)
                return jnp.sin(x)

            x = loops.fori_loop(0, num_batches, batch, x, kind="checkpointed")
            epochs.update(number, x)
            return x, None

        return loops.scan(epoch, x, jnp.arange(num_epochs), kind="checkpointed")[0]

    return run


@pytest.mark.parametrize("mode", [lambda f: f, jax.grad], ids=["value", "grad"])
def test_loop_inside_has_a_bar_inside(stream, mode):
    jax.jit(mode(epochs_of(stream, 2, 2)))(1.0)
    jax.effects_barrier()
    assert stream.getvalue().splitlines() == [
        "epochs: step 1/2, batches: step 1/2",
        "epochs: step 1/2, batches: step 2/2",
        "epochs: step 1/2",
        "epochs: step 2/2, batches: step 1/2",
        "epochs: step 2/2, batches: step 2/2",
        "epochs: step 2/2",
    ]


def test_loops_inside_share_the_calls_of_the_one_outside(stream):
    jax.jit(epochs_of(stream, 300, 30))(1.0)
    jax.effects_barrier()
    assert stream.getvalue().count("batches") == 300 * 3


def test_bar_is_closed_when_the_loop_has_ended_early(stream):
    board = Board()
    (number,) = [int(board.new_number())]
    shown = Shown((Level(100, "solve", 1),), "lines", 1e9, stream)
    board.show(shown, number, 40)
    assert stream.getvalue() == ""
    board.close(number)
    board.show(shown, number, 41)
    assert stream.getvalue() == "solve: step 41/100\n"


@pytest.mark.parametrize("way", ["jit", "vmap", "grad"])
def test_close_comes_after_what_the_loop_returns(stream, way):
    def run(x, count):
        bar = loops.progress(None, "solve", kind="lines", interval_s=1e9, stream=stream)
        x = in_while_loop("checkpointed")(bar, x, count, 9)
        bar.close({"x": x, "static": "a"})
        return x

    WAYS[way](run)
    jax.effects_barrier()
    assert stream.getvalue() == "solve: step 5\n"


def test_lines_are_at_least_so_far_apart(stream):
    times = iter([0.0, 0.0, 0.4, 1.0, 1.9, 2.0, 2.1])
    board = Board(clock=lambda: next(times))
    shown = Shown((Level(6, "", 1),), "lines", 1.0, stream)
    number = board.new_number()
    for step in range(6):
        board.show(shown, number, step)
    # At 0.0, 0.4, 1.0, 1.9, 2.0 and 2.1 s.
    assert stream.getvalue().splitlines() == ["step 3/6", "step 5/6", "step 6/6"]


def test_steps_that_come_late_or_after_the_end_are_not_shown(stream):
    board = Board()
    shown = Shown((Level(3, "", 1),), "lines", 0.0, stream)
    number = board.new_number()
    for step in (1, 0, 2, 0, 1):
        board.show(shown, number, step)
    assert stream.getvalue().splitlines() == ["step 2/3", "step 3/3"]


def test_runs_that_never_end_are_closed_for_new_ones(stream):
    board = Board()
    shown = Shown((Level(3, "", 1),), "lines", 1e9, stream)
    board.show(shown, board.new_number(), 0)
    for _ in range(1000):
        board.new_number()
    assert stream.getvalue() == "step 1/3\n"


class FakeBar:
    """What is asked of a bar of tqdm."""

    made: ClassVar[list[Any]] = []

    def __init__(self, *, total, desc, **options):
        self.total, self.desc, self.n = total, desc, 0
        self.shown = []
        FakeBar.made.append(self)

    def reset(self):
        self.shown.append("reset")

    def refresh(self):
        self.shown.append(self.n)

    def close(self):
        self.shown.append("closed")


@pytest.fixture
def fake_tqdm(monkeypatch):
    FakeBar.made.clear()
    module = types.ModuleType("tqdm")
    module.__spec__ = importlib.util.spec_from_loader("tqdm", loader=None)
    vars(module)["tqdm"] = FakeBar
    monkeypatch.setitem(sys.modules, "tqdm", module)


def test_tqdm_is_told_what_is_done(fake_tqdm):
    run = jax.jit(
        lambda x: in_lax_scan(loops.progress(3, "training", kind="tqdm", interval_s=0), x, 3, 3)
    )
    run(1.0)
    jax.effects_barrier()
    (bar,) = FakeBar.made
    assert (bar.total, bar.desc, bar.shown) == (3, "training", [1, 2, 3, "closed"])


def test_bar_of_a_loop_inside_begins_anew(fake_tqdm, stream):
    board = Board()
    levels = (Level(2, "outer", 1), Level(2, "inner", 1))
    number = board.new_number()
    for steps in [(0, 0), (0, 1), (1, 0), (1, 1)]:
        board.show(Shown(levels, "tqdm", 0.0, stream), number, *steps)
    (bar,) = FakeBar.made
    assert bar.shown == [1, 2, "reset", 1, 2, "closed"]


@pytest.mark.parametrize("kind", ["rich", "tqdm", "auto"])
def test_terminal_gets_a_bar(kind):
    terminal = Terminal()

    @jax.jit
    def run():
        bar = loops.progress(7, "training", kind=kind, stream=terminal, interval_s=0)
        return in_lax_scan(bar, 1.0, 7, 7)

    run()
    jax.effects_barrier()
    assert re.search(r"training.*7/7", terminal.getvalue().replace("\n", " "))
    assert "step" not in terminal.getvalue()


def test_bars_of_rich_stand_below_each_other():
    terminal, board = Terminal(), Board()
    bars = [
        (Shown((Level(2, name, 1),), "rich", 0.0, terminal), board.new_number())
        for name in ("first", "second")
    ]
    for step in range(2):
        for shown, number in bars:
            board.show(shown, number, step)
    first, second = terminal.getvalue().splitlines()[-3:-1]
    assert [re.findall(r"first|second", line)[-1] for line in (first, second)] == [
        "first",
        "second",
    ]


def test_auto_is_lines_where_there_is_no_terminal(stream):
    loops.progress(1, kind="auto", stream=stream).update(0)
    assert steps_in(stream) == [1]


def test_auto_is_lines_where_no_bar_is_installed(monkeypatch):
    for name in ("rich", "tqdm"):
        monkeypatch.setitem(sys.modules, name, None)
    terminal = Terminal()
    loops.progress(1, kind="auto", stream=terminal).update(0)
    jax.effects_barrier()
    assert terminal.getvalue() == "step 1/1\n"


MISSING = [
    ("rich", "pip install 'eqxlike[train]'"),
    ("tqdm", "pip install tqdm"),
]


@pytest.mark.parametrize(("name", "command"), MISSING)
def test_what_is_not_installed_is_an_error_with_the_command(monkeypatch, name, command):
    monkeypatch.setitem(sys.modules, name, None)
    message = f"loops.progress(kind={name!r}) needs {name}: `{command}`, or use kind='lines'."
    with pytest.raises(ImportError, match=re.escape(message)):
        loops.progress(3, kind=name)


def test_unknown_kind_is_an_error(monkeypatch):
    kinds = "'auto', 'rich', 'tqdm', 'lines', 'off'"
    with pytest.raises(ValueError, match=f"^kind must be one of {kinds}; got 'text'"):
        loops.progress(3, kind="text")  # pyright: ignore[reportArgumentType]
    monkeypatch.setenv("EQXLIKE_PROGRESS", "none")
    with pytest.raises(ValueError, match=f"^EQXLIKE_PROGRESS must be one of {kinds}; got 'none'"):
        loops.progress(3)


@pytest.mark.parametrize("kind", ["lines", "off"])
@pytest.mark.parametrize("step", [0.5, jnp.arange(2), None, True])
def test_step_is_an_integer(kind, step):
    bar = loops.progress(3, kind=kind)
    with pytest.raises(TypeError, match=r"number of a step, an integer of shape \(\); got "):
        bar.update(step)
    with pytest.raises(TypeError, match=r"number of a step, an integer of shape \(\); got "):
        bar.inner(step)


@pytest.mark.parametrize("options", [{"total": -1}, {"total": 2.5}, {"every": 0}])
def test_totals_are_whole_numbers(options):
    with pytest.raises(ValueError, match=f"{next(iter(options))} must be an integer of at least"):
        loops.progress(**options)
