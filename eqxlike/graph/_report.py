"""Reports on what JAX and XLA made of a function."""

import collections
import dataclasses
import functools
import importlib
import inspect
import json
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu

from .._module import Module, Wrapper
from .._partition import split
from .._programs import Collective, collectives
from .._pytree import is_array, is_inexact_array
from .._transforms import FreshTrace, JitFunction, fresh_trace, is_array_or_struct
from ._hlo import Kinds, aliases_in, instructions_in, kinds_of, parameters_in, stablehlo_kinds
from ._operations import Operation, Program, num_bytes_of, program_of, root_of, type_of
from ._rows import (
    Redundant,
    Row,
    Side,
    Stored,
    redundant_in,
    rows_by_kind,
    rows_by_layer,
    sides,
    stored_in,
)
from ._stable import Unstable, unstable_in
from ._text import as_rich, as_text, page_of

LARGE_CONSTANT_BYTES = 2**20
"""A constant of this many bytes or more is warned of."""

_EFFECTS = ("device_put", "infeed", "outfeed", "copy_to_host_async", "debug_print", "check")
"""Besides callbacks. `check` is that of `error_if`."""


def report(
    function: Callable[..., Any], /, *args: Any, gradient: bool = False, **kwargs: Any
) -> "Report":
    """What JAX and XLA make of `function(*args, **kwargs)`; it is compiled, and not run.

    Operations belong to layers by the path from the argument on, as `model.layers[0]`, or from the
    class on where the function is itself a Module. A layer that was rebuilt inside the function in
    a way that hides where it came from, as `jax.grad` does with several of one form, has the name
    of its class. Scopes of `jax.named_scope` count as layers.

    **Arguments:**

    - `function`: any callable: a function, a Module, what `filter_jit` or `jax.jit` returned, whose
      options stay, a step of `train.make_step`.
    - `*args`, `**kwargs`: what to call it with. A `jax.ShapeDtypeStruct` may stand for an array.
    - `gradient`: whether to report on the gradient too: of all floating-point outputs, with
      cotangents of ones, by the arrays of a Module, or by those of the first argument.

    **Returns:** a `Report`.

    **Raises:** `TypeError` if `function` is not callable; `ValueError` if it cannot be traced for
    these arguments, with the reason in one line; and with `gradient=True` if there is no
    floating-point array to differentiate, or by which.

    !!! example

        >>> import jax, jax.numpy as jnp
        >>> from eqxlike import graph, nn
        >>> model = nn.Linear(8, 4, key=jax.random.key(0))
        >>> found = graph.report(model, jax.ShapeDtypeStruct((8,), jnp.float32))
        >>> for row in found.layers[1:]:
        ...     print(row.name, row.operations, row.flops)
        Linear 2 68
    """
    if not callable(function):
        raise TypeError(
            f"graph.report expects a function, and then its arguments; it got {function!r:.60}, of "
            f"type {type(function).__name__}."
        )
    name = _name_of(function)
    found = _report_on(name, _traced(function, args, kwargs))
    if not gradient:
        return found
    of_gradient, of_stored, arguments = _gradient_of(function, args)
    backward = _report_on(name, _traced(of_gradient, arguments, kwargs, "the gradient of "))
    stored_program = _traced(of_stored, arguments, kwargs, "the gradient of ").traced
    outputs = [each.aval for each in stored_program.jaxpr.jaxpr.outvars]
    stored = stored_in(
        program_of(stored_program.jaxpr), [(type_of(each), num_bytes_of(each)) for each in outputs]
    )
    return dataclasses.replace(
        found,
        gradient=backward,
        stored=stored,
        sides=sides(found.program, backward.program, stored),
    )


@dataclasses.dataclass(frozen=True)
class Compiled:
    """What XLA was given, and what it made of it.

    - `stablehlo`: the operations that it was given, by kind.
    - `before`: the same in its own language, before it optimises.
    - `after`: those that were left, with those inside fusions.
    - `fusions`: how many fusions of each kind there are.
    - `fused`: how many of the instructions left stand in one.
    """

    stablehlo: Kinds
    before: Kinds
    after: Kinds
    fusions: Kinds
    fused: int

    @property
    def changes(self) -> tuple[tuple[str, int, int], ...]:
        """The kinds with their numbers before and after."""
        kinds = dict.fromkeys([*self.before, *self.after])
        return tuple((kind, self.before.get(kind, 0), self.after.get(kind, 0)) for kind in kinds)


@dataclasses.dataclass(frozen=True)
class Memory:
    """The bytes that a run takes, as XLA plans them.

    - `arguments`, `outputs`: of these arrays.
    - `aliased`: of outputs that lie in the buffers of arguments.
    - `temporaries`: of what lies between.
    - `peak`: of all of these at once.
    """

    arguments: int
    outputs: int
    aliased: int
    temporaries: int
    peak: int


