"""Layers next to one another: branches that get one input, and whose outputs are joined."""

import functools
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import numpy as np
from jaxtyping import Array, PRNGKeyArray

from .._check_numbers import integer
from .._module import Module, field
from .._partition import find_static_difference
from .._pytree import (
    describe_node,
    find_difference,
    is_array,
    is_array_like,
    is_reference,
    same_shape_and_dtype,
)
from .._transforms import filter_vmap
from ._inputs import (
    as_data,
    check_instance,
    check_layer_list,
    describe,
    key_for,
    layer_at,
    stack_layers,
)
from ._linear import FusedLinear
from ._stateful import (
    NO_STATE,
    State,
    StatefulLayer,
    has_place_in_a_state,
    is_stateful,
    with_array_states,
)

SUM, CONCATENATE = "sum", "concatenate"
Join = Literal["sum", "concatenate"]

Places = tuple[int, ...]
"""The indices of the branches of a group."""


class FusedBranches(FusedLinear):
    """Linear branches of different sizes, which `nn.fuse` made one product."""


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

        **Raises:** `ValueError` if there is no branch, `join` is another word, or `axis` is not an
        integer or comes with another `join`; `TypeError` for a branch that cannot be called.
        """
        check_layer_list("Parallel", branches)
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
            self.groups, self.places = _group_branches(branches)
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
                output, state = _call_group(group, places, (x, *args), state, keys)
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
                outputs += [_Outputs((at,), each) for at, each in zip(places, output, strict=True)]
            else:
                outputs.append(_Outputs(places, output))
        joined = self._join(outputs)
        return joined if state is NO_STATE else (joined, state)

    def _join(self, outputs: "list[_Outputs]") -> Any:
        if self.function is not None:
            return self.function(_in_order(outputs))
        if problem := _explain_misfit(outputs, self.axis):
            raise ValueError(f"{describe(self)} cannot {self.join} {problem}.")
        if self.axis is not None:
            return _concatenate(outputs, self.axis)
        add = functools.partial(jtu.tree_map, operator.add)
        return functools.reduce(add, [each.sum() for each in outputs])

    def unstack(self) -> tuple[Any, ...]:
        """**Returns:** the branches by themselves, as a tuple."""
        return tuple(self)

    def __getitem__(self, index: int) -> Any:
        """One branch by itself.

        **Raises:** `IndexError` past either end, `TypeError` for what is not an integer.
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


# --- Branches that are equal but for the values of their arrays, stored and called as one ---


def _group_branches(branches: tuple[Callable, ...]) -> tuple[tuple[Any, ...], tuple[Places, ...]]:
    """The groups of equal branches, each stacked if it has several; and their places."""
    found: list[dict[int, Any]] = []
    for place, branch in enumerate(branches):
        for members in found:
            first = next(iter(members.values()))
            candidate = with_array_states(branch, first)
            if _can_stack(first, candidate):
                members[place] = candidate
                break
        else:
            found.append({place: with_array_states(branch)})
    groups = [
        stack_layers([*members.values()]) if len(members) > 1 else branches[min(members)]
        for members in found
    ]
    return tuple(groups), tuple(map(tuple, found))


def _can_stack(first: Any, second: Any) -> bool:
    if find_static_difference(first, second):
        return False
    # The values that such a branch finds in the state are not stacked.
    if has_place_in_a_state(first):
        return False
    leaves = zip(jtu.tree_leaves(first), jtu.tree_leaves(second), strict=True)
    return all(_can_stack_leaves(*each) for each in leaves)


def _can_stack_leaves(first: Any, second: Any) -> bool:
    if not is_array(first):
        return not is_reference(first)
    return bool(same_shape_and_dtype(first, second)) and _is_weak(first) == _is_weak(second)


def _is_weak(array: Any) -> bool:
    return getattr(jax.typeof(array), "weak_type", False)


