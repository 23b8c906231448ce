"""Shuffled minibatches of data in memory, and batches that a thread makes ahead of time."""

import contextvars
import copy
import functools
import queue
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Generic, Never, TypeVar

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np

from .. import is_array
from .._check_numbers import whole_number
from ..extend import listed, paths_without_numbers
from ._as_arrays import as_arrays
from ._sharding import Sharding, place_batch

Arrays = TypeVar("Arrays")
Batch = TypeVar("Batch")


class Minibatches(Generic[Arrays]):
    """Shuffled minibatches without end, an iterator that can be placed; `minibatches` makes it.

    Several threads need a lock of their own around `next`.
    """

    def __init__(self, leaves: list[np.ndarray], treedef: Any, batch_size: int, seed: int) -> None:
        self._leaves, self._treedef = leaves, treedef
        self._batch_size, self._seed = batch_size, seed
        self._generator = np.random.default_rng(seed)
        self._begin_epoch(0)

    def _begin_epoch(self, epoch: int) -> None:
        self._epoch, self._index = epoch, 0
        # What the permutation is drawn with: an epoch begins again from it.
        self._generator_then = copy.deepcopy(self._generator.bit_generator.state)
        self._order = self._generator.permutation(len(self._leaves[0]))

    @property
    def position(self) -> dict[str, Any]:
        """Where the next batch begins, as numbers and texts that JSON can hold.

        - `epoch`, `index`: how many epochs were finished, and how many batches of this one.
        - `seed`, `batch_size`, `num_examples`: of the stream, by which `seek` knows its own.
        - `generator`: the state of NumPy's generator where this epoch began.
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
        """Goes to a `position`: the batches from there on are those that came then.

        **Raises:** `ValueError` for a position of a stream with another seed, batch size or number
        of examples, or for what is not a position.
        """
        own = self.position
        if not isinstance(position, Mapping) or position.keys() != own.keys():
            raise ValueError(
                f"seek expected a position of minibatches, with {', '.join(own)}; got {position!r}."
            )
        for name in ("seed", "batch_size", "num_examples"):
            if position[name] != own[name]:
                raise ValueError(
                    f"The position is one of minibatches with {name} {position[name]!r}, and these "
                    f"have {own[name]!r}: they would go on with other batches."
                )
        per_epoch = len(self._leaves[0]) // self._batch_size
        epoch = whole_number(position["epoch"], "epoch", least=0)
        index = whole_number(position["index"], "index", least=0)
        if index > per_epoch:
            raise ValueError(
                f"index must be at most {per_epoch}, the batches of an epoch: {index}."
            )
        before = self._generator.bit_generator.state
        try:
            self._generator.bit_generator.state = copy.deepcopy(position["generator"])
        except (TypeError, ValueError, KeyError) as error:
            self._generator.bit_generator.state = before
            raise ValueError("The position has no state of NumPy's generator.") from error
        self._begin_epoch(epoch)
        self._index = index

    def __iter__(self) -> "Minibatches[Arrays]":
        return self

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
    """Shuffled minibatches without end.

    Every epoch is a fresh permutation of the examples. All batches have the same shape, so that a
    step is traced once: the last N mod B examples of a permutation are left out of that epoch.

    **Arguments:**

    - `arrays`: a pytree of arrays of numbers with the same leading length N, such as `(x, y)`.
      Lists of numbers and tensors of other libraries become arrays.
    - `batch_size`: B.
    - `more`: nothing. Several arrays are one argument, a tuple.
    - `seed`: the same seed gives the same batches.
    - `check_finite`: refuse data with NaN or infinite values.

    **Returns:** an iterator of pytrees like `arrays` with leading length B. Its `position` says
    where it is, and `seek(position)` goes there.

    **Raises:** `ValueError`, at once and not at the first batch, if lengths differ, if `batch_size`
    is not an integer in 1 to N or `seed` none of at least 0, or if the data is not finite;
    `TypeError` for several arrays that are not in a tuple, and for arrays of strings or objects.

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
            "minibatches expected all arrays in one argument, and got them one by one: write "
            "`minibatches((x, y), batch_size, seed=0)`."
        )
    # A list of lists may be one array, or inputs and targets.
    tree: Any = arrays if type(arrays) is list else as_arrays(arrays, "minibatches")
    paths_and_leaves, treedef = jtu.tree_flatten_with_path(tree)
    named = [(jtu.keystr(path) or "arrays", np.asarray(leaf)) for path, leaf in paths_and_leaves]
    _check_numbers(named)
    length = _check_lengths(named)
    if not length:
        raise ValueError("minibatches expects arrays with examples, and these have a length of 0.")
    batch_size = whole_number(batch_size, "batch_size")
    seed = whole_number(seed, "seed", least=0)
    if batch_size > length:
        raise ValueError(
            f"batch_size must be at most {length}, the number of examples, got {batch_size}."
        )
    if check_finite:
        _check_finite(named)
    return Minibatches([array for _, array in named], treedef, batch_size, seed)


