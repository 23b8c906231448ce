"""Owners and self times of samples of the stack. No test uses a clock."""

import pathlib

import jax
import pytest

pytest.importorskip("pyinstrument")

from pyinstrument.session import Session

import eqxlike
from eqxlike import _profile

PACKAGE = pathlib.Path(eqxlike.__file__).parent
EQXLIKE = f"{PACKAGE}/_transforms/_jit/_filter_jit.py"
JAX = f"{pathlib.Path(jax.__file__).parent}/_src/pjit.py"
SCRIPT = "/home/somebody/train.py"
LIBRARY = "/usr/lib/python3.11/inspect.py"


def stack(*frames):
    """A stack in pyinstrument's format from tuples (function, file, line), outermost first."""
    thread = "MainThread\x00<thread>\x001"
    texts = [f"{name}\x00{file}\x00{line}\x01l{line + 1}" for name, file, line in frames]
    return [thread, *texts]


LOOP = ("loop", SCRIPT, 1)
WRAPPER = ("wrapper", EQXLIKE, 10)
COMMAND = [("<module>", f"{PACKAGE}/__main__.py", 200), ("run", f"{PACKAGE}/__main__.py", 54)]
SAMPLE = ("sample", f"{PACKAGE}/_profile.py", 9)


@pytest.mark.parametrize(
    ("frames", "function", "owner"),
    [
        ([LOOP], "loop", _profile.OTHER),
        ([LOOP, WRAPPER], "wrapper", _profile.OURS),
        ([LOOP, WRAPPER, ("rebuild", "<eqxlike rebuild MLP>", 1)], "rebuild", _profile.OURS),
        ([LOOP, WRAPPER, ("cache_miss", JAX, 5)], "cache_miss", _profile.JAX),
        ([LOOP, WRAPPER, ("bind", LIBRARY, 5)], "wrapper", _profile.OURS),
        ([LOOP, ("block_until_ready", "<built-in>", 0)], "loop", _profile.OTHER),
        ([LOOP, SAMPLE], "sample", _profile.OTHER),
        ([*COMMAND, SAMPLE, LOOP], "loop", _profile.OTHER),
        ([WRAPPER, ("f", "/site-packages/eqxlike_extras/a.py", 1)], "wrapper", _profile.OURS),
    ],
)
def test_sample_belongs_to_the_innermost_frame_of_eqxlike_or_jax(frames, function, owner):
    found = _profile.innermost(stack(*frames))
    assert (found.function, found.owner) == (function, owner)
    assert _profile.innermost(stack()) is None


def session(records):
    return Session.from_json(
        {
            "frame_records": records,
            "start_time": 0.0,
            "duration": sum(seconds for _, seconds in records),
            "sample_count": len(records),
            "start_call_stack": stack(),
            "target_description": "test",
            "cpu_time": 0.0,
        }
    )


def test_self_times_add_up_over_samples():
    one = session([(stack(LOOP), 1.0), (stack(LOOP, WRAPPER), 2.0), (stack(LOOP, WRAPPER), 5.0)])
    times = _profile.self_times(one)
    by_function = {frame.function: seconds for frame, seconds in times.items()}
    assert by_function == {"loop": 1.0, "wrapper": 7.0}
    shares = {_profile.OURS: 7 / 8, _profile.JAX: 0.0, _profile.OTHER: 1 / 8}
    assert _profile.shares(times) == shares
    assert set(_profile.shares({}).values()) == {0.0}


def test_text_tree_shows_hidden_frames():
    hidden = "hidden\x00/a.py\x001\x01h1"
    records = [([*stack(LOOP), hidden], 1.0), (stack(LOOP), 1.0)]
    tree = _profile.Profile(session=session(records)).tree
    assert "hidden" in tree
    assert "loop" in tree
