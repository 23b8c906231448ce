"""`filter_jit`: `jax.jit` in which every array is traced and everything else is static."""

import functools
import inspect
import re
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Unpack, overload

import jax
import jax.tree_util as jtu
import numpy as np

from ..._missing import MISSING
from ..._module import METADATA, Traits, Wrapper, bind, field, shown_by, stored_fields
from ..._pytree import deleted_paths, is_array, is_reference, listed, paths_without_numbers
from ..._traceback import hide_our_frames, name_tracers
from .._checks import EqxlikeRuntimeError, claim_failure
from .._signatures import (
    AnyArguments,
    DonateNames,
    DonateWord,
    Function,
    JitOptions,
    Method,
    Output,
)
from ._arguments import ArgumentOrder
from ._callables import Options, dispatcher_for, unbind
from ._dispatch import MISS, Dispatcher, clear_dispatchers
from ._lowered import CompilingDecorator, Lowerable, Lowered
from ._traces import OnRetrace, Policy, Trace


@overload
def filter_jit(
    *,
    donate: DonateWord | DonateNames = "none",
    on_retrace: OnRetrace | None = None,
    max_traces: int | None = None,
    **jitkwargs: Unpack[JitOptions],
) -> CompilingDecorator: ...
@overload
def filter_jit(
    fun: AnyArguments[Output],
    *,
    donate: DonateWord | DonateNames = "none",
    on_retrace: OnRetrace | None = None,
    max_traces: int | None = None,
    **jitkwargs: Unpack[JitOptions],
) -> Lowerable[Callable[..., Output]]: ...
@overload
def filter_jit(
    fun: Method,
    *,
    donate: DonateWord | DonateNames = "none",
    on_retrace: OnRetrace | None = None,
    max_traces: int | None = None,
    **jitkwargs: Unpack[JitOptions],
) -> Method: ...
@overload
def filter_jit(
    fun: Function,
    *,
    donate: DonateWord | DonateNames = "none",
    on_retrace: OnRetrace | None = None,
    max_traces: int | None = None,
    **jitkwargs: Unpack[JitOptions],
) -> Lowerable[Function]: ...
def filter_jit(
    fun: Callable[..., Any] = MISSING,
    *,
    donate: DonateWord | Iterable[str] = "none",
    on_retrace: OnRetrace | None = None,
    max_traces: int | None = None,
    **jitkwargs: Any,
) -> Any:
    """Compiles a function of any arguments: arrays are traced, everything else is static.

    **Arguments:**

    - `fun`: any callable: a function, a method, a Module, a `functools.partial`. Arrays in what it
      is bound to are traced like those of its arguments. Without `fun`, a decorator is returned.
    - `donate`: the arguments whose buffers may be reused for the output: `"all"`,
      `"all-except-first"`, the same with a warning where a buffer could not be reused (`"warn"`,
      `"warn-except-first"`), `"none"`, or names of parameters as in `("model", "opt_state")`. JAX
      raises `JaxRuntimeError` if another argument has a buffer that is donated, such as the same
      array passed twice. JAX copies a buffer that NumPy or DLPack holds too, and reuses none.
    - `on_retrace`: what is done when the function is traced again, and so compiled again: `"warn"`
      warns, `"error"` raises, and a callable is called with an `eqxlike.debug.Trace`, whose `str`
      says what differs from the most similar trace before.
    - `max_traces`: the number of traces after which another is an error.
    - `**jitkwargs`: passed to `jax.jit`. Options that name static or donated arguments are refused.
      `in_shardings` has one for each argument, in the order of the signature however they are
      passed, or is a dictionary from names of parameters; each is a prefix of its argument.

    **Returns:** a callable with the signature of `fun`. It is asynchronous like `jax.jit`. It
    traces once for each structure of its arguments and each shape and dtype of their arrays,
    however a call orders them. Leaves of the output that are not arrays are those of the trace. It
    also has `.lower`, and `.traces`, the latest traces as a tuple of `eqxlike.debug.Trace`.

    **Raises:** `TypeError` if `fun` is not callable; `ValueError` for an unknown word or name in
    `donate`, `in_shardings`, `on_retrace` or `max_traces`; when called, `ValueError` if there are
    fewer `in_shardings` than arguments, `TypeError` naming the path of a static leaf that is not
    hashable, and `eqxlike.debug.RetraceError` for a trace that is refused.

    !!! example

        >>> import eqxlike as eqx, jax.numpy as jnp
        >>> @eqx.filter_jit
        ... def scale(x, how):
        ...     return 2 * x if how == "double" else x
        >>> print(scale(jnp.array(3.0), "double"))
        6.0
    """
    if fun is MISSING:
        return functools.partial(
            filter_jit, donate=donate, on_retrace=on_retrace, max_traces=max_traces, **jitkwargs
        )
    if not callable(fun):
        raise TypeError(f"{fun!r} is not a callable object: `filter_jit` expects a function.")
    for name, instead in _REFUSED.items():
        if name in jitkwargs:
            raise ValueError(f"`filter_jit` does not take `{name}`: {instead}.")
    for name in jitkwargs:
        if name not in _JIT_KEYWORDS:
            known = ", ".join(sorted(_JIT_KEYWORDS))
            raise TypeError(
                f"`filter_jit` got an unexpected keyword argument {name!r}; it takes `donate`, and "
                f"of `jax.jit`'s {known}."
            )
    donate = donate if isinstance(donate, str) else tuple(donate)
    if type(fun) is functools.partial:
        # `jtu.Partial` is the same, and a pytree: the arrays bound to it are leaves of the wrapper.
        fun = jtu.Partial(fun.func, *fun.args, **fun.keywords)
    policy = Policy.of(on_retrace, max_traces)
    wrapper = JitFunction(fun, donate, Options(jitkwargs, policy))
    _attach(wrapper)
    _show(stored_fields(wrapper))
    return wrapper


