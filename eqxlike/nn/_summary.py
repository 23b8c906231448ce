"""Summaries of models: layers with output shapes, sizes and FLOPs."""

import contextlib
import dataclasses
import itertools
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.tree_util as jtu
from jax.extend.core import Jaxpr, jaxprs_in_params
from jax.interpreters import partial_eval
from jaxtyping import PyTree

from .._flops import cost_of
from .._module import Module, observe_calls
from .._pytree import flag_leaves, is_array, is_array_or_struct, is_inexact_array, tree_pformat
from .._tables import align, grouped, rich_table
from .._transforms import filter_make_jaxpr
from ._inputs import check_instance
from ._stateful import State


@dataclasses.dataclass(frozen=True)
class LayerSummary:
    """One row of a `Summary`. All values include inner layers.

    - `path`: the path of the layer in the model; the first path if there are several.
    - `type_name`: the name of the class of the layer.
    - `num_calls`: the number of calls. Each iteration of a `scan` counts; a batch under `vmap`
      counts once.
    - `outputs`: the output of each traced call, with a `jax.ShapeDtypeStruct` for each array. Under
      `vmap` these are the shapes of one example.
    - `num_parameters`: the number of entries of floating-point and complex arrays.
    - `num_trainable`: the number of these entries that are not frozen.
    - `num_bytes`: the bytes of all arrays.
    - `flops`: the floating-point operations of all calls, for the whole batch of a `vmap`; see
      `summary`. `None` if the layer is not called, or has an operation of unknown cost.
    """

    path: str
    type_name: str
    num_calls: int
    outputs: tuple[PyTree, ...]
    num_parameters: int
    num_trainable: int
    num_bytes: int
    flops: float | None

    @property
    def cells(self) -> tuple[str, ...]:
        """The row as text."""
        texts = dict.fromkeys(map(_output_text, self.outputs))
        return (
            self.path or "(model)",
            self.type_name,
            grouped(self.num_calls or None),
            ", ".join(texts) or "-",
            grouped(self.num_parameters),
            grouped(self.num_bytes),
            grouped(self.flops),
            _trained(self.num_parameters, self.num_trainable),
        )


@dataclasses.dataclass(frozen=True, repr=False)
class Summary:
    """The output of `summary`; `str`, `repr` and `rich.print` show it as a table.

    - `rows`: one row for each Module in the model that is callable or has arrays; outer Modules
      come before inner ones.
    - `num_parameters`, `num_trainable`, `num_bytes`: totals of the model. An array that two layers
      share counts once.
    - `flops`: the floating-point operations of the call of the model; `None` if the model was not
      called, or has an operation of unknown cost.
    """

    rows: tuple[LayerSummary, ...]
    num_parameters: int
    num_trainable: int
    num_bytes: int
    flops: float | None

    def __str__(self) -> str:
        return align(HEADER, [row.cells for row in self.rows]) + f"\n{self.totals}"

    __repr__ = __str__

    def __rich__(self) -> Any:
        return rich_table(HEADER, [row.cells for row in self.rows], self.totals)

    @property
    def totals(self) -> str:
        """The last line of the table."""
        return (
            f"{self.num_parameters:,} parameters, {self.num_trainable:,} of them trained; "
            f"{self.num_bytes:,} bytes; {grouped(self.flops)} FLOPs"
        )


HEADER = ("Path", "Type", "Calls", "Output", "Parameters", "Bytes", "FLOPs", "Trained")


