"""`batches_from`: a resumable iterator over batches from data loaders of other libraries."""

import base64
import contextlib
import json
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.tree_util as jtu
import numpy as np

from .. import is_array, tree_pformat
from .._check_numbers import whole_number
from .._traceback import stacklevel_of_user
from ..extend import listed, paths_without_numbers
from ._checks import as_arrays, check_callable

Source = Iterable[Any] | Callable[[], Iterable[Any]]


class LoadedBatches(Iterator[Any]):
    """An iterator over batches that are converted to arrays; made by `batches_from`. The iterator
    has a `position`.

    The iterator is not thread-safe: several threads need a lock around `next`.
    """

    def __init__(
        self,
        source: Source,
        epochs: int | None,
        columns: tuple[str, ...] | None,
        convert: Callable[[Any], Any] | None,
    ) -> None:
        self._source: Any = source
        self._epochs, self._columns, self._convert = epochs, columns, convert
        # `_opened` is the iterable of the current epoch, or `None` between epochs. `_iterator` is
        # its iterator.
        self._opened: Any = None
        self._iterator: Any = iter(())
        # The state of the source's random generator at the start of the epoch.
        self._seed: str | None = None
        self._epoch = self._index = self._num_drawn = 0

    @property
    def position(self) -> dict[str, Any]:
        """The position of the next batch, as JSON values.

        - `epoch`: number of finished epochs.
        - `index`: number of batches taken in the current epoch.
        - `num_drawn`: total number of batches taken.
        - `state`: the state of the source as JSON text; `None` if the source has no state, or if
          JSON cannot represent it.
        - `seed`: the state that the generator of a torch `DataLoader` had at the start of the
          epoch, as JSON text; `None` if the source has no generator.
        """
        return {
            "epoch": self._epoch,
            "index": self._index,
            "num_drawn": self._num_drawn,
            "state": _saved_state(self._opened, self._iterator) if self._index else None,
            "seed": self._seed if self._index else None,
        }

    def seek(self, position: Mapping[str, Any]) -> None:
        """Goes to a `position`. Restores the state of the source if possible, otherwise skips
        batches.

        Skipped batches are not converted.

        **Raises:** `ValueError` if `position` is not a position, if the source is an iterator that
        has already passed the position, or if the source ends before the position.
        """
        own = self.position
        if not isinstance(position, Mapping) or position.keys() != own.keys():
            raise ValueError(
                "seek expected a position of batches_from, with "
                f"{', '.join(own)}; got {position!r}."
            )
        target, state = position["num_drawn"], position["state"]
        if state is not None:
            self._epoch = position["epoch"]
            if self._begin_epoch(json.loads(state, object_hook=_decoded)):
                self._index, self._num_drawn = position["index"], target
                return
        if state is None and position["seed"] is not None and not self._is_one_pass:
            self._epoch = position["epoch"]
            self._begin_epoch(seed=position["seed"])
            self._index, self._num_drawn = 0, target - position["index"]
        elif not self._is_one_pass and (target < self._num_drawn or state is not None):
            self._opened, self._epoch, self._index, self._num_drawn = None, 0, 0, 0
        if target and state is None and _shuffles_unseeded(self._source):
            warnings.warn(
                "batches_from cannot repeat the batches of the first run: this "
                f"{type(self._source).__name__} shuffles without a seed. Pass it "
                "`generator=torch.Generator().manual_seed(0)`.",
                stacklevel=stacklevel_of_user(),
            )
        if target < self._num_drawn:
            raise ValueError(
                f"The position is after {target} batches, but {self._num_drawn} were already taken "
                f"from this {type(self._source).__name__}, which cannot go back: pass a function "
                "that returns a new one."
            )
        while self._num_drawn < target:
            try:
                self._draw()
            except StopIteration:
                raise ValueError(
                    f"The position is after {target} batches, but the source ended after "
                    f"{self._num_drawn}."
                ) from None

    def __next__(self) -> Any:
        batch = self._draw()
        if self._columns is not None:
            batch = _with_columns(batch, self._columns)
        if self._convert is not None:
            batch = self._convert(batch)
        return _checked(as_arrays(batch, "batches_from"))

    # --- taking batches from the source ---

    def _draw(self) -> Any:
        """Takes the next batch from the source, without conversion."""
        if self._opened is None:
            if self._epoch == self._epochs:
                raise StopIteration
            self._begin_epoch()
        while True:
            try:
                batch = next(self._iterator)
                break
            except StopIteration:
                if not self._index:
                    raise ValueError(
                        f"batches_from found no batches in epoch {self._epoch}. An iterator can be "
                        "used only once: pass the loader behind it, or a function that returns it."
                    ) from None
                self._epoch, self._index = self._epoch + 1, 0
                if self._is_one_pass or self._epoch == self._epochs:
                    self._opened, self._epochs = None, self._epoch
                    raise
                self._begin_epoch()
        self._index += 1
        self._num_drawn += 1
        return batch

    def _begin_epoch(self, state: Any = None, seed: str | None = None) -> bool:
        """Starts to iterate over the source.

        `state` and `seed` are the states to give to the source and to its generator.

        **Returns:** True if the source or its iterator restored `state`.
        """
        self._opened = self._source() if callable(self._source) else self._source
        # Samplers and datasets with `set_epoch` need the number of the epoch for shuffling.
        for owner in (self._opened, getattr(self._opened, "sampler", None)):
            if callable(set_epoch := getattr(owner, "set_epoch", None)):
                set_epoch(self._epoch)
        generator: Any = getattr(self._opened, "generator", None)
        if hasattr(generator, "set_state"):
            # This is a torch `DataLoader` with a random generator of its own.
            if seed is not None:
                generator.set_state(_decoded(json.loads(seed)))
            self._seed = json.dumps(generator.get_state(), default=_encoded)
        is_of_source = state is not None and _load_state(self._opened, state)
        self._iterator = iter(self._opened)
        return is_of_source or (state is not None and _load_state(self._iterator, state))

    @property
    def _is_one_pass(self) -> bool:
        return isinstance(self._source, Iterator)


