"""`open_to_replace` behaves like `open(path, "wb")`, but replaces the file as a whole."""

import os
import stat
import threading
from unittest import mock

import pytest

from eqxlike._pytree._serialise import open_to_replace


@pytest.fixture
def path(tmp_path):
    return tmp_path / "file"


def write(path, then=lambda: None):
    with open_to_replace(path) as file:
        file.write(b"new")
        then()


def permissions(path):
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize("old", [None, b"old and longer"], ids=["new", "existing"])
def test_old_content_stays_until_the_new_content_is_complete(path, old):
    if old is not None:
        path.write_bytes(old)
    with open_to_replace(path) as file:
        file.write(b"new")
        file.flush()
        assert old is None or path.read_bytes() == old
        assert path.exists() is (old is not None)
    assert path.read_bytes() == b"new"
    assert os.listdir(path.parent) == [path.name]


@pytest.mark.parametrize("old", [[], ["file"]], ids=["new", "existing"])
@pytest.mark.parametrize("place", ["write", "fsync", "replace"])
def test_failure_leaves_everything_unchanged(path, old, place, monkeypatch):
    def fail(*args):
        raise KeyboardInterrupt

    for name in old:
        (path.parent / name).write_bytes(b"old")
    then = {"write": fail}.get(place, lambda: monkeypatch.setattr(os, place, fail))
    with pytest.raises(KeyboardInterrupt):
        write(path, then)
    assert os.listdir(path.parent) == old
    assert not old or path.read_bytes() == b"old"


def test_content_is_synced_before_the_file_is_renamed(path, monkeypatch):
    events = []

    def record(name):
        function = getattr(os, name)

        def recorded(file, *args):
            events.append((name, os.stat(file).st_size))
            function(file, *args)

        monkeypatch.setattr(os, name, recorded)

    record("fsync")
    record("replace")
    write(path)
    assert events == [("fsync", 3), ("replace", 3)]


def test_new_file_gets_default_permissions_and_existing_file_keeps_its_own(path):
    for mask in (0o022, 0o077):
        path.unlink(missing_ok=True)
        before = os.umask(mask)
        try:
            write(path)
        finally:
            os.umask(before)
        assert permissions(path) == 0o666 & ~mask
    path.chmod(0o640)
    write(path)
    assert permissions(path) == 0o640


@pytest.mark.parametrize("target", ["other", "missing"])
def test_symbolic_link_is_followed(path, target):
    (path.parent / "other").write_bytes(b"old")
    path.symlink_to(target)
    write(path)
    assert path.is_symlink()
    assert (path.parent / target).read_bytes() == b"new"


def test_pipe_is_written_directly(path):
    os.mkfifo(path)
    received = []
    reader = threading.Thread(target=lambda: received.append(path.read_bytes()), daemon=True)
    reader.start()
    write(path)
    reader.join()
    assert received == [b"new"]
    assert stat.S_ISFIFO(path.stat().st_mode)


def test_error_names_the_path_that_cannot_be_written(path):
    with pytest.raises(FileNotFoundError) as caught:
        write(path / "below")
    assert caught.value.filename == str(path / "below")
    path.symlink_to(path.name)
    with pytest.raises(OSError, match="symbolic links"):
        write(path)
    path.unlink()
    path.mkdir()
    with pytest.raises(IsADirectoryError, match="file"):
        write(path)


def test_read_only_file_is_an_error(path, monkeypatch):
    path.write_bytes(b"old")
    path.chmod(0o444)
    # Root may write any file, so the check of permissions is replaced.
    monkeypatch.setattr(os, "access", lambda *args: False)
    opened = mock.Mock(side_effect=PermissionError)
    monkeypatch.setattr("builtins.open", opened)
    with pytest.raises(PermissionError):
        write(path)
    opened.assert_called_once_with(path, "wb")


def test_name_may_be_relative_and_as_long_as_the_file_system_allows(path, monkeypatch):
    name = "é" * 127
    monkeypatch.chdir(path.parent)
    write(type(path)(name))
    assert os.listdir(path.parent) == [name]