_REFUSED = {
    "static_argnums": "what is not an array is static already",
    "static_argnames": "what is not an array is static already",
    "donate_argnums": "use `donate`",
    "donate_argnames": "use `donate`",
    "abstracted_axes": "it is not supported",
}


_JIT_KEYWORDS = frozenset(inspect.signature(jax.jit).parameters) - {"fun", *_REFUSED}


def clear_caches() -> None:
    """Forgets everything that filtered functions have compiled; the next calls trace again.

    `jax.clear_caches` does the same for JAX's own caches.
    """
    clear_dispatchers()


# --- What `filter_jit` returns ---


def _show(fields: dict[str, Any]) -> None:
    """Puts the metadata of a wrapper's function beside the fields of the wrapper."""
    fields.update(shown_by(fields["_function"]))


class JitFunction(Wrapper, _traits=Traits(complete=_show, is_layer=False)):
    """A compiled function, as `filter_jit` returns it: a pytree with the arrays of the function."""

    __slots__ = ("_eqxlike_dispatch",)

    _function: Any
    _donate: Any = field(static=True)
    _jit_options: Options = field(static=True)

    # The one of `Wrapper` would be in the way of every call: the metadata of the function is in the
    # `__dict__` instead.
    __getattribute__ = object.__getattribute__  # pyright: ignore[reportAssignmentType]

    @property
    def __wrapped__(self) -> Any:
        return self._function

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        try:
            dispatcher, bound, bound_kwargs = self._eqxlike_dispatch
        except AttributeError:
            dispatcher, bound, bound_kwargs = _attach(self)
        if bound:
            args = bound + args
        if bound_kwargs:
            kwargs = {**bound_kwargs, **kwargs}
        try:
            if not kwargs:
                output = dispatcher.fast_path(args)
                if output is not MISS:
                    return output
            if type(self._function) is not types.FunctionType:
                dispatcher = _current_dispatcher(self, dispatcher)
            return dispatcher.call(args, kwargs)
        except Exception as error:
            failure = claim_failure(error)
            if failure is None:
                _explain(error, dispatcher.order, args, kwargs)
                hide_our_frames(error)
                raise
        # This stands outside of the handler, so that JAX's pages are not in the context.
        if paths := _deleted(dispatcher.order.named(args, kwargs)):
            failure.add_note(
                f"Donated to the call that failed, and so no longer there: {listed(paths)}."
            )
        try:
            raise failure
        except EqxlikeRuntimeError:
            hide_our_frames(failure)
            raise

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else bind(self, instance)

    def __getstate__(self) -> dict[str, Any]:
        # The metadata of the function is left out: not all annotations can be pickled.
        shown = shown_by(self._function)
        return {
            name: value
            for name, value in stored_fields(self).items()
            if name not in METADATA or value is not shown.get(name)
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        stored_fields(self).update({**shown_by(state["_function"]), **state})

    def __repr__(self) -> str:
        return f"filter_jit({self._function!r})"

    @property
    def traces(self) -> tuple[Trace, ...]:
        """The traces of the function so far, the latest 32 of them."""
        return _attach(self)[0].history.traces

    def lower(self, /, *args: Any, **kwargs: Any) -> Lowered:
        """Traces and lowers the function for these arguments, without compiling or running it.

        A `jax.ShapeDtypeStruct` may replace an array.
        """
        dispatcher, bound, bound_kwargs = _attach(self)
        try:
            ordered, names = dispatcher.order.arrange(bound + args, {**bound_kwargs, **kwargs})
            arrays, compiled = dispatcher.find(ordered, names, with_abstract=True)
            with compiled.donation_warnings:
                lowered = compiled.jitted(arrays).lower(*arrays)
        except Exception as error:
            _explain(error, dispatcher.order, bound + args, {**bound_kwargs, **kwargs})
            hide_our_frames(error)
            raise
        return Lowered(lowered, (dispatcher, compiled, bound, bound_kwargs))


def _attach(wrapper: JitFunction) -> tuple[Dispatcher, tuple[Any, ...], dict[str, Any]]:
    """Finds the dispatcher for a wrapper and puts it in its slot."""
    unbound = unbind(wrapper._function)
    dispatcher = dispatcher_for(unbound, wrapper._donate, wrapper._jit_options)
    dispatch = (dispatcher, unbound.args, unbound.kwargs)
    _set_dispatch(wrapper, dispatch)
    return dispatch


def _current_dispatcher(wrapper: JitFunction, dispatcher: Dispatcher) -> Dispatcher:
    """`dispatcher`, or a new one if the `__call__` of a class was replaced meanwhile."""
    if unbind(wrapper._function).function is dispatcher.get_unbound_function():
        return dispatcher
    return _attach(wrapper)[0]


_set_dispatch = JitFunction.__dict__["_eqxlike_dispatch"].__set__


# --- Notes on the errors of a call: JAX knows the arguments of a program by their numbers alone ---


_NAMED = re.compile(r"Of .*, arrays\[\d+\] is ")


def _explain(
    error: Exception, order: ArgumentOrder, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Adds a note to an error that names the arguments that it is about, by name and path."""
    text, among = str(error), f"Among the arguments of {order.function_name}, these"
    arguments = order.named(args, kwargs)
    if isinstance(error, jax.errors.UnexpectedTracerError):
        name_tracers(error, args, kwargs)
    if isinstance(error, jax.errors.ConcretizationTypeError):
        paths = [path for path, leaf in _leaves(arguments) if is_array(leaf)]
        # JAX counts the arrays of all arguments together.
        counted = dict.fromkeys(map(int, re.findall(r"\barrays\[(\d+)\]", text)))
        known = [f"arrays[{each}] is {paths[each]}" for each in counted if each < len(paths)]
        # An inner call knows them by its own names, and comes first.
        if known and not any(map(_NAMED.match, getattr(error, "__notes__", ()))):
            error.add_note(f"Of {order.function_name}, {', '.join(known)}.")
    # JAX gives the shape of the first deleted array, or nothing.
    if "deleted" in text and (paths := _deleted(arguments)):
        error.add_note(
            f"{among} are no longer there, since they were donated to a call: {listed(paths)}. Go "
            "on with what that call returned, or donate a copy to it."
        )
    if "only one reference" in text or "both closed over and passed" in text:
        references = ", ".join(_equal_paths(id, is_reference, arguments))
        error.add_note(
            f"The references among the arguments of {order.function_name}: {references}."
        )
    if "donate the same buffer twice" in text or "previously donated in the same call" in text:
        shared = [each for each in _equal_paths(_buffer, is_array, arguments) if " = " in each]
        error.add_note(
            f"{among} share a buffer, and one is donated: {', '.join(shared)}. Give a copy, "
            "`jnp.copy`, for all but one."
        )
    if "Disallowed host-to-device" in text:
        on_host = [
            path for path, leaf in _leaves(arguments) if isinstance(leaf, np.ndarray | np.generic)
        ]
        if on_host:
            error.add_note(
                f"{among} are arrays of NumPy, which each call copies to the device: "
                f"{listed(on_host)}. Put them there with `jax.device_put`."
            )
    if isinstance(error, TypeError):
        paths = [path for name, each in arguments for path in paths_without_numbers(each, name)]
        if paths:
            error.add_note(
                f"{among} arrays hold no numbers: {listed(paths)}. Give numbers, or keep the "
                "values in a static field, as a tuple."
            )


def _deleted(arguments: Iterable[tuple[str, Any]]) -> list[str]:
    return [path for name, argument in arguments for path in deleted_paths(argument, name)]


def _equal_paths(key: Any, is_wanted: Any, arguments: Iterable[tuple[str, Any]]) -> Iterable[str]:
    """The paths of all leaves that are wanted, those with equal keys joined by an equals sign."""
    found: dict[Any, list[str]] = {}
    for path, leaf in filter(lambda each: is_wanted(each[1]), _leaves(arguments)):
        found.setdefault(key(leaf), []).append(path)
    return map(" = ".join, found.values())


def _buffer(array: Any) -> int:
    """The address of an array's first buffer; the identity of an array that tells none."""
    try:
        return array.addressable_shards[0].data.unsafe_buffer_pointer()
    except Exception:
        return id(array)


def _leaves(arguments: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    for name, argument in arguments:
        for path, leaf in jtu.tree_leaves_with_path(argument):
            yield name + jtu.keystr(path), leaf