# --- The state of a source, as JSON text ---


_STATES = (("state_dict", "load_state_dict"), ("get_state", "set_state"), ("position", "seek"))


def _state_names(owner: Any) -> tuple[str, str] | None:
    """The names of the methods that get and set the state of `owner`; `None` if it has no state."""
    return next((pair for pair in _STATES if all(hasattr(owner, name) for name in pair)), None)


def _load_state(owner: Any, state: Any) -> bool:
    names = _state_names(owner)
    if names is not None:
        getattr(owner, names[1])(state)
    return names is not None


def _saved_state(*owners: Any) -> str | None:
    """The state of the first owner that has a state, as JSON text.

    Returns `None` if no owner has a state, or if JSON cannot represent it.
    """
    for owner in owners:
        if (names := _state_names(owner)) is not None:
            state = getattr(owner, names[0])
            with contextlib.suppress(TypeError):
                return json.dumps(state() if callable(state) else state, default=_encoded)
            break
    return None


def _shuffles_unseeded(source: Any) -> bool:
    """Returns True for a torch `DataLoader` that shuffles with torch's global random generator."""
    sampler = getattr(source, "sampler", None)
    is_random = type(sampler).__name__ in ("RandomSampler", "WeightedRandomSampler")
    return is_random and getattr(sampler, "generator", None) is None


def _encoded(leaf: Any) -> Any:
    """Encodes bytes, arrays and NumPy scalars for JSON. Raises `TypeError` for other objects."""
    if isinstance(leaf, bytes):
        return {"__bytes__": base64.b64encode(leaf).decode()}
    if isinstance(leaf, np.generic):
        return leaf.item()
    library = type(leaf).__module__.partition(".")[0]
    if isinstance(leaf, np.ndarray) or (library == "torch" and hasattr(leaf, "numpy")):
        array = np.asarray(leaf)
        return {"__array__": array.tolist(), "dtype": str(array.dtype), "library": library}
    raise TypeError(f"JSON cannot represent {type(leaf).__name__}.")


def _decoded(node: dict[str, Any]) -> Any:
    if "__bytes__" in node:
        return base64.b64decode(node["__bytes__"])
    if "__array__" not in node:
        return node
    array = np.asarray(node["__array__"], node["dtype"])
    # The library is in `sys.modules`, because the source has already imported it.
    return sys.modules["torch"].from_numpy(array) if node["library"] == "torch" else array


# --- The public function, and checks of batches ---