@dataclasses.dataclass(frozen=True)
class Constant:
    """An array that is part of the program.

    - `type`: its dtype and shape.
    - `layer`, `source`: the layer and the line that first read it.
    """

    type: str
    num_bytes: int
    layer: str
    source: str


@dataclasses.dataclass(frozen=True)
class Effect:
    """An operation that leaves the device: a callback to the host, or a copy between devices.

    - `kind`: the name of JAX's primitive, as `pure_callback`; `check` is that of `error_if`.
    - `times`: how often it is run.
    - `source`: the line that asked for it.
    """

    kind: str
    layer: str
    times: int
    source: str


@dataclasses.dataclass(frozen=True, repr=False)
class Report:
    """The output of `report`; `str` shows it as text, `rich.print` with tables of rich.

    - `name`: that of the function.
    - `operations`: of the traced program, in order, those of inner programs in their place.
    - `layers`, `kinds`: the same by path of layer, of which the first is the whole program, and by
      kind.
    - `redundant`: those that need not be run.
    - `compiled`: what XLA was given, and what it made of it.
    - `xla_flops`, `xla_bytes`: what XLA says the compiled program costs; it counts a loop once.
      `None` where it does not say.
    - `memory`: what a run takes; `None` where XLA does not say.
    - `donated`: the paths of arguments that may be reused.
    - `aliased`: for each output that lies in the buffer of an argument its number, and the path of
      that argument.
    - `constants`: the arrays that are baked into the program, largest first.
    - `effects`: callbacks to the host and copies between devices.
    - `collectives`: what devices send each other.
    - `trace_s`, `lower_s`, `compile_s`: the seconds that each took. What JAX has traced before
      inside the function, and what its cache of compiled programs holds, is not done again.
    - `sides`, `stored`, `gradient`: with `gradient=True`, function and gradient by layer, what is
      stored for the backward pass, and the report on the gradient's program; else empty and `None`.
    - `unstable`: formulas that lose digits, as `graph.unstable` finds them.
    - `jaxpr`, `stablehlo`, `hlo`: the program as JAX traced it, as XLA got it, and as it left it.
    """

    name: str
    operations: tuple[Operation, ...]
    layers: tuple[Row, ...]
    kinds: tuple[Row, ...]
    redundant: Redundant
    compiled: Compiled
    xla_flops: float | None
    xla_bytes: float | None
    memory: Memory | None
    donated: tuple[str, ...]
    aliased: tuple[tuple[int, str], ...]
    constants: tuple[Constant, ...]
    effects: tuple[Effect, ...]
    collectives: tuple[Collective, ...]
    trace_s: float
    lower_s: float
    compile_s: float
    jaxpr: Any
    stablehlo: str
    hlo: str
    program: Program
    sides: tuple[Side, ...] = ()
    stored: tuple[Stored, ...] = ()
    gradient: "Report | None" = None
    unstable: tuple[Unstable, ...] = ()

    @property
    def flops(self) -> int:
        """Floating-point operations of a run."""
        return self.layers[0].flops

    @property
    def intensity(self) -> float | None:
        """FLOPs for each byte that is moved, by XLA's count; `None` where it has none."""
        return self.xla_flops / self.xla_bytes if self.xla_flops and self.xla_bytes else None

    @property
    def warnings(self) -> tuple[str, ...]:
        """What is likely to be a mistake."""
        return tuple(
            f"A constant of {each.num_bytes:,} bytes, {each.type}, is baked into the program: "
            f"pass it as an argument.{f' It is read at {each.source}.' if each.source else ''}"
            for each in self.constants
            if each.num_bytes >= LARGE_CONSTANT_BYTES
        )

    def __str__(self) -> str:
        return as_text(self)

    __repr__ = __str__

    def __rich__(self) -> Any:
        return as_rich(self)

    def to_json(self) -> str:
        """The report as JSON, without the texts of the programs."""
        return json.dumps({"jax": jax.__version__, **_plain(self)})

    def to_html(self) -> str:
        """The report as one page, with all that it needs inside: tables, and the graph, whose
        layers open with a click.
        """
        return page_of(self)

    def by_enzyme(self) -> tuple[Kinds, float]:
        """What Enzyme's optimiser of StableHLO makes of the program.

        **Returns:** the operations left by kind, to be compared with `compiled.stablehlo`, and the
        seconds that its passes took.

        **Raises:** `ImportError` if Enzyme is not installed.
        """
        try:
            enzyme = importlib.import_module("enzyme_ad.jax")
        except ImportError as error:
            raise ImportError(
                "Report.by_enzyme needs the package `enzyme_ad`: `pip install 'eqxlike[enzyme]'`. "
                "There are builds for Python 3.11 on Linux and macOS."
            ) from error
        start_s = time.perf_counter()
        _, text = enzyme.enzyme_call.run_pass_pipeline(
            ["main"], self.stablehlo, enzyme.full_optimization_pass_pipeline()
        )
        return stablehlo_kinds(text), time.perf_counter() - start_s


