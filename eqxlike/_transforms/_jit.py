"""`filter_jit`: `jax.jit` in which every array is traced and everything else is static."""

import functools
import inspect
import types
import weakref
from collections.abc import Callable, Hashable, Iterable
from typing import Any, overload

import jax
import jax.tree_util as jtu

from .._compat import PjitFunction
from .._module import METADATA, BoundMethod, Module, Wrapper, bind, field, stored_fields
from .._traceback import hide_our_frames, name_tracers
from ._attached import attached
from ._dispatcher import Dispatcher, clear_dispatchers
from ._donation import Donate
from ._entry import Entry
from ._fast_path import MISS
from ._spelling import Spelling, signature_of

_REFUSED = {
    "static_argnums": "what is no array is static already",
    "static_argnames": "what is no array is static already",
    "donate_argnums": "use `donate`",
    "donate_argnames": "use `donate`",
    "abstracted_axes": "it is not supported",
}


_JIT_KEYWORDS = frozenset(inspect.signature(jax.jit).parameters) - {"fun", *_REFUSED}


class _Options:
    """Keyword arguments, hashable although their values may be dicts or lists; not mutated."""

    __slots__ = ("values",)

    def __init__(self, values: dict[str, Any]):
        self.values = values

    def __eq__(self, other: object) -> bool:
        return type(other) is _Options and self.values == other.values

    def __hash__(self) -> int:
        return hash(frozenset(self.values))


class JitFunction(Wrapper):
    """What `filter_jit` returns. A pytree: the arrays of what it wraps are its leaves."""

    __slots__ = ("_eqxlike_dispatch",)

    _function: Any
    _donate: Any = field(static=True)
    _jit_options: _Options = field(static=True)

    # Not the one of `Wrapper`, which would be in the way of every call; `filter_jit` puts the
    # metadata in the `__dict__`.
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
                outcome = dispatcher.fast_path(args)
                if outcome is not MISS:
                    return outcome
            return dispatcher.call(args, kwargs)
        except Exception as error:
            if isinstance(error, jax.errors.UnexpectedTracerError):
                name_tracers(error, args, kwargs)
            hide_our_frames(error)
            raise

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else bind(self, instance)

    def __repr__(self) -> str:
        return f"filter_jit({self._function!r})"

    def lower(self, /, *args: Any, **kwargs: Any) -> "Lowered":
        """Traces and lowers the function for these arguments, without compiling or running it.

        A `jax.ShapeDtypeStruct` stands for an array.
        """
        dispatcher, bound, bound_kwargs = _attach(self)
        try:
            spelled, names = dispatcher.spelling.spell(bound + args, {**bound_kwargs, **kwargs})
            arrays, entry = dispatcher.find(spelled, names, with_abstract=True)
            try:
                lowered = entry.jitted(arrays).lower(*arrays)
            finally:
                entry.restore_warnings()
        except Exception as error:
            hide_our_frames(error)
            raise
        return Lowered(lowered, dispatcher, entry, bound, bound_kwargs)


class Lowered:
    """A lowered function, as `jax.stages.Lowered`."""

    def __init__(
        self,
        lowered: jax.stages.Lowered,
        dispatcher: Dispatcher,
        entry: Entry,
        bound: tuple[Any, ...],
        bound_kwargs: dict[str, Any],
    ):
        self._lowered = lowered
        self._call = (dispatcher, entry, bound, bound_kwargs)

    def compile(self, compiler_options: dict[str, Any] | None = None) -> "Compiled":
        return Compiled(self._lowered.compile(compiler_options), *self._call)

    def as_text(self, dialect: str | None = None, **kwargs: Any) -> str:
        return self._lowered.as_text(dialect, **kwargs)

    def cost_analysis(self) -> Any:
        return self._lowered.cost_analysis()