def _check_numbers(named: list[tuple[str, np.ndarray]]) -> None:
    paths = [path for name, array in named for path in paths_without_numbers(array, name)]
    if paths:
        raise TypeError(
            f"minibatches expected arrays of numbers; got {listed(paths)}. Give each text or class "
            "a number, as `np.unique(labels, return_inverse=True)` does; rows of several lengths "
            "are padded to one."
        )


def _check_lengths(named: list[tuple[str, np.ndarray]]) -> int:
    if not named:
        raise ValueError("minibatches expects at least one array, got none.")
    for name, array in named:
        if array.ndim == 0:
            raise ValueError(
                f"minibatches expects arrays with a leading axis of examples; {name} has shape ()."
            )
    if len({len(array) for _, array in named}) != 1:
        listed = ", ".join(f"{name} {len(array)}" for name, array in named)
        raise ValueError(f"minibatches expects arrays of one length, got {listed}.")
    return len(named[0][1])


def _check_finite(named: list[tuple[str, np.ndarray]]) -> None:
    for name, array in named:
        # NumPy does not count bfloat16 and its like among the inexact ones.
        if jnp.issubdtype(array.dtype, jnp.inexact):
            is_bad = ~np.isfinite(array)
            if is_bad.any():
                first = tuple(int(index) for index in np.argwhere(is_bad)[0])
                raise ValueError(
                    f"The data holds {int(is_bad.sum())} NaN or infinite values in {name}, the "
                    f"first at index {first}. Clean it, or pass `check_finite=False` to train on "
                    "it as it is."
                )


# --- Repeated batches ---