def summary(model: PyTree, /, *example_args: Any, **kwargs: Any) -> Summary:
    """Lists the layers of a model with their paths, types, outputs, sizes and FLOPs.

    `model(*example_args, **kwargs)` is traced with shapes; it is not executed. FLOPs are counted in
    the traced program, for each row and in total. The count includes all iterations of a `scan`,
    such as the layers of a `ScanStack`, and all examples of a `vmap`. A gradient that a layer
    computes counts for this layer. A `cond` counts as its most expensive branch, and a `while_loop`
    as one iteration. The cost of each operation is computed by a formula, as in `graph.report`.

    For layers that need a batch, wrap the model: `summary(eqxlike.filter_vmap(model, in_axes=(0,
    None), out_axes=(0, None), axis_name="batch"), xs, state)`.

    **Arguments:**

    - `model`: a callable pytree. Without further arguments, `model` may be any pytree, and is not
      called.
    - `*example_args`, `**kwargs`: arguments for the call, with arrays or `jax.ShapeDtypeStruct`.

    **Returns:** a `Summary`, with rows as data and a table as text. Unknown values, for layers that
    are not called or have operations of unknown cost, are shown as a dash.

    **Raises:**

    - `TypeError` if `model` is a class.
    - `TypeError` if there are arguments, and `model` is not callable.
    - Any exception of the call.

    !!! example

        >>> import jax, jax.numpy as jnp
        >>> from eqxlike import nn
        >>> key1, key2 = jax.random.split(jax.random.key(0))
        >>> model = nn.Sequential([nn.Linear(8, 16, key=key1), nn.Linear(16, 2, key=key2)])
        >>> print(nn.summary(model, jnp.ones(8)))
        Path        Type        Calls  Output   Parameters  Bytes  FLOPs  Trained
        (model)     Sequential      1  f32[2]          178    712    338  all
        .layers[0]  Linear          1  f32[16]         144    576    272  all
        .layers[1]  Linear          1  f32[2]           34    136     66  all
        178 parameters, 178 of them trained; 712 bytes; 338 FLOPs
    """
    check_instance(model, "summary")
    records: list[_Record] = []
    observed = observe_calls(model, _recording(records))
    cost = None
    if example_args or kwargs:
        if not callable(model):
            raise TypeError(
                f"summary got arguments for a call, but a {type(model).__name__} is not callable. "
                "Without arguments, summary lists the layers and does not call the model."
            )
        trace = filter_make_jaxpr(lambda model, args, kwargs: model(*args, **kwargs))
        program, _, _ = trace(observed, example_args, kwargs)
        needed, _ = partial_eval.dce_jaxpr(program.jaxpr, [True] * len(program.jaxpr.outvars))
        cost = _cost_of(needed)
    leaves = jtu.tree_leaves(model)
    flags = flag_leaves(model, leaves, is_inexact_array)
    trainable = {id(leaf) for leaf, flag in zip(leaves, flags, strict=True) if flag}
    rows = tuple(
        _row(each, trainable, cost or _Cost())
        for each in records
        if callable(each.module) or any(map(is_array, jtu.tree_leaves(each.module)))
    )
    # JAX may cache the observed Modules, and the observed Modules refer to `records`. Without this
    # line, the cache would keep the arrays alive.
    records.clear()
    return Summary(rows, *_sizes(model, trainable), None if cost is None else _known(cost.flops))


def _known(flops: float | None) -> float | None:
    return None if flops is None or math.isnan(flops) else flops


def _sizes(node: PyTree, trainable: set[int]) -> tuple[int, int, int]:
    """The numbers of parameters, trainable parameters and bytes; each array counts once."""
    arrays = {id(leaf): leaf for leaf in jtu.tree_leaves(node) if is_array(leaf)}
    sizes = {name: math.prod(array.shape) for name, array in arrays.items()}
    return (
        sum(sizes[name] for name, array in arrays.items() if is_inexact_array(array)),
        sum(sizes[name] for name in arrays if name in trainable),
        sum(sizes[name] * array.dtype.itemsize for name, array in arrays.items()),
    )


class _StatePlaceholder:
    """Shown for a `State` in an output, because a `State` has values of the whole model."""

    def __repr__(self) -> str:
        return "State"


def _output_text(output: PyTree) -> str:
    shown = jtu.tree_map(
        lambda node: _StatePlaceholder() if isinstance(node, State) else node,
        output,
        is_leaf=lambda node: isinstance(node, State),
    )
    return tree_pformat(shown, width=10_000, struct_as_array=True)


def _trained(num_parameters: int, num_trainable: int) -> str:
    if num_parameters == 0:
        return "-"
    if num_trainable == num_parameters:
        return "all"
    return "part" if num_trainable else "frozen"


# --- The FLOPs of a program, and of each call in it ---


@dataclasses.dataclass
class _Cost:
    """The cost of a program or of a part of it.

    - `flops`: floating-point operations; `nan` if the cost of an operation is unknown.
    - `flops_of`: the floating-point operations of each call, including inner calls.
    - `times_of`: the number of times that each call runs.
    """

    flops: float = 0.0
    flops_of: dict[int, float] = dataclasses.field(default_factory=lambda: defaultdict(float))
    times_of: dict[int, int] = dataclasses.field(default_factory=lambda: defaultdict(int))

    def add(self, part: "_Cost", times: int = 1) -> None:
        """Adds the cost of a part that runs `times` times."""
        self.flops += times * part.flops
        for call, flops in part.flops_of.items():
            self.flops_of[call] += times * flops
        for call, runs in part.times_of.items():
            self.times_of[call] += times * runs


_SCOPE = "eqxlike-call-"
_IN_SCOPE = re.compile(rf"{_SCOPE}(\d+)")


def _cost_of(jaxpr: Jaxpr) -> _Cost:
    """The cost of a program from which dead code was removed.

    Calls are identified by their name scopes. Each equation counts once for each iteration of a
    `scan`, and once in a `while_loop`, because the number of iterations is only known at run time.
    A `cond` counts as its most expensive branch.
    """
    cost, called = _Cost(), set()
    for equation in jaxpr.eqns:
        part = _cost_of_equation(equation)
        cost.add(part)
        # The name scopes in a nested program do not contain the scopes around the program, so no
        # call counts twice.
        calls = set(map(int, _IN_SCOPE.findall(str(equation.source_info.name_stack))))
        for call in calls:
            cost.flops_of[call] += part.flops
        called |= calls
    for call in called:
        cost.times_of[call] += 1
    return cost


