"""A folder of checkpoints: kept and restored checkpoints, and other files."""

import contextlib
import os
import pathlib
import subprocess
import sys
import tempfile

import jax.numpy as jnp
import numpy as np
import pytest

from eqxlike import train
from tests.train.checkpoints import full_disk


def state(value=0):
    return {"w": np.full(4, value)}


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "run"


def steps(checkpoints):
    return [int(path.name.removeprefix("step_")) for path in checkpoints.paths()]


def damage(path):
    (file,) = path.glob("arrays/*.w/0")
    file.write_bytes(bytes(file.stat().st_size - 1))


def test_the_newest_are_kept(folder):
    checkpoints = train.CheckpointFolder(folder)
    assert checkpoints.newest() is checkpoints.best() is checkpoints.restore_newest(state()) is None
    assert not folder.exists()
    with train.CheckpointFolder(folder, keep_last=2) as checkpoints:
        for step in (1, 2, 9, 10):
            checkpoints.save(step, state(step), {"at": step}, background=step != 2)
        assert checkpoints.best() is None
    assert steps(checkpoints) == [10, 9]
    assert checkpoints.newest() == folder / "step_000000010"
    restored, data = checkpoints.restore_newest(state())
    assert (restored["w"][0], data) == (10, {"at": 10})
    assert sorted(os.listdir(folder)) == ["step_000000009", "step_000000010"]


SCORES = {1: 5.0, 2: 1.0, 3: float("nan"), 4: 3.0, 5: None, 6: 2.0, 7: float("-inf"), 8: 9.0}


@pytest.mark.parametrize(("mode", "kept", "best"), [("min", [8, 6, 2], 2), ("max", [8, 1], 8)])
def test_the_best_are_kept_and_found(folder, mode, kept, best):
    with train.CheckpointFolder(folder, keep_last=1, keep_best=2, mode=mode) as checkpoints:
        for step, score in SCORES.items():
            checkpoints.save(step, state(step), score=score)
    assert steps(checkpoints) == kept
    assert train.CheckpointFolder(folder, mode=mode).best() == folder / f"step_{best:09d}"


def test_scores_of_an_earlier_run_count_and_the_newest_of_equal_scores_is_kept(folder):
    for each in ({1: 0.5, 2: 0.5}, {3: 0.75, 4: jnp.float32(1)}):
        with train.CheckpointFolder(folder, keep_last=1, keep_best=1) as checkpoints:
            for step, score in each.items():
                checkpoints.save(step, state(), score=score)
    assert steps(checkpoints) == [4, 2]


# --- damaged checkpoints ---


def test_damaged_checkpoints_are_skipped_with_a_warning(folder):
    with train.CheckpointFolder(folder) as checkpoints:
        for step in (1, 2, 3):
            checkpoints.save(step, state(step))
        with pytest.raises(ValueError, match=r"step_000000003 does not fit"):
            checkpoints.restore_newest({"v": np.zeros(1)})
    damage(folder / "step_000000003")
    (folder / "step_000000002/manifest/manifest.json").write_text("")
    with pytest.warns(UserWarning, match="damaged") as caught:
        restored = train.CheckpointFolder(folder).restore_newest(state())
    assert restored.state["w"][0] == 1
    messages = [str(each.message) for each in caught]
    for message, *expected in [
        (messages[0], "step_000000003", "with the values of state['w'], was changed"),
        (messages[1], "step_000000002/manifest/manifest.json is damaged"),
    ]:
        assert all(each in message for each in expected)
        assert f"Restored the older {folder}/step_000000001 instead." in message
    damage(folder / "step_000000001")
    with pytest.raises(train.CheckpointError, match=r"All 3 checkpoints .* are damaged") as caught:
        checkpoints.restore_newest(state())
    assert all(f"step_00000000{step}" in str(caught.value) for step in (1, 2, 3))


def test_run_continues_and_renames_a_damaged_checkpoint(folder):
    with train.CheckpointFolder(folder) as checkpoints:
        checkpoints.save(1, state(1))
        checkpoints.save(3, state(3))
        damage(folder / "step_000000003")
        checkpoints.save(2, state(2))
        assert checkpoints.restore_newest(state()).state["w"][0] == 2
    assert steps(checkpoints) == [2, 1]
    (aside,) = folder.glob("step_000000003.damaged*")
    assert aside.is_dir()


def test_a_step_that_is_not_the_newest_is_refused(folder):
    with train.CheckpointFolder(folder, keep_last=1) as checkpoints:
        checkpoints.save(5, state())
    message = (
        f"{folder} already has a checkpoint of step 5, so a checkpoint of step 4 would not be the "
        f"newest. Resume from {folder}/step_000000005, or pass another folder."
    )
    with train.CheckpointFolder(folder) as checkpoints:
        for refuse in (lambda: checkpoints.save(4, state()), lambda: checkpoints.check_free(4)):
            with pytest.raises(ValueError, match="would not be the newest") as caught:
                refuse()
            assert str(caught.value) == message
        checkpoints.check_free(5)
        with pytest.raises(ValueError, match="step 5 already exists"):
            checkpoints.save(5, state())
    assert steps(checkpoints) == [5]


