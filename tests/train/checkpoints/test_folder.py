"""A folder of checkpoints: which stay, which is gone on from, and who may write there."""

import errno
import gc
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import threading

import jax.numpy as jnp
import numpy as np
import pytest

from eqxlike import train
from eqxlike.train._checkpoints import _folder, _locks, _place, _save
from tests.train.checkpoints import full_disk


def state(value=0):
    return {"w": np.full(4, value)}


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "run"


def steps(checkpoints):
    return [int(path.name.removeprefix("step_")) for path in checkpoints.paths()]


def damage(path):
    (file,) = path.glob("arrays-*/*.w/0")
    file.write_bytes(bytes(file.stat().st_size - 1))


def test_empty_folder_has_nothing_to_go_on_from(folder):
    checkpoints = train.CheckpointFolder(folder)
    assert checkpoints.newest() is None
    assert checkpoints.restore_newest(state()) is None
    assert not folder.exists()


@pytest.mark.parametrize("background", [False, True])
def test_newest_are_kept(folder, background):
    with train.CheckpointFolder(folder, keep_last=2) as checkpoints:
        for step in (1, 2, 9, 10):
            checkpoints.save(step, state(step), {"at": step}, background=background)
    assert steps(checkpoints) == [10, 9]
    assert checkpoints.newest() == folder / "step_000000010"
    restored, data = checkpoints.restore_newest(state())
    assert (restored["w"][0], data) == (10, {"at": 10})
    assert sorted(os.listdir(folder)) == [".lock", "step_000000009", "step_000000010"]


SCORES = {1: 5.0, 2: 1.0, 3: float("nan"), 4: 3.0, 5: None, 6: 2.0, 7: float("-inf"), 8: 9.0}


@pytest.mark.parametrize(("mode", "expected"), [("min", [8, 6, 2]), ("max", [8, 1])])
def test_best_are_kept_beside_the_newest(folder, mode, expected):
    with train.CheckpointFolder(folder, keep_last=1, keep_best=2, mode=mode) as checkpoints:
        for step, score in SCORES.items():
            checkpoints.save(step, state(step), score=score)
    assert steps(checkpoints) == expected


def test_best_are_known_to_who_comes_later(folder):
    with train.CheckpointFolder(folder, keep_last=1, keep_best=1) as checkpoints:
        checkpoints.save(1, state(), score=0.5)
    with train.CheckpointFolder(folder, keep_last=1, keep_best=1) as checkpoints:
        checkpoints.save(2, state(), score=0.75)
        checkpoints.save(3, state(), score=jnp.float32(1))
    assert steps(checkpoints) == [3, 1]


@pytest.mark.parametrize(("mode", "expected"), [("min", 2), ("max", 8)])
def test_best_is_found(folder, mode, expected):
    with train.CheckpointFolder(folder, keep_last=9) as checkpoints:
        for step, score in SCORES.items():
            checkpoints.save(step, state(step), score=score, background=True)
    found = train.CheckpointFolder(folder, mode=mode).best()
    assert found == folder / f"step_{expected:09d}"


def test_none_is_best_where_none_has_a_score(folder):
    with train.CheckpointFolder(folder) as checkpoints:
        assert checkpoints.best() is None
        checkpoints.save(1, state())
        assert checkpoints.best() is None


def test_of_equally_good_ones_the_newest_stays(folder):
    with train.CheckpointFolder(folder, keep_last=1, keep_best=1) as checkpoints:
        for step in (1, 2, 3):
            checkpoints.save(step, state(), score=0.5 if step < 3 else 1)
    assert steps(checkpoints) == [3, 2]


def test_nothing_is_deleted_before_the_new_one_is_in_place(folder, monkeypatch):
    with train.CheckpointFolder(folder, keep_last=1) as checkpoints:
        checkpoints.save(1, state(1))

        def fail(*_):
            raise OSError("the disk is on fire")

        monkeypatch.setattr(_save, "write_arrays", fail)
        with pytest.raises(OSError, match="on fire"):
            checkpoints.save(2, state(2))
        monkeypatch.undo()
        assert checkpoints.restore_newest(state()).state["w"][0] == 1
        checkpoints.save(2, state(2))
    assert steps(checkpoints) == [2]


