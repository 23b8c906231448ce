"""Progress meters that compiled programs update during an iterative solve."""

import abc
import functools
import importlib
import itertools
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback
from jaxtyping import Array, Bool, Float, Int

from .. import Module
from .._names import import_extra
from ..loops import unvmap_max

State = TypeVar("State")


class AbstractProgressMeter(Module, Generic[State]):
    """Shows the progress of an iterative solve."""

    @abc.abstractmethod
    def init(self) -> State:
        """Opens the meter, and returns its initial state."""

    @abc.abstractmethod
    def step(self, state: State, progress: Float[Array, ""] | float) -> State:
        """Shows the progress. The solver calls it at each step.

        **Arguments:**

        - `state`: the state that `init` or the previous step returned.
        - `progress`: the fraction of the solve that is done, from 0 to 1.

        **Returns:** the next state.
        """

    @abc.abstractmethod
    def close(self, state: State) -> None:
        """Closes the meter. The solver calls it at the end, with the last state."""


class NoProgressMeter(AbstractProgressMeter[None]):
    """Shows nothing."""

    def init(self) -> None:
        return None

    def step(self, state: None, progress: Float[Array, ""] | float) -> None:
        return None

    def close(self, state: None) -> None:
        return None


class _TextState(Module):
    progress: Float[Array, ""]
    meter_idx: Int[Array, ""]


class TextProgressMeter(AbstractProgressMeter[_TextState]):
    """Prints lines such as `12.30%`.

    **Arguments:**

    - `minimum_increase`: a number from 0 to 1. The next line is printed when the progress has
      increased by this number.
    """

    minimum_increase: float | Array = 0.02

    def init(self) -> _TextState:
        return _TextState(jnp.asarray(0.0), _open(_print_text))

    def step(self, state: _TextState, progress: Float[Array, ""] | float) -> _TextState:
        progress = _minimum(jnp.asarray(progress, state.progress.dtype))
        is_due = progress - state.progress > self.minimum_increase
        number = _show_if(is_due, state.meter_idx, progress)
        return _TextState(jnp.where(is_due, progress, state.progress), number)

    def close(self, state: _TextState) -> None:
        _close(state.meter_idx)


def _print_text() -> Callable[[float], None]:
    last = ""

    def show(progress: float) -> None:
        nonlocal last
        text = f"{100 * progress:.2f}%"
        # The last step may already have printed `100.00%`.
        if text != last:
            print(text)
            last = text

    show(0.0)
    return show


class _TqdmState(Module):
    meter_idx: Int[Array, ""]
    step: Int[Array, ""]


class TqdmProgressMeter(AbstractProgressMeter[_TqdmState]):
    """Shows a tqdm progress bar.

    **Arguments:**

    - `refresh_steps`: number of steps between two updates of the bar.

    **Raises:** `ImportError` if tqdm is not installed.
    """

    refresh_steps: int = 20

    def __check_init__(self) -> None:
        import_extra(
            "tqdm", "TqdmProgressMeter needs tqdm: `pip install tqdm`, or use TextProgressMeter."
        )

    def init(self) -> _TqdmState:
        return _TqdmState(_open(_open_bar), jnp.asarray(0))

    def step(self, state: _TqdmState, progress: Float[Array, ""] | float) -> _TqdmState:
        is_due = unvmap_max(state.step) % self.refresh_steps == 0
        number = _show_if(is_due, state.meter_idx, _minimum(jnp.asarray(progress)))
        return _TqdmState(number, state.step + 1)

    def close(self, state: _TqdmState) -> None:
        _close(state.meter_idx)


def _open_bar() -> Callable[[float], None]:
    bar = importlib.import_module("tqdm").tqdm(
        total=100,
        unit="%",
        mininterval=0,
        bar_format="{percentage:.2f}%|{bar}| [{elapsed}<{remaining}, {rate_fmt}{postfix}]",
    )

    def show(progress: float) -> None:
        bar.update(100 * progress - bar.n)
        if progress >= 1:
            bar.close()

    return show


# --- Open meters have numbers, since a compiled program can only carry numbers ---


_open_meters: dict[int, Callable[[float], None]] = {}
_numbers = itertools.count(1)
_NUMBER = jax.ShapeDtypeStruct((), np.dtype(np.int32))


def _open(start: Callable[[], Callable[[float], None]]) -> Int[Array, ""]:
    """Opens a meter by calling `start` when the program runs. Returns the number of the meter."""

    def opened() -> np.ndarray:
        number = next(_numbers)
        _open_meters[number] = start()
        return np.asarray(number, np.int32)

    return io_callback(opened, _NUMBER)


def _show_if(
    is_due: Bool[Array, ""], number: Int[Array, ""], progress: Float[Array, ""]
) -> Int[Array, ""]:
    """Shows the progress if `is_due` is true.

    Returns `number` with a data dependency on the callback, so that later operations run after it.
    """

    def show(number: Any, progress: Any) -> np.ndarray:
        _open_meters[int(number)](float(progress))
        return np.asarray(number, np.int32)

    # The callback is pure, because `cond` inside `vmap` does not allow effects. JAX does not
    # eliminate the callback, because its output is used.
    call = functools.partial(jax.pure_callback, show, _NUMBER, vmap_method="sequential")
    return jax.lax.cond(is_due, call, lambda number, _: number, number, progress)


def _close(number: Int[Array, ""]) -> None:
    io_callback(lambda number: _open_meters.pop(int(number))(1.0), None, unvmap_max(number))


def _minimum(progress: Float[Array, ""]) -> Float[Array, ""]:
    """The smallest progress in a batch, without a derivative."""
    return -unvmap_max(-jax.lax.stop_gradient(progress))
