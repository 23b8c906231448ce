"""No damaged checkpoint is restored: each is told from a whole one, with what is damaged."""

import collections
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


def test_damage_of_any_file_is_told(path):
    kinds = collections.Counter()
    for file in files_of(path):
        whole = file.read_bytes()
        for offset in range(0, len(whole), 61 if len(whole) > 100 else 1):
            damaged = bytearray(whole)
            damaged[offset] ^= (1, 4, 128)[offset % 3]
            file.write_bytes(damaged)
            kinds[file.name == "manifest.json", assert_refused_or_same(path)] += 1
            file.write_bytes(whole[:offset])
            assert assert_refused_or_same(path)
        file.write_bytes(whole + b"x")
        assert assert_refused_or_same(path)
        file.unlink()
        assert assert_refused_or_same(path)
        file.write_bytes(whole)
    assert len(files_of(path)) > 6
    assert kinds[False, False] == 0
    assert kinds[False, True] > 30 < kinds[True, True]
    assert not assert_refused_or_same(path)


def value_file(path, name):
    (file,) = path.glob(f"arrays-*/*.{name}/0*")
    return file


def test_what_is_damaged_is_named_with_leaf_and_file(path):
    file = value_file(path, "w")
    whole = file.read_bytes()
    for damaged, message in [
        (
            b"\1" + whole[1:],
            rf"{path} is damaged: {file}, with the values of state\['w'\], was changed after it "
            "was written; its checksum differs",
        ),
        (whole[:-1], r"state\['w'\], is cut off. It should have 24 bytes, and has 23"),
        (whole + b"x", r"state\['w'\], is longer than it was. It should have 24 bytes, and has 25"),
    ]:
        file.write_bytes(damaged)
        with pytest.raises(train.CheckpointError, match=message):
            train.restore(path, STATE)
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


@pytest.mark.parametrize("where", ["folder", "file", "leaf"])
def test_nothing_outside_the_checkpoint_is_read(path, where):
    manifest = path / "manifest.json"
    whole = manifest.read_text()
    for name in ("../../outside", "/etc/passwd", "..", "/", "", "a/../../../outside"):

        def change(document, name=name):
            content = document["content"]
            if where == "folder":
                content["arrays_folder"] = name
            elif where == "file":
                content["files"][name] = content["files"].popitem()[1]
            else:
                leaf(document, "w")["name"] = name

        manifest.write_text(whole)
        rewrite(path, change)
        with pytest.raises(train.CheckpointError, match="is damaged, or no manifest of a check"):
            train.restore(path, STATE)


def test_newer_version_is_said_and_a_flipped_bit_is_not_taken_for_one(path):
    file = path / "manifest.json"
    whole = file.read_text()
    file.write_text(whole.replace('"version": 1', '"version": 3'))
    with pytest.raises(train.CheckpointError, match="its checksum is not that of what it says"):
        train.restore(path, STATE)
    file.write_text(whole)
    rewrite(path, lambda document: document.update(version=2, content={"new": 1}))
    with pytest.raises(ValueError, match="newer version of eqxlike, in format 2;") as caught:
        train.restore(path, STATE)
    assert not isinstance(caught.value, train.CheckpointError)


NO_MANIFESTS = [
    b"",
    b"{}",
    b"[]",
    b"\xff\xfe\x00",
    b"[" * 100_000,
    b'{"format": "eqxlike.train checkpoint", "version": 1}',
    b'{"format": "eqxlike.train checkpoint", "version": "1", "checksum": "", "content": {}}',
    b'{"format": "eqxlike.train checkpoint", "version": true, "checksum": "", "content": {}}',
    b'{"format": "other", "version": 1, "checksum": "", "content": {}}',
]


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


def test_what_is_no_manifest_is_told(path):
    manifest = path / "manifest.json"
    whole = manifest.read_text()
    for text in NO_MANIFESTS:
        manifest.write_bytes(text)
        with pytest.raises(train.CheckpointError, match=re.escape(str(manifest))):
            train.restore(path, STATE)
    of_others = [{}, [], None]
    of_others += [{"leaves": each, "files": {}, "nodes": []} for each in ([], {"a": 1})]
    changes = [lambda document, new=new: document.update(content=new) for new in of_others]
    changes += [
        lambda document, change=change: change(document["content"]) for change in CHANGES.values()
    ]
    for change in changes:
        manifest.write_text(whole)
        rewrite(path, change)
        with pytest.raises(train.CheckpointError, match="no manifest of a checkpoint"):
            train.restore(path, STATE)


def test_damaged_checkpoint_can_be_replaced(path):
    for spoil in (lambda file: file.unlink(), lambda file: file.write_text("")):
        spoil(path / "manifest.json")
        train.save(path, STATE, {"epoch": 3})
        assert not assert_refused_or_same(path)
        assert len(list(path.iterdir())) == 2


def test_what_is_no_checkpoint_is_told_with_the_newest_whole_one_in_it(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(train.CheckpointError, match="is not a checkpoint: that is a folder"):
        train.restore(tmp_path / "file", STATE)
    with pytest.raises(train.CheckpointError, match=r"it has no manifest\.json\.$"):
        train.restore(tmp_path, STATE)
    for step in (1, 2, 3):
        train.save(tmp_path / f"step_00000000{step}", STATE)
    (tmp_path / "step_000000003/manifest.json").write_text("")
    value_file(tmp_path / "step_000000002", "w").unlink()
    newest = re.escape(str(tmp_path / "step_000000001"))
    for folder in (tmp_path, tmp_path / "step_000000003"):
        with pytest.raises(train.CheckpointError, match=rf"newest whole one here is {newest}\."):
            train.restore(folder, STATE)