_NOT_IN_JSON = frozenset({"jaxpr", "stablehlo", "hlo", "program"})
"""The programs, which have forms of their own."""


def _plain(value: Any) -> Any:
    """The numbers and names of a part of a report, for JSON."""
    names = getattr(value, "_fields", None) or getattr(value, "__dataclass_fields__", None)
    if names is None:
        return list(map(_plain, value)) if isinstance(value, tuple) else value
    return {name: _plain(getattr(value, name)) for name in names if name not in _NOT_IN_JSON}


def _report_on(name: str, again: FreshTrace) -> Report:
    start_s = time.perf_counter()
    compiled = _compile(again.lowered)
    compile_s = time.perf_counter() - start_s
    jaxpr, hlo = again.traced.jaxpr, compiled.as_text() or ""
    program = program_of(jaxpr)
    instructions = instructions_in(hlo)
    operations = tuple(step.operation for step in program.steps)
    stablehlo, costs = again.lowered.as_text(), compiled.cost_analysis() or {}
    fused = {each.calls for each in instructions if each.calls}
    donated = [each.donated for each in jtu.tree_leaves(again.lowered.args_info)]
    return Report(
        name=name,
        operations=operations,
        layers=rows_by_layer(program, [each for each in instructions if each.kind != "fusion"]),
        kinds=rows_by_kind(program),
        redundant=redundant_in(program),
        compiled=Compiled(
            stablehlo=stablehlo_kinds(stablehlo),
            before=kinds_of(instructions_in(_text_before(again.lowered))),
            after=kinds_of(instructions),
            fusions=dict(collections.Counter(each.fusion for each in instructions if each.fusion)),
            fused=sum(each.computation in fused for each in instructions),
        ),
        xla_flops=_known(costs.get("flops")),
        xla_bytes=_known(costs.get("bytes accessed")),
        memory=_memory(compiled.memory_analysis()),
        donated=tuple(path for path, flag in zip(again.paths, donated, strict=False) if flag),
        aliased=_aliased(hlo, again.paths),
        constants=_constants(program),
        effects=tuple(
            Effect(each.kind, each.layer, each.times, each.source)
            for each in operations
            if each.kind.endswith("callback") or each.kind in _EFFECTS
        ),
        collectives=collectives(compiled),
        trace_s=again.trace_s,
        lower_s=again.lower_s,
        compile_s=compile_s,
        jaxpr=jaxpr,
        stablehlo=stablehlo,
        hlo=hlo,
        program=program,
        unstable=unstable_in(jaxpr),
    )


def _compile(lowered: Any) -> Any:
    """The compiled program; JAX's cache may hold one of the same instructions and other names."""
    name = "jax_compilation_cache_include_metadata_in_key"
    before = getattr(jax.config, name)
    jax.config.update(name, True)
    try:
        return lowered.compile()
    finally:
        jax.config.update(name, before)


def _text_before(lowered: Any) -> str:
    try:
        return lowered.as_text("hlo")
    # What cannot be written in XLA's own language, as symbolic shapes.
    except jax.errors.JaxRuntimeError:
        return ""


def _known(cost: float | None) -> float | None:
    """A cost, or `None` if XLA does not know it."""
    return cost if cost is not None and cost >= 0 else None


def _memory(stats: Any) -> Memory | None:
    # On some platforms XLA says nothing of it.
    if stats is None:
        return None
    arguments, outputs = stats.argument_size_in_bytes, stats.output_size_in_bytes
    aliased, temporaries = stats.alias_size_in_bytes, stats.temp_size_in_bytes
    # XLA has a peak of its own, which on a CPU leaves the temporaries out.
    peak = arguments + outputs - aliased + temporaries
    return Memory(arguments, outputs, aliased, temporaries, peak)


def _aliased(hlo: str, paths: tuple[str, ...]) -> tuple[tuple[int, str], ...]:
    """The outputs that take over the buffer of an argument, with its path."""
    parameters = parameters_in(hlo)

    def path_of_parameter(number: int) -> str:
        # JAX leaves out arguments that nothing needs: the names tell which are left.
        name = parameters.get(number, "")
        index = name.removeprefix("arrays[").removesuffix("]")
        if name.startswith("arrays[") and index.isdigit() and int(index) < len(paths):
            return paths[int(index)]
        return name or f"parameter {number}"

    return tuple((output, path_of_parameter(number)) for output, number in aliases_in(hlo))


