"""Progress bars and lines of compiled loops."""

import importlib.util
import io
import re
import sys
import types
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import pytest

from eqxlike import loops
from eqxlike.loops._progress import BarSettings, Level, OpenBars


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
    """A progress bar that writes a line at each update."""
    return loops.progress(total, description, kind="lines", interval_s=0, stream=stream, **options)


def steps_in(stream):
    """The steps that the output shows."""
    jax.effects_barrier()
    return [int(number) for number in re.findall(r"step (\d+)", stream.getvalue())]


def in_lax_scan(bar, x, count, num_steps):
    def body(carry, step):
        bar.update(step, carry)
        return jnp.where(step < count, jnp.sin(carry), carry), None

    return jax.lax.scan(body, x, jnp.arange(num_steps))[0]


def in_while_loop(checkpoints=None):
    def run(bar, x, count, num_steps):
        def body(carry):
            bar.update(*carry)
            return carry[0] + 1, jnp.sin(carry[1])

        options = {"max_steps": num_steps, "kind": "checkpointed", "checkpoints": checkpoints}
        is_on = lambda carry: carry[0] < count
        return loops.while_loop(is_on, body, (jnp.array(0), x), **options)[1]

    return run


NUM_STEPS = 5
COUNTS = jnp.array([2, NUM_STEPS, 3])
WAYS = {
    "vmap": lambda f: jax.jit(jax.vmap(f))(jnp.arange(3.0), COUNTS),
    "grad": lambda f: jax.jit(jax.grad(f))(1.0, jnp.array(NUM_STEPS)),
    "hessian": lambda f: jax.jit(jax.hessian(f))(1.0, jnp.array(NUM_STEPS)),
    "grad of vmap": lambda f: jax.jit(
        jax.grad(lambda x: jnp.sum(jax.vmap(f, (None, 0))(x, COUNTS)))
    )(1.0),
}


@pytest.mark.parametrize(
    ("loop", "way"),
    [(in_lax_scan, "vmap"), (in_while_loop(), "hessian"), (in_while_loop(2), "grad of vmap")],
)
def test_each_step_counts_once_in_every_loop_and_mode(stream, loop, way):
    WAYS[way](lambda x, count: loop(all_lines(NUM_STEPS, stream), x, count, NUM_STEPS))
    assert steps_in(stream) == [1, 2, 3, 4, 5]


def test_each_run_has_its_own_bar_also_under_checkpoint(stream):
    def run(x):
        bar = all_lines(2, stream)
        return jax.checkpoint(lambda x: in_lax_scan(bar, x, 2, 2))(x)

    for function in (jax.jit(run), jax.jit(jax.grad(run))):
        function(1.0)
        function(1.0)
    assert steps_in(stream) == [1, 2] * 4


def test_bar_that_is_off_compiles_nothing(monkeypatch):
    def run(bar):
        def of_x(x, count):
            def body(carry, step):
                if bar is not None:
                    bar.inner(step, 3).update(step)
                    bar.update(0, carry)
                    bar.update(step, carry)
                return jnp.sin(carry), None

            x = jax.lax.scan(body, x, jnp.arange(NUM_STEPS))[0]
            if bar is not None:
                bar.close(x)
            return x

        return of_x

    def jaxpr(bar):
        return str(jax.make_jaxpr(lambda: [WAYS[way](run(bar)) for way in ("vmap", "grad")])())

    plain = jaxpr(None)
    assert jaxpr(loops.progress(NUM_STEPS, kind="off")) == plain
    monkeypatch.setenv("EQXLIKE_PROGRESS", "off")
    assert jaxpr(loops.progress(NUM_STEPS, kind="lines")) == plain


CALLS = [
    # A known length: at most 1000 steps at equal distances, and the last step.
    (1001, 1001, {}, [*range(2, 1001, 2), 1001]),
    (10, 10, {"every": 4}, [4, 8, 10]),
    # An unknown length: 128 steps in each doubling.
    (None, 300, {}, [*range(1, 257), *range(258, 301, 2)]),
    (None, 10, {"every": 4}, [4, 8]),
    (0, 0, {}, []),
]


def test_python_is_called_rarely_also_by_inner_loops_and_with_a_small_dtype(stream):
    streams = [io.StringIO() for _ in CALLS]

    @jax.jit
    def run():
        for (total, num_steps, options, _), each in zip(CALLS, streams, strict=True):
            in_lax_scan(all_lines(total, each, **options), 1.0, num_steps, num_steps)

    run()
    assert list(map(steps_in, streams)) == [shown for *_, shown in CALLS]
    jax.jit(epochs_of(stream, 300, 30))(1.0)
    jax.effects_barrier()
    assert stream.getvalue().count("batches") == 300 * 3
    bar, before = all_lines(1000, stream, "small", every=100), len(steps_in(stream))
    step = lambda carry, step: (bar.update(step), None)
    jax.lax.scan(step, None, jnp.arange(127, dtype=jnp.int8))
    assert steps_in(stream)[before:] == [100]


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


def test_inner_loop_has_an_inner_bar(stream):
    jax.jit(jax.grad(epochs_of(stream, 2, 2)))(1.0)
    jax.effects_barrier()
    lines = [[f"epochs: step {n}/2, batches: step {m}/2" for m in (1, 2)] for n in (1, 2)]
    expected = [*lines[0], "epochs: step 1/2", *lines[1], "epochs: step 2/2"]
    assert stream.getvalue().splitlines() == expected


def settings(total, interval_s, stream, name="", kind="lines"):
    return BarSettings((Level(total, name, 1),), kind, interval_s, stream)


