"""A damaged checkpoint is never restored. The error names the damaged file."""

import re
import shutil

import jax
import jax.random as jr
import numpy as np
import pytest

from eqxlike import train

STATE = {
    "w": np.arange(6, dtype=np.float32).reshape(2, 3),
    "k": jr.key_data(jr.key(3)),
    "b": np.array([True]),
    "rate": 0.1,
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("saved") / "checkpoint"
    train.save(path, STATE, {"epoch": 3})
    return path


@pytest.fixture
def path(saved, tmp_path):
    (step,) = shutil.copytree(saved, tmp_path / "checkpoint").iterdir()
    return step


def is_refused(path):
    """Whether the checkpoint is refused as damaged. If not, asserts that it is the saved state."""
    try:
        restored = train.restore(path, STATE)
    except train.CheckpointError:
        return True
    except ValueError as error:
        raise AssertionError("damage was taken for another structure") from error
    assert restored.data == {"epoch": 3}
    assert all(map(np.array_equal, jax.tree.leaves(restored.state), jax.tree.leaves(STATE)))
    return False


def test_damage_of_any_file_is_detected(path):
    files = sorted(each for name in ("arrays", "manifest") for each in (path / name).rglob("*"))
    num_flipped = 0
    for file in files:
        # Orbax's marker of a written item, which is not read.
        if file.is_dir() or file.name == "commit_success.txt":
            continue
        whole = file.read_bytes()
        for offset in range(0, len(whole), 61 if len(whole) > 100 else 1):
            damaged = bytearray(whole)
            damaged[offset] ^= (1, 4, 128)[offset % 3]
            file.write_bytes(damaged)
            assert is_refused(path)
            file.write_bytes(whole[:offset])
            assert is_refused(path)
            num_flipped += 1
        file.write_bytes(whole + b"x")
        assert is_refused(path)
        file.unlink()
        assert is_refused(path)
        file.write_bytes(whole)
    assert num_flipped > 60
    assert not is_refused(path)


def test_damage_of_the_metadata_of_orbax_is_detected_or_harmless(path):
    notes = [path / "_CHECKPOINT_METADATA", path / "metrics" / "metrics"]
    for file in notes:
        for content in (b"", b"{}", b"x"):
            file.write_bytes(content)
            assert not is_refused(path)
        file.unlink()
        assert not is_refused(path)
    folder = train.CheckpointFolder(path.parent)
    assert folder.best() is None
    notes[1].write_bytes(b"x")
    with pytest.raises(train.CheckpointError, match=r"metrics/metrics is damaged\."):
        folder.save(1, STATE)
    notes[1].unlink()
    with folder:
        folder.save(1, STATE, {"epoch": 3})
    assert not is_refused(path.with_name("step_000000001"))


def test_damaged_files_are_named_with_their_leaf(path):
    (file,) = path.glob("arrays/*.w/0*")
    whole = file.read_bytes()
    named = rf"{path} is damaged: {file}, with the values of state\['w'\],"
    for damaged, size in [(b"\1" + whole[1:], 24), (whole[:-1], 23), (whole + b"x", 25)]:
        file.write_bytes(damaged)
        message = f"{named} was changed: it had 24 bytes and now has {size}"
        with pytest.raises(train.CheckpointError, match=message):
            train.restore(path, STATE)
    file.unlink()
    with pytest.raises(train.CheckpointError, match=f"{named} is missing"):
        train.restore(path, STATE)


def test_a_damaged_or_missing_manifest_is_named(path, tmp_path):
    manifest = path / "manifest" / "manifest.json"
    for text in (b"", b"{}", b"\xff\xfe\x00", b"\n{}", b"0" * 64 + b"\n{}"):
        manifest.write_bytes(text)
        with pytest.raises(train.CheckpointError, match=re.escape(str(manifest))):
            train.restore(path, STATE)
    manifest.unlink()
    missing = rf"damaged or not a checkpoint: .*{manifest.name} is missing"
    for other in (path, tmp_path):
        with pytest.raises(train.CheckpointError, match=missing):
            train.restore(other, STATE)


def test_a_damaged_checkpoint_can_be_replaced(path):
    for step, spoil in enumerate((lambda file: file.unlink(), lambda file: file.write_text(""))):
        spoil(path.with_name(f"step_{step:09d}") / "manifest" / "manifest.json")
        assert is_refused(path.parent)
        train.save(path.parent, STATE, {"epoch": 3})
        assert not is_refused(path.parent)
        assert len(list(path.parent.iterdir())) == 1
