"""No damaged checkpoint is restored: each is told from a whole one, with what is damaged."""

import hashlib
import json
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
    return shutil.copytree(saved, tmp_path / "checkpoint")


def files_of(path):
    return sorted(each for each in path.rglob("*") if each.is_file())


def places(path, step):
    """Files, and offsets in them."""
    return [
        (file.relative_to(path), offset)
        for file in files_of(path)
        for offset in range(0, file.stat().st_size, step if file.stat().st_size > 100 else 1)
    ]


def assert_refused_or_same(path):
    """A flipped bit in the manifest's white space changes nothing."""
    try:
        restored = train.restore(path, STATE)
    except train.CheckpointError:
        return True
    except ValueError as error:
        raise AssertionError("damage was taken for another structure") from error
    assert restored.data == {"epoch": 3}
    assert all(map(np.array_equal, jax.tree.leaves(restored.state), jax.tree.leaves(STATE)))
    return False


def test_flipped_bit_anywhere_is_told(path):
    refused = dict.fromkeys([file.relative_to(path) for file in files_of(path)], 0)
    tried = dict(refused)
    for file, offset in places(path, 61):
        whole = (path / file).read_bytes()
        for bit in (1, 4, 128):
            damaged = bytearray(whole)
            damaged[offset] ^= bit
            (path / file).write_bytes(damaged)
            tried[file] += 1
            refused[file] += assert_refused_or_same(path)
        (path / file).write_bytes(whole)
    arrays = [file for file in tried if file.name != "manifest.json"]
    assert len(arrays) > 5
    assert [refused[file] for file in arrays] == [tried[file] for file in arrays]
    assert not assert_refused_or_same(path)


def test_file_that_is_cut_off_anywhere_is_told(path):
    for file, offset in places(path, 61):
        whole = (path / file).read_bytes()
        (path / file).write_bytes(whole[:offset])
        assert assert_refused_or_same(path)
        (path / file).write_bytes(whole)


def test_file_that_is_longer_is_told(path):
    for file in files_of(path):
        whole = file.read_bytes()
        file.write_bytes(whole + b"x")
        assert assert_refused_or_same(path)
        file.write_bytes(whole)


def test_missing_file_is_told(path):
    for file in files_of(path):
        whole = file.read_bytes()
        file.unlink()
        assert assert_refused_or_same(path)
        file.write_bytes(whole)


def value_file(path, name):
    (file,) = path.glob(f"arrays-*/*.{name}/0*")
    return file


def test_flipped_bit_is_named_with_leaf_and_file(path):
    file = value_file(path, "w")
    file.write_bytes(b"\1" + file.read_bytes()[1:])
    with pytest.raises(
        train.CheckpointError,
        match=rf"{path} is damaged: {file}, with the values of state\['w'\], was changed after it "
        "was written; its checksum differs",
    ):
        train.restore(path, STATE)


def test_file_that_is_cut_off_is_named_with_its_sizes(path):
    file = value_file(path, "w")
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(
        train.CheckpointError,
        match=r"state\['w'\], is cut off. It should have 24 bytes, and has 23",
    ):
        train.restore(path, STATE)


def test_missing_file_is_named(path):
    file = value_file(path, "w")
    file.unlink()
    with pytest.raises(train.CheckpointError, match=rf"{file}, .*state\['w'\], is missing"):
        train.restore(path, STATE)


def rewrite(path, change):
    """Changes the manifest, and makes its checksum that of the changed one."""
    file = path / "manifest.json"
    document = json.loads(file.read_text())
    change(document)
    text = json.dumps([document["version"], document["content"]], sort_keys=True)
    document["checksum"] = hashlib.sha256(text.encode()).hexdigest()
    file.write_text(json.dumps(document))


def leaf(document, path):
    return next(
        each for each in document["content"]["leaves"] if each["leaf"]["path"] == f"['{path}']"
    )


def test_manifest_that_promises_more_bytes_than_the_files_hold_is_told(path):
    def change(document):
        leaf(document, "w")["leaf"]["shape"] = [10**12, 3]

    rewrite(path, change)
    like = STATE | {"w": jax.ShapeDtypeStruct((10**12, 3), np.float32)}
    with pytest.raises(
        train.CheckpointError,
        match=r"promises 12000000000000 bytes of state\['w'\], and its files hold 24",
    ):
        train.restore(path, like)


def test_files_that_promise_more_than_the_manifest_are_told(path):
    (file,) = path.glob("arrays-*/*.w/.zarray")
    file.write_text(file.read_text().replace('"shape":[2,3]', '"shape":[200000000000,3]'))

    def change(document):
        name = str(file.relative_to(next(path.glob("arrays-*"))))
        checksum = hashlib.sha256(file.read_bytes()).hexdigest()
        document["content"]["files"][name] = {
            "size": file.stat().st_size,
            "checksum": checksum,
        }

    rewrite(path, change)
    with pytest.raises(train.CheckpointError, match=r"files hold \(\(200000000000, 3\), 'float32'"):
        train.restore(path, STATE)


def test_values_are_compared_with_what_was_in_memory(path):
    rewrite(path, lambda document: leaf(document, "w").update(checksum="0" * 64))
    with pytest.raises(train.CheckpointError, match=r"values of state\['w'\] are not those that"):
        train.restore(path, STATE)


