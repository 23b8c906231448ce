"""Shuffled minibatches of arrays, repeated batches, and prefetching in a thread."""

import contextvars
import copy
import queue
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Never, TypeVar

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np

from .. import is_array
from .._check_numbers import whole_number
from ..extend import listed, paths_without_numbers
from ._checks import as_arrays
from ._sharding import Sharding, place_batch

Arrays = TypeVar("Arrays")
Batch = TypeVar("Batch")


class Minibatches(Iterator[Arrays]):
    """An endless iterator over shuffled minibatches; made by `minibatches`. The iterator has a
    `position`.

    The iterator is not thread-safe: several threads need a lock around `next`.
    """

    def __init__(self, leaves: list[np.ndarray], treedef: Any, batch_size: int, seed: int) -> None:
        self._leaves, self._treedef = leaves, treedef
        self._batch_size, self._seed = batch_size, seed
        self._generator = np.random.default_rng(seed)
        self._begin_epoch(0)

    def _begin_epoch(self, epoch: int) -> None:
        self._epoch, self._index = epoch, 0
        # Keep the state before the permutation is drawn, so that `seek` can draw it again.
        self._generator_then = copy.deepcopy(self._generator.bit_generator.state)
        self._order = self._generator.permutation(len(self._leaves[0]))

    @property
    def position(self) -> dict[str, Any]:
        """The position of the next batch, as JSON values.

        - `epoch`: number of finished epochs.
        - `index`: number of batches taken in the current epoch.
        - `seed`, `batch_size`, `num_examples`: the arguments of `minibatches`. `seek` checks that
          they are the same.
        - `generator`: the state of NumPy's generator at the start of the epoch.
        """
        return {
            "seed": self._seed,
            "batch_size": self._batch_size,
            "num_examples": len(self._leaves[0]),
            "epoch": self._epoch,
            "index": self._index,
            "generator": copy.deepcopy(self._generator_then),
        }

    def seek(self, position: Mapping[str, Any]) -> None:
        """Goes to a `position`. The iterator then returns the batches that followed this position.

        **Raises:** `ValueError` if the position is not a position of minibatches, or if it has
        another seed, batch size or number of examples than this iterator.
        """
        own = self.position
        if not isinstance(position, Mapping) or position.keys() != own.keys():
            raise ValueError(
                f"seek expected a position of minibatches, with {', '.join(own)}; got {position!r}."
            )
        for name in ("seed", "batch_size", "num_examples"):
            if position[name] != own[name]:
                raise ValueError(
                    f"The position is from minibatches with {name}={position[name]!r}, but these "
                    f"have {name}={own[name]!r}: the batches would differ."
                )
        per_epoch = len(self._leaves[0]) // self._batch_size
        epoch = whole_number(position["epoch"], "epoch", least=0)
        index = whole_number(position["index"], "index", least=0)
        if index > per_epoch:
            raise ValueError(
                f"index must be at most {per_epoch}, the number of batches of an epoch; got "
                f"{index}."
            )
        before = self._generator.bit_generator.state
        try:
            self._generator.bit_generator.state = copy.deepcopy(position["generator"])
        except (TypeError, ValueError, KeyError) as error:
            self._generator.bit_generator.state = before
            raise ValueError(
                "The position's `generator` is not a state of NumPy's generator."
            ) from error
        self._begin_epoch(epoch)
        self._index = index

    def __next__(self) -> Arrays:
        start = self._index * self._batch_size
        if start + self._batch_size > len(self._leaves[0]):
            self._begin_epoch(self._epoch + 1)
            start = 0
        chosen = self._order[start : start + self._batch_size]
        batch = self._treedef.unflatten([leaf[chosen] for leaf in self._leaves])
        self._index += 1
        return batch