def repeat(batches: Iterable[Batch] | Callable[[], Iterable[Batch]]) -> Iterator[Batch]:
    """Iterates over batches again and again, without end.

    For three epochs pass `num_steps=3 * len(loader)` to `fit`.

    **Arguments:**

    - `batches`: an iterable that starts again each time, such as a list or a `DataLoader` of
      PyTorch; or a function that returns an iterator. Batches of
      `minibatches` never end, and are returned unchanged.

    **Raises:** `TypeError` for an iterator, which can be used only once. When iterated,
    `ValueError` if there are no batches.

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
                raise ValueError("repeat expected at least one batch, and found none.")

    return epochs()


# --- Prefetching: batches are made ahead of time, and placed if that is asked for ---


class _Ahead:
    """What the thread and the iterator share.

    - `ready`: pairs of a batch and the position of its stream after it. At last comes the exception
      with which the stream ended, a `StopIteration` where it ended by itself.
    - `room`: counts how many more batches may be made.
    """

    def __init__(self, source: Iterator[Any], size: int, sharding: Any) -> None:
        self.source, self.sharding = source, sharding
        self.ready: queue.SimpleQueue[tuple[Any, Any] | BaseException] = queue.SimpleQueue()
        self.room = threading.Semaphore(size)
        self.thread: threading.Thread | None = None
        self.is_stopped = False

    def start(self) -> None:
        """Leaves the source to a thread."""
        # The source sees the context of whoever asks for batches, as it would without a thread.
        context = contextvars.copy_context()
        x64: Any = jax.config.jax_enable_x64  # pyright: ignore[reportAttributeAccessIssue]
        self.thread = threading.Thread(
            target=context.run, args=(_fill, self, x64), name="eqxlike-prefetch", daemon=True
        )
        self.thread.start()

    def make(self) -> Any:
        """The next batch, in memory that the source does not write to again."""
        batch = _moved(as_arrays(next(self.source), "prefetch"), _copied)
        if not _moves(self.sharding):
            return batch
        if isinstance(self.sharding, Sharding):
            return place_batch(batch, self.sharding)
        put = functools.partial(jax.device_put, device=self.sharding)
        # One call for all takes two thirds of the time of one for each.
        return _moved(batch, put, (np.ndarray, jax.Array))


class Prefetch(Generic[Batch]):
    """An iterator whose batches a thread makes ahead of time; `prefetch` makes it.

    The thread ends with the stream, with `close`, at the end of a `with` block, and when nobody
    holds the iterator any more.
    """

    def __init__(self, batches: Iterable[Batch], size: int, sharding: Any) -> None:
        # With a thread, a short loop over batches that are ready takes three times as long.
        is_made = isinstance(batches, list | tuple | Minibatches)
        self._has_thread = _moves(sharding) or not is_made
        self._source: Any = iter(batches)
        self._size, self._sharding = size, sharding
        # Several threads may take batches.
        self._lock = threading.Lock()
        self._begin()

    def _begin(self) -> None:
        self._position, self._has_ended = getattr(self._source, "position", None), False
        # The thread must not hold the iterator, or nobody would ever let it go.
        self._ahead = _Ahead(self._source, self._size, self._sharding)
        # Also when the interpreter ends: JAX is gone soon after.
        self._end = weakref.finalize(self, _end, self._ahead)

    @property
    def position(self) -> Any:
        """The position of the stream after the batches that were taken, not those made ahead."""
        return self._position if self._has_thread else getattr(self._source, "position", None)

    def seek(self, position: Mapping[str, Any]) -> None:
        """Goes to a position of the stream. Batches that were made ahead are thrown away.

        **Raises:** `TypeError` if the stream has no `seek`; whatever its `seek` raises.
        """
        if not hasattr(self._source, "seek"):
            raise TypeError(
                f"{type(self._source).__name__} has no `seek` to go to a position with."
            )
        self.close()
        # A batch may still be under way, here or in the thread.
        with self._lock:
            if self._ahead.thread is not None:
                self._ahead.thread.join()
            try:
                self._source.seek(position)
            finally:
                self._begin()

    def close(self) -> None:
        """Ends the thread. What was made ahead is lost."""
        self._has_ended = True
        self._end()

    def __enter__(self) -> "Prefetch[Batch]":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __iter__(self) -> "Prefetch[Batch]":
        return self

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
    """Makes batches in a thread, while the last ones are in use, and moves them where you say.

    A list, a tuple and `minibatches(...)` have their batches ready: on a CPU, without a `sharding`,
    no thread makes them.

    **Arguments:**

    - `batches`: any iterable, for example a loader that reads files. From now on only this
      iterator, or its thread, may read it.
    - `size`: how many batches are ready at most.
    - `sharding`: where the thread moves arrays: a `train.Sharding`, which splits the examples over
      its devices, a device, or a `jax.sharding.Sharding`. `None` is JAX's default device; on a CPU,
      arrays then stay in NumPy.

    **Returns:** an iterator of the same batches. Arrays, lists of numbers and tensors of other
    libraries become `jax.Array`s, or NumPy arrays where they stay; other leaves are not changed. It
    has `position` and `seek` if `batches` has them.

    **Raises:** `ValueError` if `size` is not a positive integer. Where the next batch is asked for,
    what `batches` raised, with its traceback.

    >>> import numpy as np
    >>> with prefetch([{"x": np.ones(3), "name": "a"}, {"x": np.zeros(3), "name": "b"}]) as ahead:
    ...     [(batch["name"], float(batch["x"].sum())) for batch in ahead]
    [('a', 3.0), ('b', 0.0)]
    """
    return Prefetch(batches, whole_number(size, "size"), sharding)


def _moves(sharding: Any) -> bool:
    """Whether batches go to a device ahead of time: on a CPU, a step reads NumPy arrays as fast."""
    return sharding is not None or jax.default_backend() != "cpu"


def _fill(ahead: _Ahead, enable_x64: bool) -> None:
    """What the thread does."""
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


def _end(ahead: _Ahead) -> None:
    """Lets the thread end once it has made the batch under way, and whoever waits go on."""
    ahead.is_stopped = True
    ahead.room.release()
    ahead.ready.put(StopIteration())
    if ahead.thread is not None and ahead.thread is not threading.current_thread():
        # It may wait for a batch that never comes.
        ahead.thread.join(timeout=1.0)


def _moved(batch: Any, move: Callable[[list[Any]], Iterable[Any]], types: Any = np.ndarray) -> Any:
    """The batch where `move` of all its arrays of these types stands in their places."""
    leaves, treedef = jtu.tree_flatten(batch)
    places = [index for index, leaf in enumerate(leaves) if isinstance(leaf, types)]
    if not places:
        return batch
    for index, array in zip(places, move([leaves[index] for index in places]), strict=True):
        leaves[index] = array
    return treedef.unflatten(leaves)


def _copied(arrays: list[np.ndarray]) -> list[np.ndarray]:
    # Streams write one batch after another into the same arrays. A compiled call takes no note of
    # the order of bytes.
    return [array.astype(array.dtype.newbyteorder("=")) for array in arrays]
