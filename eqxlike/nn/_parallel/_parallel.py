"""Layers beside one another: branches that get one input, and whose outputs are joined."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import jax.random as jr
from jaxtyping import PRNGKeyArray

from ..._module import Module, field
from ..._numbers import integer
from ..._pytree import describe_node
from .._common import check_instance, describe, layer_at
from .._stateful import NO_STATE, State, StatefulLayer, is_stateful
from ._groups import FusedBranches, Places, call_group, group_branches
from ._outputs import Outputs, add, concatenate, explain_misfit, in_order

SUM, CONCATENATE = "sum", "concatenate"
Join = Literal["sum", "concatenate"]


class Parallel(StatefulLayer):
    """Branches applied to one input, their outputs joined; indexes, iterates and measures like a
    tuple of them.

    The output is that of the branches one by one, joined: as in the blocks of Szegedy et al.
    (2015), "Going Deeper with Convolutions", and in residual blocks, where one branch is an
    `Identity`.

    Branches that are equal but for the values of their arrays are stored stacked: they are one
    layer in `groups`, whose arrays have a leading axis. They run at once, by `jax.vmap`: `k` equal
    `Linear` layers are one matrix product, as is a single one with `k` times the outputs. Each
    other branch is a group by itself. `places` has the indices of the branches of each group.

    Equal branches may be stateful. In the `State` of the model their values stand stacked as well:
    those of one are `jax.tree.map(lambda value: value[index], state.substate(model.groups[0]))`.

    >>> import eqxlike as eqx, jax, jax.numpy as jnp
    >>> from eqxlike import nn
    >>> keys = jax.random.split(jax.random.key(0), 4)
    >>> x = jnp.ones(8)
    >>> model = nn.Parallel([nn.Linear(8, 2, key=key) for key in keys], "concatenate")
    >>> eqx.filter_jit(model)(x).shape, model.groups[0].weight.shape, model[1].weight.shape
    ((8,), (4, 2, 8), (2, 8))
    >>> residual = nn.Parallel([nn.Identity(), nn.Linear(8, 8, key=jax.random.key(0))], "sum")
    >>> residual(x).shape, residual.places
    ((8,), ((0,), (1,)))
    >>> nn.Parallel(model.unstack()[:2], jnp.stack)(x).shape
    (2, 2)
    """

    groups: tuple[Any, ...]
    function: Callable[[tuple[Any, ...]], Any] | None
    join: Join | None = field(static=True)
    axis: int | None = field(static=True)
    places: tuple[Places, ...] = field(static=True)

    def __init__(
        self,
        branches: Sequence[Callable],
        join: Join | Callable[[tuple[Any, ...]], Any] = SUM,
        *,
        axis: int | None = None,
        stack: bool = True,
    ):
        """**Arguments:**

        - `branches`: callables `branch(x, *, key)`, or `branch(x, state, *, key)` for those that
          are stateful; wrap a plain function in `Lambda`. Equal ones are frozen alike: to train
          one and not another, freeze before you put them here.
        - `join`: `"sum"`, `"concatenate"`, or a function of the tuple of outputs, in the order of
          the branches; a Module as that function is trained. Outputs may be pytrees, whose leaves
          `"sum"` and `"concatenate"` join.
        - `axis`: along which `"concatenate"` joins; 0 if left out, that of the features of a vector
          and of the channels of an image.
        - `stack`: whether equal branches are stored and run as one. `False` is for branches that
          `jax.vmap` cannot map, such as those with a callback.

        **Raises:** `ValueError` if there is no branch, `join` is another word, or `axis` is no
        integer or stands beside another `join`; `TypeError` for a branch that cannot be called.
        """
        branches = tuple(branches)
        if not branches:
            raise ValueError("Parallel needs at least one branch.")
        for index, branch in enumerate(branches):
            check_instance(branch, f"Parallel: branches[{index}]")
            if not callable(branch):
                raise TypeError(
                    f"Parallel: branches[{index}] cannot be called; it is {describe_node(branch)}."
                )
        if stack:
            self.groups, self.places = group_branches(branches)
        else:
            self.groups, self.places = branches, tuple((index,) for index in range(len(branches)))
        self.function, self.join = _join_by(join)
        self.axis = _axis_for(self.join, axis)

    def is_stateful(self) -> bool:
        """**Returns:** whether one of the branches is stateful."""
        return any(map(is_stateful, self.groups))

    def __call__(
        self, x: Any, *args: Any, state: Any = NO_STATE, key: PRNGKeyArray | None = None
    ) -> Any:
        """**Arguments:**

        - `x`: the input of every branch.
        - `*args`: passed to every branch as they are, a mask say.
        - `state`: passed to every branch that is a `StatefulLayer` and says that it is stateful;
          needed if there is one. A `State` may be given as the first of `args`.
        - `key`: split into one key a branch; a branch that takes one gets `key=None` without it.
          From a key of an `rbg` kind, branches that run as one draw other numbers than they do one
          by one, as under any `jax.vmap`.

        **Returns:** the outputs, joined; the pair of that and the state if there is a `state`.

        **Raises:** `TypeError` if a branch needs the state and there is none; `ValueError` if the
        outputs of the branches cannot be joined.
        """
        if state is NO_STATE and args and isinstance(args[0], State):
            state, args = args[0], args[1:]
        keys = None if key is None else jr.split(key, len(self))
        outputs = []
        for group, places in zip(self.groups, self.places, strict=True):
            if is_stateful(group) and not isinstance(state, State):
                raise TypeError(
                    f"{describe(self)} needs the state, since branches[{places[0]}], of type "
                    f"{type(group).__name__}, is stateful: write `y, state = model(x, state)`."
                )
            try:
                output, state = call_group(group, places, (x, *args), state, keys)
            except Exception as error:
                if len(places) > 1:
                    # The layer that the message names has no path: it is made for the call.
                    error.add_note(
                        f"It happened in branches {', '.join(map(str, places))} of "
                        f"{describe(self)}, which run as one."
                    )
                if "unexpected keyword argument 'key'" in str(error):
                    error.add_note(
                        f"It happened in branch {min(places)} of {describe(self)}. Branches are "
                        "called with `key=` where it is given one: have `__call__` take "
                        "`*, key=None`, or wrap a plain function in `nn.Lambda`."
                    )
                raise
            if isinstance(group, FusedBranches):
                outputs += [Outputs((at,), each) for at, each in zip(places, output, strict=True)]
            else:
                outputs.append(Outputs(places, output))
        joined = self._join(outputs)
        return joined if state is NO_STATE else (joined, state)

    def _join(self, outputs: list[Outputs]) -> Any:
        if self.function is not None:
            return self.function(in_order(outputs))
        if problem := explain_misfit(outputs, self.axis):
            raise ValueError(f"{describe(self)} cannot {self.join} {problem}.")
        return add(outputs) if self.axis is None else concatenate(outputs, self.axis)

    def unstack(self) -> tuple[Any, ...]:
        """**Returns:** the branches by themselves, as a tuple."""
        return tuple(self)

    def __getitem__(self, index: int) -> Any:
        """One branch by itself.

        **Raises:** `IndexError` past either end, `TypeError` for what is no integer.
        """
        number = integer(index)
        if number is None:
            raise TypeError(f"Parallel is indexed by an integer, got {type(index).__name__}.")
        if not -len(self) <= number < len(self):
            raise IndexError(f"Parallel of {len(self)} branches has no branch {number}.")
        number %= len(self)
        pairs = zip(self.groups, self.places, strict=True)
        group, places = next(pair for pair in pairs if number in pair[1])
        if isinstance(group, FusedBranches):
            return group.unfuse()[places.index(number)]
        return group if len(places) == 1 else layer_at(group, places.index(number))

    def __iter__(self) -> Iterator[Any]:
        return map(self.__getitem__, range(len(self)))

    def __len__(self) -> int:
        return sum(map(len, self.places))


def _join_by(join: Any) -> tuple[Callable[[tuple[Any, ...]], Any] | None, Join | None]:
    """The function to join by, or the word."""
    if isinstance(join, type) and issubclass(join, Module):
        check_instance(join, "Parallel: join")
    if callable(join):
        return join, None
    if isinstance(join, str) and join in (SUM, CONCATENATE):
        return None, join
    raise ValueError(
        f"join must be {SUM!r}, {CONCATENATE!r} or a function of the tuple of the branches' "
        f"outputs, got {join!r}."
    )


def _axis_for(join: Join | None, axis: Any) -> int | None:
    if join != CONCATENATE:
        if axis is not None:
            other = "a function" if join is None else repr(join)
            raise ValueError(f"axis is for join={CONCATENATE!r} alone, and join is {other}.")
        return None
    number = 0 if axis is None else integer(axis)
    if number is None:
        raise ValueError(f"axis must be an integer, got {axis!r}.")
    return number