def minibatches(
    arrays: Arrays, batch_size: int, *more: Never, seed: int, check_finite: bool = True
) -> Minibatches[Arrays]:
    """Iterates endlessly over shuffled minibatches of arrays.

    Each epoch is a new permutation of the N examples. All batches have the same shape, so that a
    step is traced only once. To achieve this, an epoch leaves out the last N mod B examples of its
    permutation, where B is the batch size.

    **Arguments:**

    - `arrays`: a pytree of arrays of numbers with the same leading length N, such as `(x, y)`.
      Lists of numbers and tensors of other libraries become arrays.
    - `batch_size`: number of examples in each batch, B.
    - `more`: must be empty. This parameter exists to give a clear error for `minibatches(x, y,
      ...)`.
    - `seed`: seed of the permutations. The same seed gives the same batches.
    - `check_finite`: raise an error if the data has NaN or infinite values.

    **Returns:** an iterator of pytrees like `arrays` with leading length B. It has an attribute
    `position` and a method `seek(position)`, which goes to a position.

    **Raises:** `ValueError` if the leading lengths of the arrays differ, if `batch_size` is not an
    integer from 1 to N, if `seed` is not an integer of at least 0, or if the data is not finite.
    `TypeError` if several arrays are not in one tuple, or if an array has strings or objects. The
    errors are raised by `minibatches` itself, before the first batch.

    >>> x, y = np.arange(10.0).reshape(5, 2), np.arange(5)
    >>> batches = minibatches((x, y), 3, seed=0)
    >>> batch_x, batch_y = next(batches)
    >>> batch_x.shape, batch_y.shape, bool((batch_x[:, 0] == 2 * batch_y).all())
    ((3, 2), (3,), True)

    >>> position = batches.position
    >>> _, second = next(batches)
    >>> batches.seek(position)
    >>> bool((next(batches)[1] == second).all())
    True
    """
    if more or (is_array(batch_size) and np.ndim(batch_size)):
        raise TypeError(
            "minibatches expected all arrays in one argument, got several arguments: write "
            "`minibatches((x, y), batch_size, seed=0)`."
        )
    # If `arrays` is a list, each entry becomes an array. `as_arrays` would convert a list of lists
    # to a single array.
    tree: Any = arrays if type(arrays) is list else as_arrays(arrays, "minibatches")
    paths_and_leaves, treedef = jtu.tree_flatten_with_path(tree)
    named = [(jtu.keystr(path) or "arrays", np.asarray(leaf)) for path, leaf in paths_and_leaves]
    if paths := [path for name, array in named for path in paths_without_numbers(array, name)]:
        raise TypeError(
            f"minibatches expected arrays of numbers; got {listed(paths)}. Convert strings to "
            "integers, for example with `np.unique(labels, return_inverse=True)`, and pad rows to "
            "one length."
        )
    lengths = {array.shape[:1] for _, array in named}
    if len(lengths) != 1 or lengths & {(), (0,)}:
        shapes = listed([f"{name} of shape {array.shape}" for name, array in named]) or "no array"
        raise ValueError(
            "minibatches expects arrays with a leading axis of examples, of one length, and at "
            f"least one example; got {shapes}."
        )
    length = len(named[0][1])
    batch_size = whole_number(batch_size, "batch_size")
    seed = whole_number(seed, "seed", least=0)
    if batch_size > length:
        raise ValueError(
            f"batch_size must be at most {length}, the number of examples, got {batch_size}."
        )
    if check_finite:
        _check_finite(named)
    return Minibatches([array for _, array in named], treedef, batch_size, seed)


def _check_finite(named: list[tuple[str, np.ndarray]]) -> None:
    for name, array in named:
        # `np.issubdtype` would not count bfloat16 and similar dtypes as inexact.
        if jnp.issubdtype(array.dtype, jnp.inexact):
            is_bad = ~np.isfinite(array)
            if is_bad.any():
                first = tuple(int(index) for index in np.argwhere(is_bad)[0])
                raise ValueError(
                    f"The data has {int(is_bad.sum())} NaN or infinite values in {name}, the first "
                    f"at index {first}. Remove them, or pass `check_finite=False` to train on them."
                )


# --- Repeated batches ---


