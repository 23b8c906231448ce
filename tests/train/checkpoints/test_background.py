"""Background saves: contents, completion and errors, and the files after a killed save."""

import os
import subprocess
import sys
import threading

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

from eqxlike import train
from eqxlike.train import _orbax


@pytest.fixture
def path(tmp_path):
    return tmp_path / "checkpoint"


class Gate:
    """Blocks each write until the gate is open, and then writes or raises `error`."""

    def __init__(self, seal):
        self.seal, self.is_open = seal, threading.Event()
        self.error, self.num_passed = None, 0

    def __call__(self, manifest, arrays):
        assert self.is_open.wait(timeout=60)
        if self.error is not None:
            raise self.error
        self.seal(manifest, arrays)
        self.num_passed += 1


@pytest.fixture
def gate(monkeypatch):
    gate = Gate(_orbax.seal)
    monkeypatch.setattr(_orbax, "seal", gate)
    yield gate
    gate.is_open.set()


@pytest.fixture
def opened_by_join(gate, monkeypatch):
    """A gate that opens when a caller waits for a save."""
    join = train.Saving.join

    def open_and_join(saving):
        gate.is_open.set()
        join(saving)

    monkeypatch.setattr(train.Saving, "join", open_and_join)
    return gate


def test_a_save_is_not_affected_by_later_changes_and_donations(path, gate):
    state = {"w": jnp.arange(1000.0), "n": jnp.zeros((), int), "key": jr.key(0), "x": np.zeros(3)}
    data = {"epoch": [1]}
    saving = train.save(path, state, data, background=True)
    assert not saving.is_done
    assert saving.path == str(path / "step_000000000")
    assert not os.path.exists(saving.path)
    state["w"] = jax.jit(lambda x: x + 1, donate_argnums=0)(state["w"])
    state["key"].delete()
    state["x"][:] = 1
    data["epoch"].append(2)
    gate.is_open.set()
    saving.wait()
    assert saving.is_done
    assert os.path.exists(saving.path)
    restored, data = train.restore(path, state | {"key": jr.key(1)})
    assert restored["w"].tolist() == list(range(1000))
    assert (restored["n"], restored["x"].tolist(), data) == (0, [0, 0, 0], {"epoch": [1]})
    assert jr.key_data(restored["key"]).tolist() == [0, 0]


def test_save_and_restore_wait_for_a_save_in_progress(path, opened_by_join):
    train.save(path, np.zeros(1), background=True)
    saving = train.save(path, np.ones(1), background=True)
    assert opened_by_join.num_passed >= 1
    saving.wait()
    assert opened_by_join.num_passed == 2
    opened_by_join.is_open.clear()
    train.save(path, np.full(1, 2.0), background=True)
    assert train.restore(path, np.zeros(1)).state == 2


def test_errors_are_raised_once_by_wait_or_by_the_next_save_at_the_path(path, gate):
    gate.is_open.set()
    train.save(path, np.zeros(1))
    gate.error = OSError("the disk is on fire")

    def fails(call):
        with pytest.raises(OSError, match="on fire"):
            call()

    fails(lambda: train.save(path, np.ones(1)))
    saving = train.save(path, np.ones(1), background=True)
    for _ in range(2):
        fails(saving.wait)
    assert saving.is_done
    # The old checkpoint stays.
    assert train.restore(path, np.ones(1)).state == 0
    train.save(path, np.ones(1), background=True).join()
    gate.error, other = None, path.with_name("other")
    train.save(other, np.ones(1))
    assert train.restore(other, np.zeros(1)).state == 1
    fails(lambda: train.save(path, np.ones(1), background=True))
    train.save(path, np.ones(1), background=True).wait()
    assert train.restore(path, np.zeros(1)).state == 1


# --- killed processes ---


# Each child process replaces the old checkpoint. It kills itself at the nth call of a function that
# changes files. Children are forked before Orbax starts threads.
SCRIPT = """
import os, pathlib, shutil, signal, sys
import numpy as np
from eqxlike import train
from eqxlike.train import _orbax

path = pathlib.Path(sys.argv[1])
calls = 0
moment = None

def dies_at_its_moment(function):
    def wrapper(*args, **kwargs):
        global calls
        calls += 1
        if calls == moment:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*args, **kwargs)
    return wrapper

for name in ("rename", "replace", "fsync", "mkdir", "unlink", "rmdir"):
    setattr(os, name, dies_at_its_moment(getattr(os, name)))
_orbax.seal = dies_at_its_moment(_orbax.seal)

import orbax.checkpoint

for number in range(1, 100):
    place = path / "replaced" / str(number)
    shutil.copytree(path / "old", place / "checkpoint")
    child = os.fork()
    if child == 0:
        calls, moment = 0, number
        train.save(place / "checkpoint", {"w": np.full(4, 1)}, 1)
        os._exit(0)
    if os.waitpid(child, 0)[1] == 0:
        break
"""


def test_the_old_or_the_new_checkpoint_is_complete_after_a_kill(tmp_path):
    train.save(tmp_path / "old", {"w": np.full(4, 0)}, 0)
    command = [sys.executable, "-W", "ignore", "-c", SCRIPT, str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    like, found = {"w": np.zeros(4, int)}, []
    for number in sorted(map(int, os.listdir(tmp_path / "replaced"))):
        path = tmp_path / "replaced" / str(number) / "checkpoint"
        state, data = train.restore(path, like)
        assert state["w"].tolist() == [data] * 4
        found.append(data)
        # The next save deletes unfinished files.
        if number % 8 == 1:
            train.save(path, {"w": np.full(4, 2)}, 2)
            assert train.restore(path, like).data == 2
            assert len(os.listdir(path)) == 1
    # One rename replaces the old by the new checkpoint. Some kills come before, some after it.
    count = found.count(0)
    assert found == [0] * count + [1] * (len(found) - count)
    assert count > 5
    assert len(found) - count > 2