def test_same_step_is_replaced(folder):
    with train.CheckpointFolder(folder) as checkpoints:
        checkpoints.save(1, state(1))
        checkpoints.save(1, state(2))
        assert checkpoints.restore_newest(state()).state["w"][0] == 2
    assert steps(checkpoints) == [1]


def test_newest_that_is_damaged_is_passed_over_with_a_warning(folder):
    with train.CheckpointFolder(folder) as checkpoints:
        for step in (1, 2, 3):
            checkpoints.save(step, state(step))
    damage(folder / "step_000000003")
    (folder / "step_000000002/manifest.json").write_text("")
    with pytest.warns(UserWarning, match="damaged") as caught:
        restored = train.CheckpointFolder(folder).restore_newest(state())
    assert restored.state["w"][0] == 1
    texts = [str(each.message) for each in caught]
    assert len(texts) == 2
    assert "step_000000003" in texts[0]
    assert "with the values of state['w'], is cut off" in texts[0]
    assert "step_000000002/manifest.json is damaged" in texts[1]
    assert all(f"Going on from {folder}/step_000000001, which is older" in text for text in texts)


def test_all_damaged_are_named(folder):
    with train.CheckpointFolder(folder) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, state(step))
            damage(folder / f"step_00000000{step}")
        with pytest.raises(train.CheckpointError, match="None of the 2 checkpoints in") as caught:
            checkpoints.restore_newest(state())
    assert all(f"step_00000000{step}" in str(caught.value) for step in (1, 2))


def test_other_structure_is_no_damage(folder):
    with train.CheckpointFolder(folder) as checkpoints:
        checkpoints.save(1, state())
        checkpoints.save(2, {"v": np.zeros(1)})
        with pytest.raises(ValueError, match=r"step_000000002 is whole, and does not fit"):
            checkpoints.restore_newest(state())


def test_error_of_restore_names_the_newest_whole_one(folder):
    with train.CheckpointFolder(folder) as checkpoints:
        for step in (1, 2, 3):
            checkpoints.save(step, state(step))
    damage(folder / "step_000000003")
    damage(folder / "step_000000002")
    message = rf"is damaged: .* The newest whole one here is {folder}/step_000000001\."
    with pytest.raises(train.CheckpointError, match=message):
        train.restore(folder / "step_000000003", state())


def test_run_goes_on_past_damaged_ones_which_are_put_aside(folder):
    with train.CheckpointFolder(folder, keep_last=1) as checkpoints:
        checkpoints.save(1, state(1))
        train.save(folder / "step_000000003", state(3))
        damage(folder / "step_000000003")
        with pytest.warns(UserWarning, match="damaged"):
            checkpoints.restore_newest(state())
        checkpoints.save(2, state(2))
        assert checkpoints.restore_newest(state()).state["w"][0] == 2
    assert steps(checkpoints) == [2]
    assert (folder / "step_000000003.damaged").is_dir()


def test_step_that_would_not_be_the_newest_is_refused(folder):
    with train.CheckpointFolder(folder, keep_last=1) as checkpoints:
        checkpoints.save(5, state())
    message = (
        f"{folder} has a checkpoint of step 5, and one of step 4 is to be saved, which would not "
        f"be the newest. Go on from {folder}/step_000000005, or give another folder."
    )
    with train.CheckpointFolder(folder) as checkpoints:
        for refuse in (lambda: checkpoints.save(4, state()), lambda: checkpoints.check_free(4)):
            with pytest.raises(ValueError, match="would not be the newest") as caught:
                refuse()
            assert str(caught.value) == message
        checkpoints.check_free(5)
    assert steps(checkpoints) == [5]


def test_what_is_no_checkpoint_of_the_run_stays(folder):
    folder.mkdir()
    for name in ("notes.txt", "step_9", "step_x", ".hidden"):
        (folder / name).touch()
    (folder / "step_7.bak").mkdir()
    before = set(os.listdir(folder))
    with train.CheckpointFolder(folder, keep_last=1) as checkpoints:
        checkpoints.save(1, state())
        checkpoints.save(2, state())
    assert set(os.listdir(folder)) == before | {".lock", "step_000000002"}


