"""Saves in the background: what they write, when they end, and where their errors go."""

import os
import signal
import subprocess
import sys
import threading

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

from eqxlike import train
from eqxlike.train._checkpoints import _restore, _save


@pytest.fixture
def path(tmp_path):
    return tmp_path / "checkpoint"


class Gate:
    """Holds back what is written until it is opened, and may raise then."""

    def __init__(self):
        self.is_open = threading.Event()
        self.error = None
        self.written = []

    def __call__(self, folder, arrays):
        assert self.is_open.wait(timeout=60)
        if self.error is not None:
            raise self.error
        self.write(folder, arrays)
        self.written += [array.tolist() for array in arrays.values()]

    def opened_by(self, function):
        """`function`, which opens the gate first."""

        def wrapper(*args):
            self.is_open.set()
            return function(*args)

        return wrapper


@pytest.fixture
def gate(monkeypatch):
    gate = Gate()
    gate.write = _save.write_arrays
    monkeypatch.setattr(_save, "write_arrays", gate)
    yield gate
    gate.is_open.set()


def test_donated_arrays_are_saved_as_they_were(path, gate):
    def step(state):
        return jax.tree.map(lambda x: x + 1, state)

    state = {"w": jnp.arange(1000.0), "n": jnp.zeros((), int)}
    step = jax.jit(step, donate_argnums=0)
    saving = train.save(path, state, background=True)
    for _ in range(3):
        state = step(state)
    gate.is_open.set()
    saving.wait()
    restored = train.restore(path, state).state
    assert restored["w"].tolist() == list(range(1000))
    assert restored["n"] == 0


def test_keys_are_saved_as_they_were(path, gate):
    key = jr.key(0)
    saving = train.save(path, key, background=True)
    key.delete()
    gate.is_open.set()
    saving.wait()
    assert jr.key_data(train.restore(path, jr.key(1)).state).tolist() == [0, 0]


def test_numpy_array_that_is_changed_is_saved_as_it_was(path, gate):
    state = np.zeros(3)
    saving = train.save(path, state, background=True)
    state[:] = 1
    gate.is_open.set()
    saving.wait()
    assert train.restore(path, state).state.tolist() == [0, 0, 0]


def test_data_that_is_changed_is_saved_as_it_was(path, gate):
    data = {"epoch": [1]}
    saving = train.save(path, np.zeros(1), data, background=True)
    data["epoch"].append(2)
    gate.is_open.set()
    saving.wait()
    assert train.restore(path, np.zeros(1)).data == {"epoch": [1]}


def test_save_returns_before_it_has_written(path, gate):
    saving = train.save(path, np.zeros(1), background=True)
    assert not saving.is_done
    assert repr(saving) == f"Saving('{path}', being written)"
    assert not path.exists()
    gate.is_open.set()
    saving.wait()
    assert saving.is_done
    assert path.exists()
    assert repr(saving) == f"Saving('{path}', written)"


@pytest.mark.parametrize("background", [False, True])
def test_save_waits_for_the_one_before(path, gate, monkeypatch, background):
    train.save(path, np.zeros(1), background=True)
    monkeypatch.setattr(train.Saving, "join", gate.opened_by(train.Saving.join))
    train.save(path, np.ones(1), background=background).wait()
    assert gate.written == [[0], [1]]
    assert train.restore(path, np.zeros(1)).state == 1


def test_one_copy_of_a_state_is_held_at_a_time(path, gate, monkeypatch):
    train.save(path, np.zeros(1), background=True)
    monkeypatch.setattr(train.Saving, "join", gate.opened_by(train.Saving.join))
    take, written_before = _save._take, []

    def take_and_note(*args, **options):
        written_before.append(list(gate.written))
        return take(*args, **options)

    monkeypatch.setattr(_save, "_take", take_and_note)
    train.save(path, np.ones(1), background=True).wait()
    assert written_before == [[[0]]]


def test_restore_waits_for_what_is_being_written(path, gate, monkeypatch):
    train.save(path, np.ones(1), background=True)
    monkeypatch.setattr(_restore, "wait_for_newest", gate.opened_by(_restore.wait_for_newest))
    assert train.restore(path, np.zeros(1)).state == 1


def test_error_is_raised_by_wait(path, gate):
    gate.error = OSError("the disk is on fire")
    saving = train.save(path, np.zeros(1), background=True)
    gate.is_open.set()
    for _ in range(2):
        with pytest.raises(OSError, match="on fire"):
            saving.wait()
    assert repr(saving) == f"Saving('{path}', failed)"
    assert os.listdir(path.parent) == []