def test_bar_is_closed_if_the_loop_ends_early(stream):
    board = OpenBars()
    number, shown = int(board.new_number()), settings(100, 1e9, stream, "solve")
    board.show(shown, number, 40)
    assert stream.getvalue() == ""
    board.close(number)
    board.show(shown, number, 41)
    assert stream.getvalue() == "solve: step 41/100\n"


def test_late_steps_are_not_shown_and_endless_runs_are_closed(stream):
    board = OpenBars()
    number = board.new_number()
    for step in (1, 0, 2, 0, 1):
        board.show(settings(3, 0.0, stream), number, step)
    board.show(settings(3, 1e9, stream), board.new_number(), 0)
    assert stream.getvalue().splitlines() == ["step 2/3", "step 3/3"]
    for _ in range(1000):
        board.new_number()
    assert stream.getvalue().splitlines() == ["step 2/3", "step 3/3", "step 1/3"]


@pytest.mark.parametrize("way", ["vmap", "grad"])
def test_bar_closes_after_the_loop_returns(stream, way):
    def run(x, count):
        bar = loops.progress(None, "solve", kind="lines", interval_s=1e9, stream=stream)
        x = in_while_loop()(bar, x, count, 9)
        bar.close({"x": x, "static": "a"})
        return x

    WAYS[way](run)
    jax.effects_barrier()
    assert stream.getvalue() == "solve: step 5\n"


def test_lines_have_at_least_the_interval_between_them(stream):
    times = iter([0.0, 0.0, 0.4, 1.0, 1.9, 2.0, 2.1])
    board = OpenBars(clock=lambda: next(times))
    number = board.new_number()
    for step in range(6):
        board.show(settings(6, 1.0, stream), number, step)
    # The steps come at 0.0, 0.4, 1.0, 1.9, 2.0 and 2.1 s.
    assert stream.getvalue().splitlines() == ["step 3/6", "step 5/6", "step 6/6"]


class FakeBar:
    """The methods of tqdm that a bar calls."""

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


def test_tqdm_shows_the_done_steps_and_restarts_for_an_inner_loop(fake_tqdm, stream):
    bar = loops.progress(3, "training", kind="tqdm", interval_s=0)
    jax.jit(lambda x: in_lax_scan(bar, x, 3, 3))(1.0)
    jax.effects_barrier()
    board, levels = OpenBars(), (Level(2, "outer", 1), Level(2, "inner", 1))
    number = board.new_number()
    for steps in [(0, 0), (0, 1), (1, 0), (1, 1)]:
        board.show(BarSettings(levels, "tqdm", 0.0, stream), number, *steps)
    one, inner = FakeBar.made
    assert (one.total, one.desc, one.shown) == (3, "training", [1, 2, 3, "closed"])
    assert inner.shown == [1, 2, "reset", 1, 2, "closed"]


def test_terminal_gets_a_bar():
    terminals = {kind: Terminal() for kind in ("rich", "tqdm", "auto")}

    @jax.jit
    def run():
        for kind, terminal in terminals.items():
            bar = loops.progress(7, "training", kind=kind, stream=terminal, interval_s=0)
            in_lax_scan(bar, 1.0, 7, 7)

    run()
    jax.effects_barrier()
    for terminal in terminals.values():
        assert re.search(r"training.*7/7", terminal.getvalue().replace("\n", " "))
        assert "step" not in terminal.getvalue()


def test_bars_of_rich_are_below_each_other():
    terminal, board = Terminal(), OpenBars()
    bars = [
        (settings(2, 0.0, terminal, name, "rich"), board.new_number())
        for name in ("first", "second")
    ]
    for step in range(2):
        for shown, number in bars:
            board.show(shown, number, step)
    last = terminal.getvalue().splitlines()[-3:-1]
    assert [re.findall("first|second", line)[-1] for line in last] == ["first", "second"]


def test_auto_writes_lines_without_a_terminal_or_an_installed_bar(monkeypatch, stream):
    loops.progress(1, kind="auto", stream=stream).update(0)
    assert steps_in(stream) == [1]
    for name in ("rich", "tqdm"):
        monkeypatch.setitem(sys.modules, name, None)
    terminal = Terminal()
    loops.progress(1, kind="auto", stream=terminal).update(0)
    jax.effects_barrier()
    assert terminal.getvalue() == "step 1/1\n"


def test_unknown_kinds_and_missing_packages_are_errors(monkeypatch):
    for name, command in [("rich", "pip install 'eqxlike[train]'"), ("tqdm", "pip install tqdm")]:
        monkeypatch.setitem(sys.modules, name, None)
        message = f"loops.progress(kind={name!r}) needs {name}: `{command}`, or use kind='lines'."
        with pytest.raises(ImportError, match=re.escape(message)):
            loops.progress(3, kind=name)
    kinds = "'auto', 'rich', 'tqdm', 'lines', 'off'"
    text: Any = "text"
    with pytest.raises(ValueError, match=f"^kind must be one of {kinds}; got 'text'"):
        loops.progress(3, kind=text)
    with pytest.raises(TypeError, match="stream must be a text stream, got 'text'"):
        loops.progress(3, stream=text)
    monkeypatch.setenv("EQXLIKE_PROGRESS", "none")
    with pytest.raises(ValueError, match=f"^EQXLIKE_PROGRESS must be one of {kinds}; got 'none'"):
        loops.progress(3)


def test_steps_and_totals_must_be_integers():
    for kind in ("lines", "off"):
        bar = loops.progress(3, kind=kind)
        for step in (0.5, jnp.arange(2), None, True):
            for method in (bar.update, bar.inner):
                with pytest.raises(TypeError, match=r"`step` to be an integer of shape \(\), got "):
                    method(step)
        for options in ({"total": -1}, {"total": 2.5}, {"every": 0}):
            name = next(iter(options))
            with pytest.raises(ValueError, match=f"{name} must be an integer of at least"):
                loops.progress(kind=kind, **options)
