"""What a pytree consists of, as text tells it: what a checkpoint and a state are compared by."""

import dataclasses
import pathlib
from types import ModuleType
from typing import Any, Literal

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jaxtyping import PyTree

from ..._compat import Tracer
from ..._dtypes import is_key
from ..._pytree import children_with_keys, is_reference

Kind = Literal["array", "key", "static"]


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One leaf.

    - `path`: where it is, as in `.model.layers[0].weight`.
    - `kind`: an array of numbers, an array of typed PRNG keys, or something that is not stored.
    - `shape`, `dtype`: of the numbers, which of a key are its data.
    - `key`: the implementation of a PRNG key, as in `threefry2x32`.
    - `text`: a static leaf that text tells apart: a number, a string, a bool.
    """

    path: str
    kind: Kind
    shape: tuple[int, ...] | None = None
    dtype: str | None = None
    key: str | None = None
    text: str | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of the numbers in memory."""
        if self.shape is None:
            return 0
        size = 1
        for length in self.shape:
            size *= length
        return size * jnp.dtype(self.dtype).itemsize

    def describe(self) -> str:
        """As a message calls it."""
        if self.kind == "static":
            return self.text or "no array"
        if self.kind == "key":
            shape = (self.shape or ())[:-1]
            return f"a PRNG key of {self.key} and shape {shape}"
        return f"an array of shape {self.shape} and dtype {self.dtype}"


def describe_leaves(pytree: PyTree) -> tuple[list[tuple[Leaf, Any]], Any]:
    """Each leaf with its description, and the treedef.

    **Arguments:**

    - `pytree`: JAX and NumPy arrays, or `jax.ShapeDtypeStruct`s in their places, among others.

    **Raises:** `TypeError`, with the path, for what can be no part of a checkpoint.
    """
    paths_and_leaves, treedef = jtu.tree_flatten_with_path(pytree)
    return [
        (_describe_leaf(jtu.keystr(path), leaf), leaf) for path, leaf in paths_and_leaves
    ], treedef


def describe_nodes(pytree: PyTree) -> list[list[str]]:
    """Each node that is no leaf, from the root down: its path and its type, with those of its
    static fields that text tells apart.
    """
    found = []

    def visit(node: Any, path: tuple[Any, ...]) -> None:
        if jtu.all_leaves([node]):
            return
        found.append([jtu.keystr(path), _describe_node(node)])
        for key, child in children_with_keys(node):
            visit(child, (*path, key))

    visit(pytree, ())
    return found


def _describe_leaf(path: str, leaf: Any) -> Leaf:
    if isinstance(leaf, Tracer):
        raise TypeError(
            f"A checkpoint expected an array at state{path}, and got one that is being traced: "
            "save and restore outside of jit, grad and vmap."
        )
    if is_reference(leaf):
        raise TypeError(
            f"A checkpoint holds values, and state{path} is a jax.Ref: put its value `ref[...]` in "
            "its place."
        )
    if isinstance(leaf, np.ma.MaskedArray):
        raise TypeError(
            f"A checkpoint has no masks, and state{path} is a masked array: put its numbers, and "
            "`numpy.ma.getmaskarray(array)`, in its place."
        )
    if not isinstance(leaf, jax.Array | jax.ShapeDtypeStruct | np.ndarray | np.generic):
        return Leaf(path, "static", text=stable_text(leaf))
    if is_key(leaf):
        data, name = _key_data_of(leaf)
        return Leaf(path, "key", data.shape, str(data.dtype), name)
    dtype = np.dtype(leaf.dtype)
    if not _is_numeric(dtype):
        raise TypeError(
            f"A checkpoint holds numbers and bools alone, and state{path} is an array of dtype "
            f"{dtype}: store it apart, or pass it as `data` if it is JSON."
        )
    # Numbers are written in the machine's order of bytes.
    return Leaf(path, "array", tuple(leaf.shape), str(dtype.newbyteorder("=")))


def _key_data_of(key: Any) -> tuple[jax.ShapeDtypeStruct, str]:
    # A `jax.ShapeDtypeStruct` is not asked directly: the implementation is known of arrays alone.
    names = []

    def read(key: Any) -> Any:
        names.append(str(jax.random.key_impl(key)))
        return jax.random.key_data(key)

    data = jax.eval_shape(read, jax.ShapeDtypeStruct(key.shape, key.dtype))
    return data, names[0]


def _is_numeric(dtype: np.dtype) -> bool:
    if dtype.isbuiltin == 2:  # added to NumPy by another package
        return jnp.issubdtype(dtype, jnp.number)
    # The widest floats of NumPy differ between machines, and nobody else knows them.
    return dtype.kind in "biufc" and dtype.char not in "gG"


def stable_text(value: Any) -> str | None:
    """Text that is the same for the same value, today and next year; `None` if there is none."""
    # Numbers of NumPy, and enumerations, are numbers too, and say more in their `repr`.
    if value is None or type(value) in (bool, int, float, complex, str):
        return repr(value)
    if type(value) in (tuple, list):
        texts = [stable_text(each) for each in value]
        opening, closing = "()" if type(value) is tuple else "[]"
        return None if None in texts else f"{opening}{', '.join(map(str, texts))}{closing}"
    return None


def _describe_node(node: Any) -> str:
    name = type(node).__qualname__
    if not dataclasses.is_dataclass(node):
        return name
    statics = [
        (field.name, stable_text(getattr(node, field.name, None)))
        for field in dataclasses.fields(node)
        if field.metadata.get("static")
    ]
    texts = [f"{field}={text}" for field, text in statics if text is not None]
    return f"{name}({', '.join(texts)})" if texts else name


# --- Orbax, which writes and reads the arrays ---


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