def repeat(batches: Iterable[Batch] | Callable[[], Iterable[Batch]]) -> Iterator[Batch]:
    """Repeats batches endlessly.

    To train for three epochs of a `loader`, pass `num_steps=3 * len(loader)` to `fit`.

    **Arguments:**

    - `batches`: an iterable that can be iterated over many times, such as a list or a PyTorch
      `DataLoader`. It may also be a function that returns an iterator. The endless `minibatches`
      are returned unchanged.

    **Raises:** `TypeError` if `batches` is an iterator, because it can be used only once. `next`
    raises `ValueError` if there are no batches.

    >>> import itertools
    >>> list(itertools.islice(repeat(["a", "b"]), 5))
    ['a', 'b', 'a', 'b', 'a']
    """
    if isinstance(batches, Minibatches):
        return batches
    if isinstance(batches, Iterator):
        raise TypeError(
            f"repeat expected batches that can be iterated over many times, but a "
            f"{type(batches).__name__} can be used only once: pass the list or the loader behind "
            "it, or a function that returns a new iterator."
        )

    def epochs() -> Iterator[Batch]:
        while True:
            count = 0
            for count, batch in enumerate(batches() if callable(batches) else batches, 1):  # noqa: B007
                yield batch
            if not count:
                raise ValueError("repeat expected at least one batch, got none.")

    return epochs()


# --- Prefetching ---


class _PrefetchState:
    """The state that the thread and the iterator share.

    - `ready`: pairs of a batch and the position of the source after that batch. The last entry is
      the exception that ended the source, or `StopIteration` if it ended normally.
    - `room`: semaphore that counts the batches that the thread may still make.
    """

    def __init__(self, source: Iterator[Any], size: int, sharding: Any) -> None:
        self.source, self.sharding = source, sharding
        self.ready: queue.SimpleQueue[tuple[Any, Any] | BaseException] = queue.SimpleQueue()
        self.room = threading.Semaphore(size)
        self.thread: threading.Thread | None = None
        self.is_stopped = False

    def start(self) -> None:
        """Starts the thread. Only the thread reads the source from now on."""
        # Run the source with the caller's context variables, as it would run without a thread.
        context = contextvars.copy_context()
        x64: Any = jax.config.jax_enable_x64  # pyright: ignore[reportAttributeAccessIssue]
        self.thread = threading.Thread(
            target=context.run, args=(_fill, self, x64), name="eqxlike-prefetch", daemon=True
        )
        self.thread.start()

    def make(self) -> Any:
        """Makes the next batch. The batch is a copy, because the source may write to the same
        arrays again.
        """
        batch = jtu.tree_map(_copied, as_arrays(next(self.source), "prefetch"))
        if not _moves(self.sharding):
            return batch
        if isinstance(self.sharding, Sharding):
            return place_batch(batch, self.sharding)
        # Do not use `partition`, because a node of a user's class may refuse `None` in place of an
        # array.
        leaves, treedef = jtu.tree_flatten(batch)
        arrays = {
            at: leaf for at, leaf in enumerate(leaves) if isinstance(leaf, np.ndarray | jax.Array)
        }
        # One `device_put` of all arrays takes two thirds of the time of one call for each array.
        moved = jax.device_put(arrays, self.sharding)
        return treedef.unflatten([moved.get(at, leaf) for at, leaf in enumerate(leaves)])


class Prefetch(Iterator[Batch]):
    """An iterator whose batches are prepared in a thread; made by `prefetch`.

    The thread ends when the batches end, at `close`, at the end of a `with` block, or when the
    iterator is garbage-collected.
    """

    def __init__(self, batches: Iterable[Batch], size: int, sharding: Any) -> None:
        # Batches in memory need no thread. A thread would make a short loop three times as slow.
        is_made = isinstance(batches, list | tuple | Minibatches)
        self._has_thread = _moves(sharding) or not is_made
        self._source: Any = iter(batches)
        self._size, self._sharding = size, sharding
        # The lock allows several threads to take batches.
        self._lock = threading.Lock()
        self._begin()

    def _begin(self) -> None:
        self._position, self._has_ended = getattr(self._source, "position", None), False
        # The thread references only this object and not the iterator. Otherwise the iterator would
        # never be garbage-collected.
        self._ahead = _PrefetchState(self._source, self._size, self._sharding)
        # `_end` also runs when the interpreter exits, before JAX shuts down.
        self._end = weakref.finalize(self, _end, self._ahead)

    @property
    def position(self) -> Any:
        """The position of the source after the last batch that `next` returned."""
        return self._position if self._has_thread else getattr(self._source, "position", None)

    def seek(self, position: Mapping[str, Any]) -> None:
        """Goes to a position of the source, and drops prefetched batches.

        **Raises:** `TypeError` if the source has no `seek`. Any exception that the source's `seek`
        raises.
        """
        if not hasattr(self._source, "seek"):
            raise TypeError(
                f"{type(self._source).__name__} has no `seek`, so prefetch cannot go to a position."
            )
        self.close()
        # Wait, because another call of `next`, or the thread, may still be reading a batch.
        with self._lock:
            if self._ahead.thread is not None:
                self._ahead.thread.join()
            try:
                self._source.seek(position)
            finally:
                self._begin()

    def close(self) -> None:
        """Ends the thread, and drops prefetched batches."""
        self._has_ended = True
        self._end()

    def __enter__(self) -> "Prefetch[Batch]":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __next__(self) -> Batch:
        with self._lock:
            if self._has_ended:
                raise StopIteration
            if not self._has_thread:
                return as_arrays(next(self._source), "prefetch")
            ahead = self._ahead
            if ahead.thread is None:
                ahead.start()
            made = ahead.ready.get()
            if isinstance(made, BaseException):
                self._has_ended = True
                raise made
            ahead.room.release()
            batch, self._position = made
            return batch


