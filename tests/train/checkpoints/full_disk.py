"""Saves checkpoints while the size of files is limited, as on a full disk, and checks imports.

`python full_disk.py FOLDER` runs in a separate process, because the limit applies to all files of a
process. It exits with status 0 if all checks pass. At exit one save is in progress, and an earlier
save has failed, without a call of `wait`.
"""

import errno
import faulthandler
import pathlib
import resource
import sys
import threading
import time
from typing import Any

import numpy as np
import pytest

from eqxlike import train
from eqxlike.train import _orbax

IMPORTED = {"orbax", "tensorstore", "safetensors"} & set(sys.modules)


def check(folder: pathlib.Path, size: int, state: Any, background: bool) -> None:
    """Saves a state while files may have at most `size` bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with train.CheckpointFolder(folder, keep_last=1) as checkpoints:
        checkpoints.save(1, {"w": np.full(4, 1)})
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
        with pytest.raises(OSError, match=f"{folder}/step_000000002") as caught:
            checkpoints.save(2, state, background=background).wait()
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert caught.value.errno == errno.EFBIG
        # No thread writes after `wait`, even if the error came before the arrays were written.
        assert "async_save" not in {thread.name for thread in threading.enumerate()}
        assert [path.name for path in checkpoints.paths()] == ["step_000000001"]
        restored = checkpoints.restore_newest({"w": np.full(4, 0)})
        assert restored is not None
        assert restored.state["w"][0] == 1


def save_at_the_end(folder: pathlib.Path) -> None:
    """Starts a save that fails and a slow save, both in the background."""
    seal = _orbax.seal

    def slowly(manifest, arrays):
        if "failed" in str(arrays):
            raise OSError("the disk is on fire")
        time.sleep(0.5)
        seal(manifest, arrays)

    def save(name):
        train.save(folder / name, np.arange(3.0), background=True)

    _orbax.seal = slowly
    other = threading.Thread(target=save, args=["failed"])
    other.start()
    other.join()
    save("written")


if __name__ == "__main__":
    assert not IMPORTED
    # A process that hangs prints its stacks before the test kills it.
    faulthandler.dump_traceback_later(60, exit=True)
    # The first file that exceeds the limit is a metadata file of Orbax, an array, or the manifest.
    for size, state, background in [
        (64, {"w": np.zeros(10)}, False),
        (1500, {"w": np.zeros(1000)}, True),
        (1500, {"w": np.zeros(10), "name": "x" * 1500}, False),
    ]:
        check(pathlib.Path(sys.argv[1]) / f"{size}-{len(state)}", size, state, background)
    save_at_the_end(pathlib.Path(sys.argv[1]))