def _call_group(
    group: Any, places: Places, args: tuple[Any, ...], state: Any, keys: PRNGKeyArray | None
) -> tuple[Any, Any]:
    """The outputs of the branches of a group, stacked if they are several; and the state. Those of
    `FusedBranches` are a tuple.

    **Arguments:**

    - `keys`: one for each branch of the model, or `None`.
    """
    has_state = is_stateful(group)
    data, key_of = as_data(keys)

    def call(branch: Any, state: Any, data: Any) -> tuple[Any, Any]:
        if has_state:
            return branch(*args, state=state, key=key_of(data))
        return branch(*args, **key_for(branch, key_of(data))), state

    if isinstance(group, FusedBranches):
        return group(*args), state
    if len(places) == 1:
        return call(group, state, None if data is None else data[places[0]])
    own_state = state.substate(group) if has_state else None
    own_data = None if data is None else data[np.array(places)]
    output, new_state = filter_vmap(call, axis_size=len(places))(group, own_state, own_data)
    return output, state.update(new_state) if has_state else state


# --- What the branches return, and how it is joined ---


class _Outputs(NamedTuple):
    """What the branches of a group return: stacked, if they are several."""

    places: tuple[int, ...]
    value: Any

    @property
    def is_stacked(self) -> bool:
        return len(self.places) > 1

    @property
    def form(self) -> Any:
        """What one of the branches returns, with shapes in the place of arrays and numbers."""

        def form_of(leaf: Any) -> Any:
            if not is_array_like(leaf):
                return leaf
            shape = jnp.shape(leaf)[1:] if self.is_stacked else jnp.shape(leaf)
            return jax.ShapeDtypeStruct(shape, jnp.result_type(leaf))

        return jtu.tree_map(form_of, self.value)

    def each(self) -> list[Any]:
        """The outputs by themselves."""
        if not self.is_stacked:
            return [self.value]
        return [layer_at(self.value, index) for index in range(len(self.places))]

    def sum(self) -> Any:
        """The sum of the outputs."""

        def sum_of(leaf: Any) -> Any:
            if not is_array(leaf):
                return len(self.places) * leaf
            # Without a dtype, small integers are summed as larger ones.
            return jnp.sum(leaf, axis=0, dtype=leaf.dtype)

        return jtu.tree_map(sum_of, self.value) if self.is_stacked else self.value


def _in_order(groups: Sequence[_Outputs]) -> tuple[Any, ...]:
    """The outputs of all branches, in the order of the branches."""
    by_place = {
        place: output
        for outputs in groups
        for place, output in zip(outputs.places, outputs.each(), strict=True)
    }
    return tuple(by_place[place] for place in sorted(by_place))


def _concatenate(groups: Sequence[_Outputs], axis: int) -> Any:
    """The outputs of all branches, one after another along `axis`, leaf by leaf."""

    def merge(stacked: Array) -> Array:
        number, *shape = stacked.shape
        shape[axis] *= number
        return jnp.moveaxis(stacked, 0, axis % len(shape)).reshape(shape)

    if len(groups) == 1 and groups[0].is_stacked:
        return jtu.tree_map(merge, groups[0].value)
    return jtu.tree_map(lambda *each: jnp.concatenate(each, axis), *_in_order(groups))


def _explain_misfit(groups: Sequence[_Outputs], axis: int | None) -> str | None:
    """The end of a sentence on what cannot be concatenated along `axis`, or summed if `None`."""
    forms = [(outputs.places[0], outputs.form) for outputs in groups]
    for place, form in forms:
        for path, leaf in jtu.tree_leaves_with_path(form):
            if not isinstance(leaf, jax.ShapeDtypeStruct):
                problem = "and no array"
            elif axis is not None and not -leaf.ndim <= axis < leaf.ndim:
                problem = f"which has no axis {axis}"
            else:
                continue
            return (
                f"what branches[{place}] returns: outputs[{place}]{jtu.keystr(path)} is "
                f"{describe_node(leaf)}, {problem}"
            )
    fits = functools.partial(_fits, axis=axis)
    (first_place, first), *others = forms
    for place, form in others:
        if difference := find_difference(first, form, fits):
            return (
                f"what branches[{first_place}] and branches[{place}] return: "
                f"{difference.explain(f'outputs[{first_place}]', f'outputs[{place}]')}"
            )
    return None


def _fits(first: Any, second: Any, axis: int | None) -> bool | None:
    """For `find_difference`: whether two outputs have one shape, but for `axis`."""
    if not isinstance(first, jax.ShapeDtypeStruct) or not isinstance(second, jax.ShapeDtypeStruct):
        return None
    shapes = [list(leaf.shape) for leaf in (first, second)]
    if axis is not None and first.ndim == second.ndim:
        for shape in shapes:
            shape[axis] = 0
    return shapes[0] == shapes[1]
