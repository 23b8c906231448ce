"""What holds is what `open(path, "wb")` does, but that the file is replaced as a whole."""

import os
import stat
import threading

import pytest

from eqxlike._pytree._serialise import open_to_replace


@pytest.fixture
def path(tmp_path):
    return tmp_path / "file"


def write(path, data=b"new"):
    with open_to_replace(path) as file:
        file.write(data)


def permissions(path):
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize("old", [None, b"old and longer"], ids=["new", "existing"])
def test_the_content_is_what_was_written_and_the_old_one_stays_until_the_end(path, old):
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
def test_an_exception_leaves_everything_as_it_was(path, old):
    for name in old:
        (path.parent / name).write_bytes(b"old")

    def write_and_raise():
        with open_to_replace(path) as file:
            file.write(b"new")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_and_raise()
    assert os.listdir(path.parent) == old
    assert not old or path.read_bytes() == b"old"


@pytest.mark.parametrize("function", ["fsync", "replace"])
def test_a_failure_at_the_end_leaves_everything_as_it_was(path, function, monkeypatch):
    def fail(*args):
        raise OSError("no space")

    path.write_bytes(b"old")
    monkeypatch.setattr(os, function, fail)
    with pytest.raises(OSError, match="no space"):
        write(path)
    assert path.read_bytes() == b"old"
    assert os.listdir(path.parent) == [path.name]


def test_the_content_is_on_the_disk_before_it_gets_the_name(path, monkeypatch):
    events = []
    fsync, replace = os.fsync, os.replace

    def recorded_fsync(descriptor):
        events.append(("fsync", os.fstat(descriptor).st_size))
        fsync(descriptor)

    def recorded_replace(source, target):
        events.append(("replace", os.stat(source).st_size))
        replace(source, target)

    monkeypatch.setattr(os, "fsync", recorded_fsync)
    monkeypatch.setattr(os, "replace", recorded_replace)
    write(path)
    assert events == [("fsync", 3), ("replace", 3)]


def test_a_new_file_gets_the_permissions_of_the_process_and_an_existing_one_keeps_its_own(path):
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
def test_a_symbolic_link_is_followed(path, target):
    (path.parent / "other").write_bytes(b"old")
    path.symlink_to(target)
    write(path)
    assert path.is_symlink()
    assert (path.parent / target).read_bytes() == b"new"


def test_a_pipe_is_written_straight(path):
    os.mkfifo(path)
    received = []
    reader = threading.Thread(target=lambda: received.append(path.read_bytes()), daemon=True)
    reader.start()
    write(path)
    reader.join()
    assert received == [b"new"]
    assert stat.S_ISFIFO(path.stat().st_mode)


def test_what_cannot_be_written_is_an_error_that_names_it(path):
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


def test_a_file_that_may_not_be_written_is_an_error(path, monkeypatch):
    path.write_bytes(b"old")
    path.chmod(0o444)
    # Root may write any file: what it may is asked for, and answered as for anybody else.
    monkeypatch.setattr(os, "access", lambda *args: False)
    opened = []

    def refuse(name, *args):
        opened.append(name)
        raise PermissionError(name)

    monkeypatch.setattr("builtins.open", refuse)
    with pytest.raises(PermissionError):
        write(path)
    assert opened == [path]


def test_the_name_may_be_relative_and_as_long_as_the_file_system_allows(path, monkeypatch):
    name = "é" * 127
    monkeypatch.chdir(path.parent)
    write(type(path)(name))
    assert os.listdir(path.parent) == [name]
