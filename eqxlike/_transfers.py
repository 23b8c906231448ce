"""What may move between host and devices: everything, what is asked for, or nothing that leaves."""

import contextlib
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any, Literal, get_args

import jax

from ._traceback import is_of_user

Mode = Literal["transparent", "explicit", "exclusive"]

_GUARDS = {"transparent": "allow", "explicit": "disallow", "exclusive": "disallow"}


class _OfThread(threading.local):
    device: Any = None
    """The one that nothing may leave; `None` outside of an exclusive context."""


class _OfProcess:
    """How many exclusive contexts are open, in all threads, and whom to tell that one opens."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.num_exclusive = 0
        self.listeners: list[Callable[[], None]] = []


_thread = _OfThread()
_process = _OfProcess()


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

    **Raises:** `ValueError` for another mode, `TypeError` for what is no device. Within the
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
    with contextlib.ExitStack() as stack:
        stack.enter_context(_noting_lines())
        stack.enter_context(jax.transfer_guard(_GUARDS[mode]))
        if mode == "exclusive":
            stack.enter_context(_kept_on(device))
        else:
            stack.enter_context(_device_of_thread(None))
        yield


def exclusive_device() -> Any:
    """The device that this thread's programs may not leave; `None` if they may."""
    return _thread.device


def is_any_exclusive() -> bool:
    """Whether an exclusive context is open in any thread: calls must be looked at."""
    return _process.num_exclusive > 0


def when_exclusive(listener: Callable[[], None]) -> None:
    """Registers `listener`, called with no arguments each time an exclusive context is opened."""
    _process.listeners.append(listener)


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
    with default, _device_of_thread(device or _default_device()):
        with _process.lock:
            _process.num_exclusive += 1
        for listener in _process.listeners:
            listener()
        try:
            yield
        finally:
            with _process.lock:
                _process.num_exclusive -= 1


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