def batches_from(
    source: Source,
    *,
    epochs: int | None = None,
    columns: Sequence[str] | None = None,
    convert: Callable[[Any], Any] | None = None,
) -> LoadedBatches:
    """Adapts the data loader of another library to `fit`, so that runs can be resumed.

    The source may be any iterable of batches, or a generator function. Examples are a
    `torch.utils.data.DataLoader`, a `torchdata.stateful_dataloader.StatefulDataLoader`, a
    `grain.DataLoader`, a `grain.IterDataset` and `tf.data.Dataset.as_numpy_iterator`. A
    `datasets.Dataset` or `datasets.IterableDataset` of Hugging Face needs a call of its method
    `batch(32)` first.

    A resumed run gets the same batches as an uninterrupted run. How `batches_from` achieves this
    depends on the source:

    - If the source or its iterator has methods that get and set its state, `batches_from` saves and
      restores the state with them. The methods may be `state_dict` and `load_state_dict`
      (StatefulDataLoader, Hugging Face), `get_state` and `set_state` (Grain), or `position` and
      `seek`. StatefulDataLoader (torchdata 0.11) restores the order of later epochs only if it has
      no `generator` of its own. A `grain.DataLoader` needs a data source with a constant
      `__repr__`.
    - For a torch `DataLoader` with a `generator`, the state of the generator is restored. Then the
      batches of the current epoch before the position are skipped.
    - Any other source is read from its start, and all batches before the position are skipped. The
      source must return the same batches each time.

    **Arguments:**

    - `source`: an iterable of batches, or a function without arguments that returns such an
      iterable. Each epoch iterates over the iterable again, or calls the function again. If the
      source or its `sampler` has a method `set_epoch`, this method is called before each epoch. An
      iterator has only one epoch.
    - `epochs`: number of epochs; `None` for no limit.
    - `columns`: keys to keep if batches are dicts. Other columns, such as texts, are dropped.
    - `convert`: a function that takes and returns a batch, for example to convert a dict to a
      tuple. It is applied after `columns` and before the conversion to arrays.

    **Returns:** an iterator of batches whose leaves are arrays. Tensors, lists of numbers and
    numbers become NumPy arrays. The iterator has an attribute `position` and a method
    `seek(position)`, which goes to a position.

    **Raises:** `TypeError` if `source` cannot be iterated over. `ValueError` if `epochs` is not a
    positive integer, or is above 1 for an iterator. `next` raises `TypeError` if a batch lacks a
    column, or if a leaf cannot become an array of numbers. `ValueError` if an epoch has no batches.

    >>> from eqxlike import train
    >>> def load():
    ...     for start in (0, 2):
    ...         yield {"x": [start, start + 1], "text": ["a", "b"]}
    >>> [batch["x"].tolist() for batch in train.batches_from(load, epochs=2, columns=["x"])]
    [[0, 1], [2, 3], [0, 1], [2, 3]]
    """
    is_data = isinstance(source, Mapping | jax.Array | np.ndarray)
    if is_data or not (callable(source) or hasattr(source, "__iter__")):
        hint = " Make batches of arrays with `train.minibatches`." if is_data else ""
        raise TypeError(
            "batches_from expected an iterable of batches, or a function that returns one; got "
            f"{tree_pformat(source)}.{hint}"
        )
    if epochs is not None:
        epochs = whole_number(epochs, "epochs")
        if epochs > 1 and isinstance(source, Iterator):
            raise ValueError(
                f"epochs={epochs}, but a {type(source).__name__} can be used only once: pass the "
                "loader behind it, or a function that returns it."
            )
    if isinstance(columns, str):
        raise TypeError(f"columns must be a sequence of names, got the string {columns!r}.")
    if convert is not None:
        check_callable(convert, "convert(batch)", "batches_from")
    return LoadedBatches(source, epochs, None if columns is None else tuple(columns), convert)


def _with_columns(batch: Any, columns: tuple[str, ...]) -> dict[str, Any]:
    """Selects columns. Raises `TypeError` if the batch is not a mapping, or lacks a column."""
    if not isinstance(batch, Mapping):
        raise TypeError(
            f"batches_from(columns=...) expected batches that are dicts; got {tree_pformat(batch)}."
        )
    if missing := [name for name in columns if name not in batch]:
        raise TypeError(
            f"batches_from expected a batch with {', '.join(map(repr, missing))}; it has "
            f"{', '.join(map(repr, batch))}."
        )
    return {name: batch[name] for name in columns}


def _checked(batch: Any) -> Any:
    """Converts numbers to arrays. Raises `TypeError` if a leaf is neither a number nor an array."""

    def as_array(leaf: Any) -> Any:
        return np.asarray(leaf) if isinstance(leaf, bool | int | float | complex) else leaf

    batch = jtu.tree_map(as_array, batch)
    paths = [
        f"batch{jtu.keystr(path)}, a {type(leaf).__name__}"
        for path, leaf in jtu.tree_leaves_with_path(batch)
        if not is_array(leaf)
    ] or paths_without_numbers(batch, "batch")
    if paths:
        raise TypeError(
            f"batches_from expected batches of numbers; got {listed(paths)}. Select other columns "
            "with `columns=`, or convert them to numbers with `convert=`."
        )
    return batch