class Compiled:
    """A compiled function, as `jax.stages.Compiled`: for arguments like those lowered for."""

    def __init__(
        self,
        compiled: jax.stages.Compiled,
        dispatcher: Dispatcher,
        entry: Entry,
        bound: tuple[Any, ...],
        bound_kwargs: dict[str, Any],
    ):
        self._compiled = compiled
        self._dispatcher = dispatcher
        self._entry = entry
        self._bound = bound
        self._bound_kwargs = bound_kwargs

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        spelled, names = self._dispatcher.spelling.spell(
            self._bound + args, {**self._bound_kwargs, **kwargs}
        )
        arrays, entry = self._dispatcher.find(spelled, names)
        # By its parts: the entry itself may have been forgotten since.
        if (entry.structures, entry.names) != (self._entry.structures, self._entry.names):
            raise TypeError(
                f"{self._dispatcher.spelling.function_name} was compiled for arguments of another "
                "structure, or with other static values: compile it again for these."
            )
        return self._entry.finish(self._compiled(*arrays))

    def as_text(self) -> str | None:
        return self._compiled.as_text()

    def cost_analysis(self) -> Any:
        return self._compiled.cost_analysis()

    def memory_analysis(self) -> Any:
        return self._compiled.memory_analysis()


def _attach(wrapper: JitFunction) -> tuple[Dispatcher, tuple[Any, ...], dict[str, Any]]:
    """Finds the dispatcher for a wrapper and puts it in its slot."""
    function, bound, bound_kwargs = _unbind(wrapper._function)
    dispatcher = _dispatcher_for(function, bound, wrapper._donate, wrapper._jit_options)
    dispatch = (dispatcher, bound, bound_kwargs)
    _set_dispatch(wrapper, dispatch)
    return dispatch


_set_dispatch = JitFunction.__dict__["_eqxlike_dispatch"].__set__

# Callables that are themselves the function: compared by identity, and not changed in place.
_FUNCTIONS = (
    type,
    types.FunctionType,
    types.BuiltinFunctionType,
    PjitFunction,
    jax.custom_jvp,
    jax.custom_vjp,
)


def _unbind(callable_: Any) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """A callable as a function, and the arguments that are bound to it.

    These go into `jit` like the others, so that none of their arrays becomes a constant and no
    change of their state is missed.
    """
    if isinstance(callable_, _FUNCTIONS):
        return callable_, (), {}
    if isinstance(callable_, BoundMethod | types.MethodType):
        function, bound, kwargs = _unbind(callable_.__func__)
        return function, (*bound, callable_.__self__), kwargs
    if isinstance(callable_, functools.partial):
        function, bound, kwargs = _unbind(callable_.func)
        return function, (*bound, *callable_.args), {**kwargs, **callable_.keywords}
    call = type(callable_).__call__
    function, bound, kwargs = _unbind(call) if isinstance(call, Module) else (call, (), {})
    return function, (*bound, callable_), kwargs


def _describe(
    function: Callable[..., Any], bound: tuple[Any, ...]
) -> tuple[Callable[..., Any], str, inspect.Signature | None]:
    """The function that a user would name, what its name is, and how `function` is called.

    Of one of our wrappers that is what it wraps, after the wrapper itself.
    """
    if not (bound and isinstance(bound[0], Wrapper) and function is type(bound[0]).__call__):
        name = getattr(function, "__name__", type(function).__name__)
        return function, name, signature_of(function)
    inner, inner_bound, inner_kwargs = _unbind(bound[0].__wrapped__)
    anchor, name, signature = _describe(inner, inner_bound)
    if signature is None or inner_kwargs:
        return anchor, name, signature_of(function)
    parameters = list(signature.parameters.values())[len(inner_bound) :]
    if len(signature.parameters) < len(inner_bound) or any(
        each.kind is inspect.Parameter.VAR_POSITIONAL for each in parameters
    ):
        return anchor, name, signature_of(function)
    itself = inspect.Parameter("_eqxlike_wrapper", inspect.Parameter.POSITIONAL_ONLY)
    return anchor, name, signature.replace(parameters=[itself, *parameters])