# --- other files and other processes ---


def test_other_files_stay_and_unfinished_checkpoints_are_deleted(folder):
    folder.mkdir()
    for name in ("notes.txt", "step_x", ".hidden"):
        (folder / name).touch()
    (folder / "step_7.bak").mkdir()
    before = set(os.listdir(folder))
    (folder / "step_000000001.orbax-checkpoint-tmp" / "arrays").mkdir(parents=True)
    (folder / "step_000000000.orbax-checkpoint-tmp").mkdir()
    with train.CheckpointFolder(folder, keep_last=1) as checkpoints:
        assert checkpoints.newest() is None
        checkpoints.save(1, state())
        checkpoints.save(2, state())
    assert set(os.listdir(folder)) == before | {"step_000000002"}


# Python 3.12.0 and 3.12.1 start no threads during exit.
EXITS_TOO_EARLY = (3, 12, 0) <= sys.version_info[:3] <= (3, 12, 1)


def test_a_full_disk_is_an_os_error_and_a_save_in_progress_is_finished_at_exit(tmp_path):
    """Runs a separate process, because the limit applies to all files of a process."""
    command = [sys.executable, full_disk.__file__, tmp_path.resolve()]
    environment = {**os.environ, "PYTHONPATH": str(pathlib.Path(__file__).parents[3])}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "OSError: the disk is on fire" in done.stderr
    if not EXITS_TOO_EARLY:
        assert train.restore(tmp_path / "written", np.zeros(3)).state.tolist() == [0, 1, 2]


def test_checkpoint_that_is_deleted_during_the_search_is_skipped(folder, monkeypatch):
    with train.CheckpointFolder(folder) as checkpoints:
        checkpoints.save(1, state(1))
        gone = [folder / "step_000000002", *checkpoints.paths()]
        monkeypatch.setattr(checkpoints, "paths", lambda: gone)
        assert checkpoints.restore_newest(state()).state["w"][0] == 1


@contextlib.contextmanager
def read_only_folder():
    """A folder with a checkpoint that this process cannot write, even as root."""
    with tempfile.TemporaryDirectory() as parent:
        folder = pathlib.Path(parent) / "run"
        with train.CheckpointFolder(folder) as checkpoints:
            checkpoints.save(1, state(1))
        os.chmod(parent, 0o755)
        os.chmod(folder, 0o555)
        user = os.geteuid()
        if user == 0:
            os.seteuid(65534)
        try:
            yield folder
        finally:
            os.seteuid(user)
            os.chmod(folder, 0o755)


def test_read_only_folder_can_be_read_and_errors_name_it():
    with read_only_folder() as folder, train.CheckpointFolder(folder) as checkpoints:
        assert checkpoints.restore_newest(state()).state["w"][0] == 1
        with pytest.raises(PermissionError, match=str(folder)):
            checkpoints.save(2, state())
        with pytest.raises(PermissionError, match=f"{folder}/other"):
            train.save(folder / "other", state())


def test_bad_arguments_are_refused(folder, tmp_path):
    with train.CheckpointFolder(folder) as checkpoints:
        saved = checkpoints.save(0, state()).path
    (tmp_path / "file").touch()
    make, at_least = train.CheckpointFolder, "must be an integer of at least"
    for call, error, message in [
        (lambda: make(folder, keep_last=0), ValueError, f"keep_last {at_least} 1, got 0"),
        (lambda: make(folder, keep_last=1.5), ValueError, f"keep_last {at_least} 1, got 1.5"),
        (lambda: make(folder, keep_best=0), ValueError, f"keep_best {at_least} 1, got 0"),
        (lambda: make(folder, mode="best"), ValueError, 'mode "min" or "max", got \'best\''),
        (lambda: make(3), TypeError, r"folder must be the path of a folder of .*, got 3\.$"),
        (lambda: make(__file__), NotADirectoryError, r"must be .*, but '.*\.py' is a file\.$"),
        (lambda: checkpoints.save(state(), state()), ValueError, f"step {at_least} 0, got "),
        (lambda: checkpoints.save(-1, state()), ValueError, f"step {at_least} 0, got "),
        (lambda: make(saved), ValueError, f"{saved} is itself a checkpoint: pass {folder}."),
        (lambda: make(tmp_path / "file/run").save(1, state()), NotADirectoryError, "file/run"),
    ]:
        with pytest.raises(error, match=message):
            call()