def _constants(program: Program) -> tuple[Constant, ...]:
    # The first operation that reads each.
    readers = {
        where: step.operation
        for step in reversed(program.steps)
        for kind, where in map(root_of, step.inputs)
        if kind == "constant"
    }
    found = []
    for index, array in enumerate(program.constants):
        reader = readers.get(index)
        read = ("", "") if reader is None else (reader.layer, reader.source)
        found.append(Constant(type_of(array), num_bytes_of(array), *read))
    return tuple(sorted(found, key=lambda each: -each.num_bytes))


# --- A function traced and lowered for a report, or one clear line that says why not ---


def _traced(
    function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], what: str = ""
) -> FreshTrace:
    """`function` as it is traced for these arguments.

    **Raises:** `ValueError` if the trace fails.
    """
    try:
        return fresh_trace(function, args, kwargs)
    except Exception as error:
        reason = " ".join([type(error).__name__ + ":", *str(error).strip().splitlines()[:1]])
        reason = reason.rstrip(".:") + "."
        raise ValueError(
            f"graph.report could not trace {what}{_name_of(function)}: {reason}"
        ) from error


def _name_of(function: Any) -> str:
    """The name of a function; of a Module that of its class."""
    while isinstance(function, Wrapper):
        function = function.__wrapped__
    if isinstance(function, functools.partial):
        return _name_of(function.func)
    return getattr(function, "__name__", type(function).__name__)


# --- The programs of a function and of its gradient ---


def _gradient_of(function: Any, args: tuple[Any, ...]) -> tuple[Any, Any, tuple[Any, ...]]:
    """A function that computes the output of `function` and its gradient, and one that computes
    what the forward pass stores for the backward pass.

    A Module is differentiated by its own arrays, any other function by its first argument. Each
    floating-point array of the output is pulled back with a cotangent of ones.
    """
    if isinstance(function, JitFunction):
        function = function.__wrapped__
    is_model = isinstance(function, Module) and any(map(_is_inexact, jtu.tree_leaves(function)))
    if not is_model and not args:
        raise ValueError(
            "graph.report(gradient=True) differentiates a Module by its arrays and a function by "
            f"its first argument: give {_name_of(function)} one."
        )
    subject = function if is_model else args[0]
    if not any(map(_is_inexact, jtu.tree_leaves(subject))):
        raise ValueError(
            "graph.report(gradient=True) differentiates by floating-point arrays, and the first "
            f"argument of {_name_of(function)}, of type {type(subject).__name__}, has none: "
            f"{jtu.tree_leaves(subject)!r:.80}."
        )

    def pulled_back(*arguments: Any, **kwargs: Any) -> tuple[list[Any], Any]:
        first, *rest_of_arguments = arguments
        arrays, rest = split(first, is_inexact_array)

        def of_arrays(arrays: list[Any]) -> list[Any]:
            merged = rest.merge(arrays)
            call: Any = merged if is_model else function
            given = rest_of_arguments if is_model else (merged, *rest_of_arguments)
            return list(filter(_is_inexact, jtu.tree_leaves(call(*given, **kwargs))))

        outputs, pull_back = jax.vjp(of_arrays, arrays)
        if not outputs:
            raise ValueError(
                f"{_name_of(function)} returns no floating-point array to differentiate"
            )
        return outputs, pull_back

    def program(of: Callable[[list[Any], Any], Any]) -> Any:
        def new(*arguments: Any, **kwargs: Any) -> Any:
            return of(*pulled_back(*arguments, **kwargs))

        return _like(function, new, is_model)

    arguments = (function, *args) if is_model else args
    return (
        program(lambda outputs, pull_back: (outputs, pull_back(list(map(jnp.ones_like, outputs))))),
        program(lambda _, pull_back: list(filter(is_array, jtu.tree_leaves(pull_back)))),
        arguments,
    )


_LEFT_OUT = object()


def _is_inexact(leaf: Any) -> bool:
    return is_array_or_struct(leaf) and jnp.issubdtype(leaf.dtype, jnp.inexact)


def _like(function: Any, new: Callable[..., Any], is_model: bool) -> Any:
    """`new` with the name and parameters of `function`; a model itself is the first of these."""
    name = _name_of(function)
    new.__name__ = new.__qualname__ = name
    try:
        # A default that is filled in is passed on, which not every function takes.
        parameters = [
            each if each.default is inspect.Parameter.empty else each.replace(default=_LEFT_OUT)
            for each in inspect.signature(function).parameters.values()
        ]
        if is_model:
            parameters.insert(0, inspect.Parameter(name, inspect.Parameter.POSITIONAL_ONLY))
        signature = inspect.Signature(parameters)
    # Some functions tell no parameters, and not every name can be that of one.
    except (TypeError, ValueError):
        return new
    vars(new)["__signature__"] = signature
    return new