def _cost_of_equation(equation: Any) -> _Cost:
    name, inner = equation.primitive.name, list(jaxprs_in_params(equation.params))
    cost = _Cost()
    if name == "cond":
        branches = list(map(_cost_of, inner))
        for branch in branches:
            cost.add(branch)
        flops = [branch.flops for branch in branches]
        cost.flops = max(flops, key=lambda each: (math.isnan(each), each))
    elif name in ("scan", "while", "shard_map") or _is_call(equation, inner):
        turns = equation.params["length"] if name == "scan" else 1
        if name == "shard_map":
            # The product is the number of devices: each device runs the program on its shard.
            sizes, axes = equation.params["mesh"].shape, equation.params["newly_manual_axes"]
            turns = math.prod(sizes[axis] for axis in axes)
        for each in inner:
            cost.add(_cost_of(each), turns)
    # Callbacks to Python, for example to raise an error, have no cost.
    elif not name.endswith("callback"):
        known = cost_of(equation)
        cost.flops = math.nan if known is None else known.flops
    return cost


def _is_call(equation: Any, inner: list[Jaxpr]) -> bool:
    """Whether an equation passes all its inputs to one inner program, as a jitted call does."""
    if len(inner) != 1:
        return False
    shapes = [
        [getattr(variable.aval, "shape", None) for variable in variables]
        for variables in (inner[0].invars, equation.invars)
    ]
    return shapes[0] == shapes[1]


# --- The traced calls of Modules ---


@dataclasses.dataclass
class _Call:
    """One traced call of a Module.

    - `number`: the number of the call's name scope in the program.
    - `around`: the calls that contain this call, outermost first.
    - `output`: the output of the call, with shapes in place of arrays.
    - `does_nothing`: whether all arrays of the output are inputs of the call.
    """

    number: int
    around: tuple["_Call", ...]
    output: PyTree = None
    does_nothing: bool = False

    def times_in(self, cost: _Cost) -> int:
        """The number of times that the program runs this call; 0 if JAX discarded the trace."""
        if self.number not in cost.times_of and self.does_nothing:
            return self.around[-1].times_in(cost) if self.around else 1
        return cost.times_of.get(self.number, 0)


@dataclasses.dataclass
class _Record:
    """One Module of a model and its calls."""

    path: tuple[Any, ...]
    module: Module
    calls: list[_Call] = dataclasses.field(default_factory=list)

    def flops_in(self, cost: _Cost) -> float | None:
        """The FLOPs of the outermost calls of `module`; `None` if there are no calls."""
        own = {call.number for call in self.calls}
        outermost = (
            call for call in self.calls if own.isdisjoint(each.number for each in call.around)
        )
        flops = [cost.flops_of.get(call.number, 0.0) for call in outermost if call.times_in(cost)]
        return sum(flops) if flops else None


def _row(record: _Record, trainable: set[int], cost: _Cost) -> LayerSummary:
    times = [call.times_in(cost) for call in record.calls]
    return LayerSummary(
        jtu.keystr(record.path),
        type(record.module).__name__,
        sum(times),
        tuple(call.output for call, n in zip(record.calls, times, strict=True) if n),
        *_sizes(record.module, trainable),
        _known(record.flops_in(cost)),
    )


def _recording(records: list[_Record]) -> Callable[[tuple[Any, ...], Module], Any]:
    """The callback for `observe_calls`: adds a record of a Module, and returns its observer."""
    numbers = itertools.count()
    running: list[_Call] = []

    def add(path: tuple[Any, ...], module: Module) -> Callable[..., Any]:
        calls: list[_Call] = []
        records.append(_Record(path, module, calls))

        @contextlib.contextmanager
        def observe(*arguments: Any) -> Iterator[Callable[[Any], None]]:
            call = _Call(next(numbers), tuple(running))
            inputs = jtu.tree_leaves(arguments)

            def returned(output: PyTree) -> None:
                arrays = filter(is_array_or_struct, jtu.tree_leaves(output))
                call.does_nothing = set(map(id, arrays)) <= set(map(id, inputs))
                call.output = jtu.tree_map(_shown, output)
                calls.append(call)

            running.append(call)
            try:
                # Operations keep their name scope when `vmap` or a gradient transforms them.
                with jax.named_scope(f"{_SCOPE}{call.number}"):
                    yield returned
            finally:
                running.pop()

        return observe

    return add


def _shown(leaf: Any) -> Any:
    if not is_array_or_struct(leaf):
        return leaf
    is_weak = getattr(leaf, "weak_type", False)
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, weak_type=is_weak)
