"""Files that are replaced as a whole: readers find the old content or the new, never a part."""

import contextlib
import os
import pathlib
import secrets
import stat
from collections.abc import Iterator
from typing import BinaryIO


@contextlib.contextmanager
def open_to_replace(path: pathlib.Path) -> Iterator[BinaryIO]:
    """Opens a file whose content replaces that of `path` once the `with` block is left.

    Until then, and for good if the block raises or the process is killed, `path` stays as it was.
    Otherwise this is `open(path, "wb")`: symbolic links are followed, an existing file keeps its
    permissions, a new one gets those of the process, and what is no regular file (a pipe, a
    device) is written straight.

    **Arguments:**

    - `path`: the file. Its directory must be writable.

    **Raises:** `OSError` as `open` does.
    """
    target = pathlib.Path(os.path.realpath(path))
    try:
        mode = target.stat().st_mode
    except FileNotFoundError:
        mode = None
    if mode is not None and (not stat.S_ISREG(mode) or not os.access(target, os.W_OK)):
        # A directory and a file that may not be written raise here.
        with open(path, "wb") as file:
            yield file
        return
    # The name may not grow longer than file systems allow.
    temporary = target.with_name(f".{target.name[:50]}.{secrets.token_hex(8)}.tmp")
    file = _create(temporary, named=path)
    try:
        with file:
            if mode is not None:
                os.chmod(temporary, stat.S_IMODE(mode))
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _create(temporary: pathlib.Path, named: pathlib.Path) -> BinaryIO:
    try:
        return open(temporary, "xb")
    except OSError as error:
        # The error names the file that the user knows; Python finds its subclass by the number.
        reason = f"{error.strerror} (for a temporary file beside it)"
        raise OSError(error.errno, reason, str(named)) from None
