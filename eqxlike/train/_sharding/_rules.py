"""Rules that say how each array of a model is split, by its path."""

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec

from ..._pytree import Which, path_matches
from ._paths import Keys, name_of

Split = PartitionSpec | Callable[[str, jax.ShapeDtypeStruct], PartitionSpec]
"""The axes of the mesh that each axis of an array is split over, or a function of path and leaf
that returns them.
"""
Rules = tuple[tuple[Which, Split], ...]
REST = "**"


@dataclasses.dataclass(frozen=True)
class LongestAxis:
    """A split of the longest axis that divides, the first of those that are as long.

    - `names`: the axes of the mesh, which make `num_parts` of it.
    - `min_size`: arrays with fewer numbers stay whole.
    """

    names: tuple[str, ...]
    num_parts: int
    min_size: int

    def __call__(
        self, path: str, leaf: jax.ShapeDtypeStruct, *, is_stacked: bool = False
    ) -> PartitionSpec:
        """Of an array that `is_stacked` the axis of layers is the last choice: split along it, the
        layers cannot be brought together one at a time.
        """
        lengths = dict(enumerate(leaf.shape))
        axes = [axis for axis, length in lengths.items() if length % self.num_parts == 0]
        if leaf.size < self.min_size or not axes:
            return PartitionSpec()
        longest = max(axes, key=lambda axis: (not is_stacked or axis > 0, lengths[axis]))
        return PartitionSpec(*[None] * longest, self.names)


def as_rules(rules: Mapping[Which, Split] | Sequence[tuple[Which, Split]] | Split) -> Rules:
    """Rules as pairs of a pattern and a split.

    **Raises:** `TypeError` for a pattern or a split that is none.
    """
    if isinstance(rules, PartitionSpec) or callable(rules):
        rules = {REST: rules}
    pairs: list[Any] = list(rules.items() if isinstance(rules, Mapping) else rules)
    for pair in pairs:
        if not (isinstance(pair, tuple) and len(pair) == 2):
            raise TypeError(
                f"Sharding: a rule is a pair of a pattern and a PartitionSpec, got {pair!r}."
            )
        which, split = pair
        if not (isinstance(which, str) or callable(which)):
            raise TypeError(
                "Sharding: a pattern must be a string or a function of path and leaf, got "
                f"{which!r}."
            )
        if not (isinstance(split, PartitionSpec) or callable(split)):
            raise TypeError(
                f"Sharding: the rule for {which!r} must give a jax.sharding.PartitionSpec, or a "
                f"function of path and leaf that returns one; got {split!r}."
            )
    return tuple(pairs)


def specs_by_rules(
    rules: Rules, leaves: Mapping[Keys, jax.ShapeDtypeStruct], stacked: Collection[Keys]
) -> dict[Keys, PartitionSpec]:
    """The split of each array by the first rule that matches its path; whole where none does.

    **Arguments:**

    - `stacked`: the arrays whose leading axis is that of layers.

    **Raises:** `ValueError` for a rule that is the first to match for no array. `**` may stand for
    a rest of none.
    """
    specs, used = {}, set()
    for keys, leaf in leaves.items():
        path = name_of(keys)
        place = next(
            (n for n, (which, _) in enumerate(rules) if path_matches(which, path, leaf)), None
        )
        used.add(place)
        split = PartitionSpec() if place is None else rules[place][1]
        if isinstance(split, LongestAxis):
            specs[keys] = split(path, leaf, is_stacked=keys in stacked)
        else:
            specs[keys] = split if isinstance(split, PartitionSpec) else split(path, leaf)
    for place, (which, _) in enumerate(rules):
        if place not in used and which != REST:
            raise ValueError(
                f"Sharding: the rule for {which!r} matches no array of the model that an earlier "
                f"rule left. The arrays are {', '.join(map(name_of, leaves)) or 'none'}."
            )
    return specs
