"""Orbax, which writes and reads the arrays."""

import pathlib
from types import ModuleType
from typing import Any

import jax
import numpy as np


def orbax() -> ModuleType:
    """Orbax, imported on first use.

    **Raises:** `ImportError`, with what to install.
    """
    try:
        import orbax.checkpoint
    except ImportError as error:
        raise ImportError(
            "Checkpoints are written by Orbax: `pip install 'eqxlike[train]'`."
        ) from error
    return orbax.checkpoint


def write_arrays(folder: pathlib.Path, arrays: dict[str, Any]) -> None:
    """Writes each array into a folder of its own name; `folder` must exist.

    Where arrays span several processes, each of them calls this and writes its part.
    """
    handler = _handler()
    handler.save(_as_orbax_path(folder), args=orbax().args.PyTreeSave(arrays))
    handler.close()


def read_arrays(
    folder: pathlib.Path, shardings: dict[str, jax.sharding.Sharding | None]
) -> dict[str, Any]:
    """Reads arrays by their names, as JAX's where a sharding is given, as NumPy's otherwise."""
    ocp = orbax()
    restore_args = {
        name: ocp.RestoreArgs(restore_type=np.ndarray)
        if sharding is None
        else ocp.ArrayRestoreArgs(restore_type=jax.Array, sharding=sharding)
        for name, sharding in shardings.items()
    }
    args = ocp.args.PyTreeRestore(
        dict.fromkeys(shardings, 0), restore_args=restore_args, partial_restore=True
    )
    handler = _handler()
    found = handler.restore(_as_orbax_path(folder), args=args)
    handler.close()
    return found


def stored_shapes(folder: pathlib.Path) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shape and dtype of each array in the files, by name; nothing of them is read."""
    handler = _handler()
    metadata = handler.metadata(_as_orbax_path(folder)).tree
    handler.close()
    return {name: (tuple(each.shape), str(np.dtype(each.dtype))) for name, each in metadata.items()}


def _handler() -> Any:
    # An array is a folder, so that a damaged file tells which array it was; and its files are as
    # long as its bytes, since weights hardly shrink.
    return orbax().PyTreeCheckpointHandler(use_ocdbt=False, use_zarr3=False, use_compression=False)


def _as_orbax_path(path: pathlib.Path) -> Any:
    # Orbax comes with it, and takes no other paths for arrays of JAX.
    from etils import epath

    return epath.Path(path)