def test_what_this_process_is_writing_is_not_taken_for_left_behind(folder, monkeypatch):
    is_waited_for = threading.Event()
    lock, wait = _place.lock, _folder.wait_for_newest

    def lock_late(path):
        assert is_waited_for.wait(timeout=60)
        return lock(path)

    def wait_and_tell():
        is_waited_for.set()
        wait()

    with train.CheckpointFolder(folder) as checkpoints:
        monkeypatch.setattr(_place, "lock", lock_late)
        first = checkpoints.save(1, state(1), background=True)
        monkeypatch.setattr(_folder, "wait_for_newest", wait_and_tell)
        checkpoints.save(2, state(2), background=True).wait()
        first.wait()
    assert steps(checkpoints) == [2, 1]


def test_what_a_dead_process_left_is_removed(folder):
    left = folder / ".step_000000001.tmp" / "arrays"
    left.mkdir(parents=True)
    (folder / ".step_000000000.old").mkdir()
    with train.CheckpointFolder(folder) as checkpoints:
        assert checkpoints.newest() is None
        checkpoints.save(2, state())
    assert sorted(os.listdir(folder)) == [".lock", "step_000000002"]


WRITER = """
import sys
import numpy as np
from eqxlike import train
checkpoints = train.CheckpointFolder(sys.argv[1])
checkpoints.save(1, {"w": np.full(4, 1)})
print("saved", flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def writer(folder):
    """Another process that writes in the folder."""
    command = [sys.executable, "-W", "ignore", "-c", WRITER, str(folder)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdout.readline() == "saved\n"
        yield process
        process.kill()


def test_folder_in_which_another_process_writes_can_be_read_alone(folder, writer):
    with train.CheckpointFolder(folder) as checkpoints:
        assert checkpoints.restore_newest(state()).state["w"][0] == 1
        message = rf"somebody else writes checkpoints here, process {writer.pid} on .*{folder}"
        with pytest.raises(BlockingIOError, match=message):
            checkpoints.save(2, state())
        # A lock ends with its process, however it ends.
        writer.send_signal(signal.SIGKILL)
        writer.wait(timeout=60)
        checkpoints.save(2, state(2))
    assert steps(checkpoints) == [2, 1]


def test_second_writer_in_one_process_is_refused_until_the_first_is_closed(folder):
    first, second = train.CheckpointFolder(folder), train.CheckpointFolder(folder)
    first.save(1, state())
    with pytest.raises(BlockingIOError, match=f"process {os.getpid()} on"):
        second.save(2, state())
    first.close()
    second.save(2, state())
    second.close()


def test_writer_that_nobody_has_any_more_is_closed(folder):
    train.CheckpointFolder(folder).save(1, state())
    gc.collect()
    with train.CheckpointFolder(folder) as checkpoints:
        checkpoints.save(2, state())
    assert steps(checkpoints) == [2, 1]


def test_one_path_is_written_by_one_process_at_a_time(tmp_path, monkeypatch):
    path = tmp_path / "checkpoint"
    write = _save.write_arrays

    def write_with_another(folder, arrays):
        command = [sys.executable, "-W", "ignore", "-c", OTHER, str(path)]
        found = subprocess.run(command, capture_output=True, text=True, timeout=60)
        answers.append(found.stdout.strip())
        write(folder, arrays)

    answers = []
    monkeypatch.setattr(_save, "write_arrays", write_with_another)
    train.save(path, state(1))
    (answer,) = answers
    assert answer == f"[Errno 11] another process is writing a checkpoint there: '{path}'"
    assert train.restore(path, state()).state["w"][0] == 1


OTHER = """
import sys
import numpy as np
from eqxlike import train
try:
    train.save(sys.argv[1], {"w": np.full(4, 2)})
except BlockingIOError as error:
    print(error)