# The dispatchers of the wrappers of each function, so that `filter_jit(f)` in a loop does not
# compile in each turn. They live with the function: in it, or here for what has no `__dict__`.
_NAME = "__eqxlike_dispatchers__"
_dispatchers: weakref.WeakKeyDictionary[Any, dict[Hashable, Dispatcher]] = (
    weakref.WeakKeyDictionary()
)


def _dispatcher_for(
    function: Callable[..., Any], bound: tuple[Any, ...], donate: Any, options: _Options
) -> Dispatcher:
    anchor, name, signature = _describe(function, bound)

    def make() -> Dispatcher:
        spelling = Spelling(name, signature)
        return Dispatcher(function, len(bound), spelling, donate, options.values)

    try:
        if isinstance(anchor, types.FunctionType):
            of_function = attached(anchor, _NAME, dict)
        else:
            of_function = _dispatchers.setdefault(anchor, {})
    except TypeError:
        # Not weakly referenced, as the `__call__` of a class in C: each wrapper has its own.
        return make()
    kinds = tuple(type(each) for each in bound if isinstance(each, Wrapper))
    key = (kinds, len(bound), donate, options)
    found = of_function.get(key)
    return of_function.setdefault(key, make()) if found is None else found


_missing: Any = object()


@overload
def filter_jit(
    *, donate: Donate | Iterable[str] = "none", **jitkwargs: Any
) -> Callable[[Callable[..., Any]], JitFunction]: ...
@overload
def filter_jit(
    fun: Callable[..., Any], *, donate: Donate | Iterable[str] = "none", **jitkwargs: Any
) -> JitFunction: ...
def filter_jit(
    fun: Any = _missing, *, donate: Donate | Iterable[str] = "none", **jitkwargs: Any
) -> Any:
    """Compiles a function of any arguments: arrays are traced, everything else is static.

    **Arguments:**

    - `fun`: any callable: a function, a method, a Module, a `functools.partial`. Arrays in what
        it is bound to are traced like those of its arguments. Left out, `filter_jit` is a decorator
        with arguments.
    - `donate`: whose buffers may be reused for the outcome: `"all"`, `"all-except-first"`, the
        same with a warning where a buffer could not be reused (`"warn"`, `"warn-except-first"`),
        `"none"`, or names of parameters as in `("model", "opt_state")`.
    - `**jitkwargs`: passed to `jax.jit`. Those that name static or donated arguments are refused.

    **Returns:** a callable with the signature of `fun`. It is asynchronous like `jax.jit`, traces
    once for each structure of its arguments and each shape and dtype of their arrays, however the
    call is spelled, and returns what is no array as it was when traced. It also has `.lower`.

    **Raises:** `TypeError` if `fun` is not callable; `ValueError` for an unknown word or name in
    `donate`; when called, `TypeError` naming the path of a static leaf that is not hashable.

    !!! example

        >>> import eqxlike as eqx, jax.numpy as jnp
        >>> @eqx.filter_jit
        ... def scale(x, how):
        ...     return 2 * x if how == "double" else x
        >>> print(scale(jnp.array(3.0), "double"))
        6.0
    """
    if fun is _missing:
        return functools.partial(filter_jit, donate=donate, **jitkwargs)
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
        # The same, and a pytree: the arrays bound to it are leaves of the wrapper.
        fun = jtu.Partial(fun.func, *fun.args, **fun.keywords)
    wrapper = JitFunction(fun, donate, _Options(jitkwargs))
    _attach(wrapper)
    fields = stored_fields(wrapper)
    for name in METADATA:
        if hasattr(fun, name):
            fields[name] = getattr(fun, name)
    return wrapper


def clear_caches() -> None:
    """Forgets everything that filtered functions have compiled; the next calls trace anew.

    `jax.clear_caches` does the same for JAX's own.
    """
    clear_dispatchers()
