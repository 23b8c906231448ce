"""A process that is killed while it saves leaves the old checkpoint or the new one, whole."""

import os
import subprocess
import sys

import numpy as np
import pytest

from eqxlike import train

# Dies by SIGKILL at the nth call of a function that changes files. Children are forked before Orbax
# has any threads; each begins a save over what was there before.
SCRIPT = """
import os, pathlib, shutil, signal, sys
import numpy as np
from eqxlike import train
from eqxlike.train._checkpoints import _place, _save

path, is_there = pathlib.Path(sys.argv[1]), sys.argv[2] == "replaced"
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

for module, names in {
    os: ("rename", "replace", "fsync", "mkdir"),
    shutil: ("rmtree",),
    _save: ("write_arrays", "seal", "checksum_of"),
    _place: ("to_text",),
}.items():
    for name in names:
        setattr(module, name, dies_at_its_moment(getattr(module, name)))

import orbax.checkpoint

for number in range(1, 100):
    place = path / str(number)
    place.mkdir()
    if is_there:
        shutil.copytree(path / "old", place / "checkpoint")
    child = os.fork()
    if child == 0:
        calls, moment = 0, number
        train.save(place / "checkpoint", {"w": np.full(4, 1)}, 1)
        os._exit(0)
    if os.waitpid(child, 0)[1] == 0:
        print(number)
        break
"""


@pytest.mark.parametrize("how", ["new", "replaced"])
def test_old_or_new_checkpoint_is_whole_after_a_kill_at_any_moment(tmp_path, how):
    train.save(tmp_path / "old", {"w": np.full(4, 0)}, 0)
    command = [sys.executable, "-W", "ignore", "-c", SCRIPT, str(tmp_path), how]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    like = {"w": np.zeros(4, int)}
    found = []
    for number in range(1, int(ended.stdout) + 1):
        path = tmp_path / str(number) / "checkpoint"
        if how == "new" and not path.exists():
            found.append("nothing")
        else:
            state, data = train.restore(path, like)
            assert state["w"].tolist() == [data] * 4
            found.append(data)
        # The next save takes over what was left half-made.
        train.save(path, {"w": np.full(4, 2)}, 2)
        assert train.restore(path, like).data == 2
        assert os.listdir(path.parent) == ["checkpoint"]
        assert len(os.listdir(path)) == 2
    # One rename makes the new of the old; there were kills before it and after it.
    old = "nothing" if how == "new" else 0
    count = found.count(old)
    assert found == [old] * count + [1] * (len(found) - count)
    assert count > 10
    assert len(found) - count > 2