def test_swapped_arrays_are_told(path, tmp_path):
    one, other = value_file(path, "b"), tmp_path / "other"
    shutil.copy(value_file(path, "w"), other)
    shutil.copy(one, value_file(path, "w"))
    shutil.copy(other, one)
    assert assert_refused_or_same(path)


@pytest.mark.parametrize(
    "name", ["../../outside", "/etc/passwd", "..", "/", "", "a/../../../outside"]
)
@pytest.mark.parametrize("where", ["folder", "file", "leaf"])
def test_nothing_outside_the_checkpoint_is_read(path, where, name):
    def change(document):
        content = document["content"]
        if where == "folder":
            content["arrays_folder"] = name
        elif where == "file":
            content["files"][name] = content["files"].popitem()[1]
        else:
            leaf(document, "w")["name"] = name

    rewrite(path, change)
    with pytest.raises(train.CheckpointError, match="is damaged, or no manifest of a checkpoint"):
        train.restore(path, STATE)


def test_newer_version_is_said_and_no_damage(path):
    rewrite(path, lambda document: document.update(version=2, content={"new": 1}))
    with pytest.raises(ValueError, match="newer version of eqxlike, in format 2;") as caught:
        train.restore(path, STATE)
    assert not isinstance(caught.value, train.CheckpointError)


def test_flipped_bit_is_not_taken_for_a_newer_version(path):
    file = path / "manifest.json"
    file.write_text(file.read_text().replace('"version": 1', '"version": 3'))
    with pytest.raises(train.CheckpointError, match="its checksum is not that of what it says"):
        train.restore(path, STATE)


NO_MANIFESTS = [
    b"",
    b"{}",
    b"[]",
    b"null",
    b"1",
    b'"text"',
    b"\xff\xfe\x00",
    b"[" * 100_000,
    b'{"a":' * 100_000,
    b'{"format": "eqxlike.train checkpoint", "version": 1}',
    b'{"format": "eqxlike.train checkpoint", "version": "1", "checksum": "", "content": {}}',
    b'{"format": "eqxlike.train checkpoint", "version": true, "checksum": "", "content": {}}',
    b'{"format": "other", "version": 1, "checksum": "", "content": {}}',
]


@pytest.mark.parametrize("text", NO_MANIFESTS, ids=range(len(NO_MANIFESTS)))
def test_what_is_no_manifest_is_told(path, text):
    (path / "manifest.json").write_bytes(text)
    with pytest.raises(train.CheckpointError, match=re.escape(str(path / "manifest.json"))):
        train.restore(path, STATE)


CONTENTS = [
    {},
    [],
    None,
    {"leaves": [], "files": {}, "nodes": []},
    {"leaves": {"a": 1}, "files": {}, "nodes": []},
]


@pytest.mark.parametrize("content", CONTENTS, ids=range(len(CONTENTS)))
def test_sound_manifest_of_something_else_is_told(path, content):
    rewrite(path, lambda document: document.update(content=content))
    with pytest.raises(train.CheckpointError, match="no manifest of a checkpoint"):
        train.restore(path, STATE)


CHANGES = {
    "negative size": lambda content: content["files"].update({"a": {"size": -1, "checksum": ""}}),
    "size no number": lambda content: content["files"].update({"a": {"size": "", "checksum": ""}}),
    "field more": lambda content: content.update(pickle="gASVAAAA"),
    "field less": lambda content: content.pop("data"),
    "shape": lambda content: content["leaves"][1]["leaf"].update(shape=[-1]),
    "score": lambda content: content.update(score="best"),
    "array without a name": lambda content: content["leaves"][1].update(name=None),
    "name of no array": lambda content: content["leaves"][2].update(name="00002.rate"),
    "one name for two": lambda content: content["leaves"][1].update(
        name=content["leaves"][0]["name"]
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_manifest_with_another_content_is_told(path, name):
    rewrite(path, lambda document: CHANGES[name](document["content"]))
    with pytest.raises(train.CheckpointError, match="no manifest of a checkpoint"):
        train.restore(path, STATE)


def test_folder_without_manifest_is_told(tmp_path):
    with pytest.raises(train.CheckpointError, match=r"it has no manifest\.json"):
        train.restore(tmp_path, STATE)


def test_folder_of_checkpoints_is_told_with_the_newest_whole_one_in_it(tmp_path):
    for step in (1, 2):
        train.save(tmp_path / f"step_00000000{step}", STATE)
    (tmp_path / "step_000000002/manifest.json").write_text("")
    newest = re.escape(str(tmp_path / "step_000000001"))
    with pytest.raises(train.CheckpointError, match=rf"newest whole one here is {newest}\."):
        train.restore(tmp_path, STATE)


def test_file_is_no_checkpoint(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(train.CheckpointError, match="is no checkpoint"):
        train.restore(tmp_path / "file", STATE)


def test_damaged_checkpoint_can_be_replaced(path):
    (path / "manifest.json").unlink()
    train.save(path, STATE, {"epoch": 3})
    assert not assert_refused_or_same(path)


def test_checkpoint_with_a_damaged_manifest_can_be_replaced(path):
    (path / "manifest.json").write_text("")
    train.save(path, STATE, {"epoch": 3})
    assert not assert_refused_or_same(path)
    assert len(list(path.iterdir())) == 2