"""


def test_checkpoint_that_does_not_read_as_it_was_written_is_refused(folder, monkeypatch):
    write = _save.write_arrays

    def write_wrongly(arrays_folder, arrays):
        write(arrays_folder, arrays)
        (file,) = arrays_folder.glob("*.w/0")
        file.write_bytes(bytes(file.stat().st_size))

    with train.CheckpointFolder(folder, keep_last=1) as checkpoints:
        checkpoints.save(1, state(1))
        monkeypatch.setattr(_save, "write_arrays", write_wrongly)
        with pytest.raises(OSError, match=r"state\['w'\] reads otherwise than it was written"):
            checkpoints.save(2, state(2))
    assert steps(checkpoints) == [1]


def test_checkpoint_that_is_deleted_while_it_is_looked_for_is_passed_over(folder, monkeypatch):
    with train.CheckpointFolder(folder) as checkpoints:
        checkpoints.save(1, state(1))
        gone = [folder / "step_000000002", *checkpoints.paths()]
        monkeypatch.setattr(checkpoints, "paths", lambda: gone)
        assert checkpoints.restore_newest(state()).state["w"][0] == 1


def test_full_disk_is_an_os_error_and_the_last_checkpoint_stays(tmp_path):
    """In a process of its own: the limit of its files is that of its output too."""
    done = subprocess.run(
        [sys.executable, full_disk.__file__, tmp_path.resolve()],
        env={**os.environ, "PYTHONPATH": str(pathlib.Path(__file__).parents[3])},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr


@pytest.fixture
def read_only_folder(tmp_path_factory):
    """A folder with a checkpoint in which this process, be it root's, may write no more."""
    with tempfile.TemporaryDirectory() as parent:
        folder = pathlib.Path(parent) / "run"
        with train.CheckpointFolder(folder) as checkpoints:
            checkpoints.save(1, state(1))
        os.chmod(parent, 0o755)
        os.chmod(folder, 0o555)
        user = os.geteuid()
        if user == 0:
            os.seteuid(65534)
        yield folder
        os.seteuid(user)
        os.chmod(folder, 0o755)


def test_folder_that_may_not_be_written_is_named_and_can_be_read(read_only_folder):
    with train.CheckpointFolder(read_only_folder) as checkpoints:
        assert checkpoints.restore_newest(state()).state["w"][0] == 1
        with pytest.raises(PermissionError, match=str(read_only_folder)):
            checkpoints.save(2, state())
        with pytest.raises(PermissionError, match=f"{read_only_folder}/other"):
            train.save(read_only_folder / "other", state())
        with pytest.raises(PermissionError, match=f"{read_only_folder}/step_000000001"):
            train.save(read_only_folder / "step_000000001", state())


def test_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").touch()
    checkpoints = train.CheckpointFolder(tmp_path / "file" / "run")
    with pytest.raises(NotADirectoryError, match="file/run"):
        checkpoints.save(1, state())


BAD_ARGUMENTS = [
    ({"keep_last": 0}, ValueError, "keep_last must be an integer of at least 1, got 0"),
    ({"keep_last": 1.5}, ValueError, "keep_last must be an integer of at least 1, got 1.5"),
    ({"keep_best": 0}, ValueError, "keep_best must be an integer of at least 1, got 0"),
    ({"mode": "best"}, ValueError, 'mode "min" or "max", and got \'best\''),
]


@pytest.mark.parametrize(("arguments", "error", "message"), BAD_ARGUMENTS)
def test_arguments_out_of_range_are_refused(folder, arguments, error, message):
    with pytest.raises(error, match=message):
        train.CheckpointFolder(folder, **arguments)


def test_checkpoint_is_no_folder_of_checkpoints(folder):
    with train.CheckpointFolder(folder) as checkpoints:
        saved = checkpoints.save(3, state()).path
    with pytest.raises(ValueError, match=re.escape(f"{saved} is one itself: give {folder}.")):
        train.CheckpointFolder(saved)


def test_disk_without_locks_takes_checkpoints(folder, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(_locks.fcntl, "flock", refuse)
    with train.CheckpointFolder(folder) as checkpoints:
        checkpoints.save(3, state())
    assert steps(checkpoints) == [3]


def test_step_below_zero_is_refused(folder):
    with pytest.raises(ValueError, match="counted from 0, got -1"):
        train.CheckpointFolder(folder).save(-1, state())