def prefetch(batches: Iterable[Batch], size: int = 2, *, sharding: Any = None) -> Prefetch[Batch]:
    """Prepares batches in a background thread and moves them to devices.

    On a CPU without a `sharding`, no thread is used for lists, tuples and `minibatches(...)`,
    because their batches are already in memory.

    **Arguments:**

    - `batches`: any iterable, for example a loader that reads files. After the call of `prefetch`,
      only the prefetching iterator may read `batches`.
    - `size`: maximum number of prepared batches.
    - `sharding`: where to move arrays. This may be a device, a `jax.sharding.Sharding`, or a
      `train.Sharding`, which splits the examples over its devices. `None` means JAX's default
      device. If the default device is a CPU, arrays stay NumPy arrays.

    **Returns:** an iterator of the same batches. Arrays, lists of numbers and tensors of other
    libraries become `jax.Array`s, or NumPy arrays if they are not moved. Other leaves are
    unchanged. The iterator has `position` and `seek` if `batches` has them.

    **Raises:** `ValueError` if `size` is not a positive integer. `next` raises exceptions of
    `batches` with their traceback.

    >>> import numpy as np
    >>> with prefetch([{"x": np.ones(3), "name": "a"}, {"x": np.zeros(3), "name": "b"}]) as ahead:
    ...     [(batch["name"], float(batch["x"].sum())) for batch in ahead]
    [('a', 3.0), ('b', 0.0)]
    """
    return Prefetch(batches, whole_number(size, "size"), sharding)


def _moves(sharding: Any) -> bool:
    """Returns True if the thread moves batches to a device.

    Without a sharding, a step on a CPU reads NumPy arrays as fast as JAX arrays, so batches are not
    moved.
    """
    return sharding is not None or jax.default_backend() != "cpu"


def _fill(ahead: _PrefetchState, enable_x64: bool) -> None:
    """Makes batches until the source ends or the iterator is closed. This runs in the thread."""
    try:
        with jax.enable_x64(enable_x64):
            while True:
                ahead.room.acquire()
                if ahead.is_stopped:
                    return
                batch = ahead.make()
                ahead.ready.put((batch, getattr(ahead.source, "position", None)))
    except StopIteration:
        ahead.ready.put(StopIteration())
    except BaseException as error:
        ahead.ready.put(error)


def _end(ahead: _PrefetchState) -> None:
    """Ends the thread after its current batch, and wakes a waiting `next`."""
    ahead.is_stopped = True
    ahead.room.release()
    ahead.ready.put(StopIteration())
    if ahead.thread is not None and ahead.thread is not threading.current_thread():
        # Wait only for a limited time, because the source may never return another batch.
        ahead.thread.join(timeout=1.0)


def _copied(leaf: Any) -> Any:
    # Copy, because loaders reuse arrays. Convert to native byte order, because a compiled call
    # ignores the byte order.
    return leaf.astype(leaf.dtype.newbyteorder("=")) if isinstance(leaf, np.ndarray) else leaf
