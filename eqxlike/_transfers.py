"""What may move between host and devices: everything, what is asked for, or nothing that leaves."""

import contextlib
import threading
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, get_args

import jax
import jax.tree_util as jtu

from ._compat import Tracer
from ._programs import Departure, departures
from ._pytree import listed
from ._traceback import is_of_user

Mode = Literal["transparent", "explicit", "exclusive"]

_GUARDS = {"transparent": "allow", "explicit": "disallow", "exclusive": "disallow"}


class _OfThread(threading.local):
    device: Any = None
    """The one that nothing may leave; `None` outside of an exclusive context."""


_thread = _OfThread()

exclusive_devices: list[Any] = []
"""The devices of the exclusive contexts that are open in any thread: while there are some, calls
must be looked at.
"""

_lock = threading.Lock()
_listeners: list[Callable[[], None]] = []
"""Whom to tell that an exclusive context opens."""


class TransferError(RuntimeError):
    """A program would leave the device that an exclusive context is for."""


@contextlib.contextmanager
def transfers(mode: Mode, *, device: Any = None) -> Iterator[None]:
    """Says what may move between the host and the devices, as long as the context is open.

    - `"transparent"`: everything, as JAX does by itself.
    - `"explicit"`: what somebody asks for, by `jax.device_put` and `jax.device_get`. A hidden copy
      is an error that names file and line, and, from a filtered function, the paths of arguments:
      a NumPy array that is passed, a Python number beside an array outside of a compiled function,
      a value that is printed. It is JAX's own guard that looks; on a CPU, where the host reads what
      the device has written without a copy, it lets values be read.
    - `"exclusive"`: as explicit; and a function of `filter_jit` whose program would leave the
      device is refused before it runs: one that calls back to Python, as `filter_pure_callback`,
      `error_if` and `jax.debug.print` do, that puts arrays elsewhere, or is given arrays that lie
      elsewhere. Its calls take longer, since each is looked at. Functions of `jax.jit` are looked
      at where they are part of one of `filter_jit`.

    It holds for the thread that opens it. Contexts may be nested, and the innermost counts.

    **Arguments:**

    - `mode`: see above.
    - `device`: the one that nothing leaves, where new arrays are made too; JAX's default device if
      `None`. For `"exclusive"` alone.

    **Raises:** `ValueError` for another mode, `TypeError` for what is not a device. Within the
    context, what JAX's guard raises, with a note, and `TransferError` (both are `RuntimeError`s).

    !!! example

        >>> import eqxlike as eqx, jax, jax.numpy as jnp, numpy as np
        >>> @eqx.filter_jit
        ... def double(x):
        ...     return 2 * x
        >>> x = np.ones(3, np.float32)
        >>> with eqx.transfers("explicit"):
        ...     print(double(jax.device_put(x)))
        [2. 2. 2.]
        >>> with eqx.transfers("explicit"):
        ...     double(x)
        Traceback (most recent call last):
        ...
        jax.errors.JaxRuntimeError: INVALID_ARGUMENT: Disallowed host-to-device transfer: ...
    """
    if mode not in _GUARDS:
        known = ", ".join(map(repr, get_args(Mode)))
        raise ValueError(f"transfers expects one of {known}, got {mode!r}.")
    if device is not None and mode != "exclusive":
        raise ValueError(f"transfers takes a `device` with 'exclusive' alone, and not {mode!r}.")
    if device is not None and not isinstance(device, jax.Device):
        raise TypeError(
            f"transfers expects one device, as in `device=jax.devices()[0]`, got {device!r}."
        )
    kept = _kept_on(device) if mode == "exclusive" else _device_of_thread(None)
    with _noting_lines(), jax.transfer_guard(_GUARDS[mode]), kept:
        yield


def when_exclusive(listener: Callable[[], None]) -> None:
    """Registers `listener`, called with no arguments each time an exclusive context is opened."""
    _listeners.append(listener)


def refuse_call(what: str) -> None:
    """Raises `TransferError` where no operation may be traced, or run, that calls the host."""
    if _thread.device is not None:
        raise TransferError(
            f"{what} calls the host, and would leave {_thread.device} inside "
            "transfers('exclusive'). Leave it out, or call it outside of the context."
        )


@contextlib.contextmanager
def _kept_on(device: Any) -> Iterator[None]:
    default = jax.default_device(device) if device is not None else contextlib.nullcontext()
    device = device or _default_device()
    with default, _device_of_thread(device):
        with _lock:
            exclusive_devices.append(device)
        for listener in _listeners:
            listener()
        try:
            yield
        finally:
            with _lock:
                exclusive_devices.remove(device)


@contextlib.contextmanager
def _device_of_thread(device: Any) -> Iterator[None]:
    outer, _thread.device = _thread.device, device
    try:
        yield
    finally:
        _thread.device = outer


def _default_device() -> Any:
    chosen: Any = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]
    return chosen if isinstance(chosen, jax.Device) else jax.local_devices(backend=chosen)[0]


@contextlib.contextmanager
def _noting_lines() -> Iterator[None]:
    """Says in what JAX's guard raises where in the user's code that was."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        where = _line_of_user(error.__traceback__)
        # An outer context of ours has the same to say.
        if "Disallowed" in str(error) and where and not _has_note(error, where):
            error.add_note(
                f"{where} copies between host and device, which nobody asked for: use "
                "`jax.device_put` or `jax.device_get`, or do it outside of `eqxlike.transfers`."
            )
        raise


def _has_note(error: BaseException, start: str) -> bool:
    return any(note.startswith(start) for note in getattr(error, "__notes__", ()))


def _line_of_user(entry: types.TracebackType | None) -> str:
    """File and line of the innermost frame that is neither ours nor JAX's."""
    where = ""
    while entry is not None:
        file_name = entry.tb_frame.f_code.co_filename
        if is_of_user(file_name) and file_name != contextlib.__file__:
            where = f"{file_name}:{entry.tb_lineno}"
        entry = entry.tb_next
    return where


# --- Calls that would leave the device ---


# A loop calls the same program again and again.
_found: weakref.WeakKeyDictionary[Any, dict[Any, tuple[Departure, ...]]] = (
    weakref.WeakKeyDictionary()
)


def refuse_leaving(
    name: str, arguments: Sequence[tuple[str, Any]], trace: Callable[[], Any]
) -> None:
    """Raises `TransferError` if a call would leave the device of `transfers("exclusive")`.

    **Arguments:**

    - `name`: the function that is called.
    - `arguments`: their labels and values.
    - `trace`: gives the jaxpr of the call.
    """
    device = _thread.device
    if device is None:
        return
    within = f"inside transfers('exclusive'), which is for {device}"
    elsewhere = [
        f"{label}{jtu.keystr(path)} on {', '.join(map(str, leaf.devices()))}"
        for label, argument in arguments
        for path, leaf in jtu.tree_leaves_with_path(argument)
        if isinstance(leaf, jax.Array)
        and not isinstance(leaf, Tracer)
        and leaf.devices() != {device}
    ]
    if elsewhere:
        raise TransferError(
            f"{name} got {listed(elsewhere)} {within}: move it there with `jax.device_put` first."
        )
    jaxpr = trace()
    known = _found.setdefault(jaxpr, {})
    if device not in known:
        known[device] = tuple(departures(jaxpr, device))
    if known[device]:
        raise TransferError(
            f"{name} would leave the device {within}: it calls "
            f"{listed(list(map(str, known[device])))}. Take that out of the program, or call "
            f"{name} outside of the context."
        )
