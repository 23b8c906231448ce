"""Saves where files may not grow beyond so many bytes, as on a disk that is full.

The limit holds for all files of a process, its own output too: the tests start one of its own.
`python full_disk.py FOLDER` ends with status 0 if all is as it should be.
"""

import errno
import os
import pathlib
import resource
import sys

import numpy as np
import pytest

from eqxlike import train


def check(folder: pathlib.Path, size: int, length: int, background: bool) -> None:
    """Saves an array of such a length where files have such a size at most."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with train.CheckpointFolder(folder, keep_last=1) as checkpoints:
        checkpoints.save(1, {"w": np.full(4, 1)})
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
        with pytest.raises(OSError, match=f"{folder}/step_000000002") as caught:
            checkpoints.save(2, {"w": np.zeros(length)}, background=background).wait()
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert caught.value.errno == errno.EFBIG
        assert sorted(os.listdir(folder)) == [".lock", "step_000000001"]
        restored = checkpoints.restore_newest({"w": np.full(4, 0)})
        assert restored is not None
        assert restored.state["w"][0] == 1


if __name__ == "__main__":
    # The first file that does not fit is one of the arrays', then the manifest.
    for size, length in [(64, 10), (600, 1000), (600, 10)]:
        for background in (False, True):
            check(
                pathlib.Path(sys.argv[1]) / f"{size}-{length}-{background}",
                size,
                length,
                background,
            )
