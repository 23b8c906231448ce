"""Summaries of models: their layers, with shapes, sizes and costs."""

import dataclasses
import math
from typing import Any

import jax.tree_util as jtu
from jaxtyping import PyTree

from ..._module import Module, observe_calls
from ..._pytree import flag_leaves, is_array, is_inexact_array, tree_pformat
from ..._tables import align, grouped, rich_table
from ..._transforms import filter_make_jaxpr
from .._common import check_instance
from .._stateful import State
from ._calls import Record, Recorder
from ._costs import Cost, cost_of


@dataclasses.dataclass(frozen=True)
class LayerSummary:
    """One row of a `Summary`. What lies inside a layer counts for it too.

    - `path`: where the layer stands in the model; the first place if at several.
    - `type_name`: the name of its class.
    - `num_calls`: how often the program calls it: in each turn of a `scan`, and for a batch under
      `vmap` once.
    - `outputs`: what it returned wherever it is called, a `jax.ShapeDtypeStruct` for each array.
      Under a `vmap` shapes are those of one example.
    - `num_parameters`: entries of its floating and complex arrays.
    - `num_trainable`: those of them that are not frozen.
    - `num_bytes`: of all its arrays.
    - `flops`: floating-point operations of all calls, for the whole batch of a `vmap`; see
      `summary`. `None` if there is no call, or where XLA does not say.
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
        forms = dict.fromkeys(map(_form, self.outputs))
        return (
            self.path or "(model)",
            self.type_name,
            grouped(self.num_calls or None),
            ", ".join(forms) or "-",
            grouped(self.num_parameters),
            grouped(self.num_bytes),
            grouped(self.flops),
            _trained(self.num_parameters, self.num_trainable),
        )


@dataclasses.dataclass(frozen=True, repr=False)
class Summary:
    """The output of `summary`; `str` and `repr` show it as a table, `rich.print` as one of rich.

    - `rows`: of each Module in the model that can be called or has arrays, those around others
      first.
    - `num_parameters`, `num_trainable`, `num_bytes`: of the whole model, in which an array that
      two layers share counts once.
    - `flops`: of the program that the call of the model runs; `None` if it was not called, or where
      XLA does not say.
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
    """The layers of a model with their paths, types, outputs, sizes and costs.

    Nothing is computed: `model(*example_args, **kwargs)` is traced with shapes in the place of
    arrays, each call of a Module in it recorded, and the program that comes of it costed. FLOPs are
    those that the program runs, in each row as in the total: all turns of a `scan` count, such as
    that over the layers of `ScanStack`, and all examples of a `vmap`, and a gradient that a layer
    takes counts for that layer. Each operation counts as XLA counts it before it optimises; of the
    branches of a `cond` the largest, of a `while_loop` one turn.

    For layers that need a batch, wrap the model: `summary(eqxlike.filter_vmap(model, in_axes=(0,
    None), out_axes=(0, None), axis_name="batch"), xs, state)`.

    **Arguments:**

    - `model`: a callable pytree; any pytree if there are no further arguments: then nothing is
      called.
    - `*example_args`, `**kwargs`: what to call it with. A `jax.ShapeDtypeStruct` may stand for an
      array.

    **Returns:** a `Summary`: rows as data, and a table as text. A layer that was not called has a
    dash, as has one whose cost XLA does not tell.

    **Raises:** `TypeError` if `model` is a class, or cannot be called and there are arguments; and
    whatever the call raises.

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
    recorder = Recorder()
    observed = observe_calls(model, recorder.add)
    cost = None
    if example_args or kwargs:
        if not callable(model):
            raise TypeError(
                f"summary was given arguments to call the model with, and a {type(model).__name__} "
                "cannot be called. Without them it lists the layers alone."
            )
        program, _, _ = filter_make_jaxpr(_call)(observed, example_args, kwargs)
        cost = cost_of(program.jaxpr)
    trainable = _trainable_ids(model)
    num_parameters, num_trainable, num_bytes = _sizes(model, trainable)
    return Summary(
        rows=tuple(
            _row(each, trainable, cost or Cost())
            for each in recorder.take()
            if _is_layer(each.module)
        ),
        num_parameters=num_parameters,
        num_trainable=num_trainable,
        num_bytes=num_bytes,
        flops=None if cost is None else _known(cost.flops),
    )


def _call(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return model(*args, **kwargs)


def _known(flops: float | None) -> float | None:
    return None if flops is None or math.isnan(flops) else flops


def _is_layer(module: Module) -> bool:
    return callable(module) or any(map(is_array, jtu.tree_leaves(module)))


def _row(record: Record, trainable: set[int], cost: Cost) -> LayerSummary:
    times = [call.times_in(cost) for call in record.calls]
    num_parameters, num_trainable, num_bytes = _sizes(record.module, trainable)
    return LayerSummary(
        path=jtu.keystr(record.path),
        type_name=type(record.module).__name__,
        num_calls=sum(times),
        outputs=tuple(call.output for call, n in zip(record.calls, times, strict=True) if n),
        num_parameters=num_parameters,
        num_trainable=num_trainable,
        num_bytes=num_bytes,
        flops=_known(record.flops_in(cost)),
    )


class _SomeState:
    """Stands for a `State` in what a call returned: it is that of the whole model."""

    def __repr__(self) -> str:
        return "State"


def _form(output: PyTree) -> str:
    shown = jtu.tree_map(
        lambda node: _SomeState() if isinstance(node, State) else node,
        output,
        is_leaf=lambda node: isinstance(node, State),
    )
    return tree_pformat(shown, width=10_000, struct_as_array=True)


def _trainable_ids(model: PyTree) -> set[int]:
    """The `id`s of the arrays of a model that are trained: floating or complex, and not frozen."""
    leaves = jtu.tree_leaves(model)
    flags = flag_leaves(model, leaves, is_inexact_array)
    return {id(leaf) for leaf, is_trainable in zip(leaves, flags, strict=True) if is_trainable}


def _sizes(node: PyTree, trainable: set[int]) -> tuple[int, int, int]:
    """Parameters, those of them that are trained, and bytes; each array counts once."""
    arrays = {id(leaf): leaf for leaf in jtu.tree_leaves(node) if is_array(leaf)}
    sizes = {name: math.prod(array.shape) for name, array in arrays.items()}
    return (
        sum(sizes[name] for name, array in arrays.items() if is_inexact_array(array)),
        sum(sizes[name] for name in arrays if name in trainable),
        sum(sizes[name] * array.dtype.itemsize for name, array in arrays.items()),
    )


def _trained(num_parameters: int, num_trainable: int) -> str:
    if num_parameters == 0:
        return "-"
    if num_trainable == num_parameters:
        return "all"
    return "part" if num_trainable else "frozen"