def test_error_for_which_nobody_waits_is_raised_by_the_next_save(path, gate):
    gate.error = OSError("the disk is on fire")
    gate.is_open.set()
    train.save(path, np.zeros(1), background=True)
    with pytest.raises(OSError, match="on fire"):
        train.save(path, np.ones(1), background=True)
    gate.error = None
    train.save(path, np.ones(1), background=True).wait()
    assert train.restore(path, np.zeros(1)).state == 1


def test_ctrl_c_while_one_waits_ends_the_waiting_alone(path, gate, ctrl_c):
    saving = train.save(path, np.ones(1), background=True)
    main = threading.main_thread().ident
    soon = threading.Timer(0.1, lambda: signal.pthread_kill(main, signal.SIGINT))

    def wait():
        soon.start()
        saving.wait()

    with pytest.raises(KeyboardInterrupt):
        wait()
    assert not saving.is_done
    gate.is_open.set()
    saving.wait()
    assert train.restore(path, np.zeros(1)).state == 1


def test_save_for_which_there_is_no_thread_is_no_save(path, monkeypatch):
    def refuse(thread):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="start new thread"):
            train.save(path, np.ones(1), background=True)
    train.save(path, np.ones(1), background=True).wait()
    assert train.restore(path, np.zeros(1)).state == 1


def in_a_thread(function):
    thread = threading.Thread(target=function)
    thread.start()
    thread.join(timeout=60)


def test_error_in_one_thread_is_none_of_another(path, gate):
    gate.error = OSError("the disk is on fire")
    gate.is_open.set()
    failed = train.save(path, np.zeros(1), background=True)
    failed.join()
    gate.error = None
    other = path.with_name("other")
    in_a_thread(lambda: train.save(other, np.ones(1)))
    assert train.restore(other, np.zeros(1)).state == 1
    with pytest.raises(OSError, match="on fire"):
        train.save(path, np.zeros(1))


def test_save_that_another_thread_is_about_to_begin_is_waited_for(path, gate, monkeypatch):
    begin, about_to = threading.Thread.start, threading.Event()

    def start_late(thread):
        if thread.name.startswith("saving"):
            about_to.set()
            gate.is_open.wait(timeout=60)
        begin(thread)

    monkeypatch.setattr(threading.Thread, "start", start_late)
    saver = threading.Thread(target=lambda: train.save(path, np.ones(1), background=True))
    saver.start()
    assert about_to.wait(timeout=60)
    opener = threading.Timer(0.1, gate.is_open.set)
    opener.start()
    assert train.restore(path, np.zeros(1)).state == 1
    saver.join(timeout=60)
    opener.join(timeout=60)


def test_error_that_was_seen_is_not_raised_again(path, gate):
    gate.error = OSError("the disk is on fire")
    gate.is_open.set()
    with pytest.raises(OSError, match="on fire"):
        train.save(path, np.zeros(1), background=True).wait()
    gate.error = None
    train.save(path, np.ones(1)).wait()
    assert train.restore(path, np.zeros(1)).state == 1


def test_old_checkpoint_stays_where_the_new_one_fails(path, gate):
    gate.is_open.set()
    train.save(path, np.zeros(1))
    gate.error = OSError("the disk is on fire")
    with pytest.raises(OSError, match="on fire"):
        train.save(path, np.ones(1))
    assert train.restore(path, np.ones(1)).state == 0
    assert os.listdir(path.parent) == ["checkpoint"]


def run(source, *arguments):
    command = [sys.executable, "-c", source, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


AT_EXIT = """
import sys, time
import numpy as np
from eqxlike import train
from eqxlike.train._checkpoints import _save
write = _save.write_arrays
def slowly(folder, arrays):
    time.sleep(0.5)
    if sys.argv[2] == "fails":
        raise OSError("the disk is on fire")
    write(folder, arrays)
_save.write_arrays = slowly
train.save(sys.argv[1], np.arange(3.0), background=True)
"""

# Python 3.12.0 and 3.12.1 start no thread from the moment on at which they begin to exit.
EXITS_TOO_EARLY = (3, 12, 0) <= sys.version_info[:3] <= (3, 12, 1)


def test_interpreter_waits_as_it_exits(path):
    ended = run(AT_EXIT, path, "works")
    if EXITS_TOO_EARLY:
        assert f"The checkpoint {path} was not written:" in ended.stderr
        assert not path.exists()
    else:
        assert ended.stderr == ""
        assert train.restore(path, np.zeros(3)).state.tolist() == [0, 1, 2]


def test_error_for_which_nobody_waits_is_printed_at_exit(path):
    ended = run(AT_EXIT, path, "fails")
    assert f"The checkpoint {path} was not written:" in ended.stderr
    assert "OSError: the disk is on fire" in ended.stderr
