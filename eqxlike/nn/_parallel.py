"""Parallel branches with the same input, whose outputs are joined."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import PRNGKeyArray

from .._module import Module
from ._inputs import as_layers, check_instance, describe, key_for, missing_state
from ._stateful import NO_STATE, State, StatefulLayer, is_stateful


class Parallel(StatefulLayer):
    """Applies several branches to the same input and joins their outputs. Supports indexing and
    `len`.

    One example is a residual block, in which one branch is an `Identity`. Another example is the
    block of Szegedy et al. (2015), "Going Deeper with Convolutions". The branches are called one
    after another. To compute branches of equal structure in one batch, use `filter_vmap` over
    stacked layers. To compute `Linear` branches as one matrix product, use `FusedLinear`.

    >>> import jax, jax.numpy as jnp
    >>> from eqxlike import nn
    >>> keys = jax.random.split(jax.random.key(0))
    >>> first, second = nn.Linear(8, 2, key=keys[0]), nn.Linear(8, 8, key=keys[1])
    >>> x = jnp.ones(8)
    >>> nn.Parallel([first, second], "concatenate")(x).shape
    (10,)
    >>> nn.Parallel([nn.Identity(), second])(x).shape
    (8,)
    >>> nn.Parallel([nn.Identity(), second], jnp.stack)(x).shape
    (2, 8)
    """

    branches: tuple[Callable, ...]
    join: Callable[[tuple[Any, ...]], Any]

    def __init__(
        self, branches: Sequence[Callable], join: str | Callable[[tuple[Any, ...]], Any] = "sum"
    ):
        """**Arguments:**

        - `branches`: callables `branch(x, *, key)`; stateful branches are called as `branch(x,
          state=state, key=key)`. Wrap plain functions in `Lambda` if you call the `Parallel` with a
          key.
        - `join`: `"sum"`, `"concatenate"` (along the first axis: features of vectors, channels of
          images), or a function of the tuple of outputs. If outputs are pytrees, `"sum"` and
          `"concatenate"` join them leaf by leaf. If `join` is a Module, its arrays are trained.

        **Raises:**

        - `ValueError` if `branches` is empty.
        - `ValueError` if `join` is unknown.
        - `TypeError` if a branch cannot be called.
        """
        self.branches = as_layers(branches, "Parallel", "branches")
        if not self.branches:
            raise ValueError("Parallel needs at least one branch.")
        if isinstance(join, type) and issubclass(join, Module):
            check_instance(join, "Parallel: join")
        words = {"sum": _sum, "concatenate": _concatenate}
        known: Any = words.get(join) if isinstance(join, str) else join
        if not callable(known):
            raise ValueError(
                f"join must be 'sum', 'concatenate' or a function of the tuple of the branches' "
                f"outputs, got {join!r}."
            )
        self.join = known

    def is_stateful(self) -> bool:
        """**Returns:** whether one of the branches is stateful."""
        return any(map(is_stateful, self.branches))

    def __call__(
        self, x: Any, *args: Any, state: Any = NO_STATE, key: PRNGKeyArray | None = None
    ) -> Any:
        """**Arguments:**

        - `x`: the input of every branch.
        - `*args`: further arguments for every branch, such as a mask.
        - `state`: the `State` of the model, which is passed to every stateful branch. The state is
          required if a branch is stateful, and may also be passed as the first of `args`.
        - `key`: random key, split into one key for each branch. If `key` is `None`, branches that
          take a key get `None`.

        **Returns:** the joined outputs; `(outputs, state)` if `state` is passed.

        **Raises:** `TypeError` if a branch is stateful and `state` is missing. Errors that `join`
        raises get a note that names this layer.
        """
        if state is NO_STATE and args and isinstance(args[0], State):
            state, args = args[0], args[1:]
        keys = [None] * len(self) if key is None else jr.split(key, len(self))
        outputs = []
        for index, (branch, branch_key) in enumerate(zip(self.branches, keys, strict=True)):
            options = key_for(branch, branch_key)
            if not is_stateful(branch):
                outputs.append(branch(x, *args, **options))
            elif isinstance(state, State):
                output, state = branch(x, *args, state=state, **options)
                outputs.append(output)
            else:
                raise missing_state(self, f"branches[{index}]", branch)
        try:
            joined = self.join(tuple(outputs))
        except Exception as error:
            error.add_note(f"Raised while joining the outputs of {describe(self)}.")
            raise
        return joined if state is NO_STATE else (joined, state)

    def __getitem__(self, index: int) -> Callable:
        return self.branches[index]

    def __len__(self) -> int:
        return len(self.branches)


def _sum(outputs: tuple[Any, ...]) -> Any:
    return functools.reduce(functools.partial(jax.tree.map, _add), outputs)


def _add(left: Any, right: Any) -> Any:
    if jnp.shape(left) != jnp.shape(right):
        raise ValueError(
            f"join='sum' expected outputs of one shape, got {jnp.shape(left)} and "
            f"{jnp.shape(right)}."
        )
    return left + right


def _concatenate(outputs: tuple[Any, ...]) -> Any:
    return jax.tree.map(lambda *each: jnp.concatenate(each), *outputs)
