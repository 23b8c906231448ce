"""A traced program as nested groups: layers, loops and branches around operations."""

import dataclasses

from ._operations import Program
from ._origins import source_of


@dataclasses.dataclass
class Group:
    """Operations that stand one after another in the same scope.

    - `start`, `stop`: the first, and the one after the last.
    - `parts`: groups, and the numbers of operations between them.
    """

    name: str
    start: int
    stop: int
    parts: list["Group | int"]


def nested(program: Program) -> Group:
    """The whole program as a group. A layer that is called twice is two groups."""
    root = Group("", 0, len(program.steps), [])
    open_groups = [root]
    for index, step in enumerate(program.steps):
        shared = 0
        for group, name in zip(open_groups[1:], step.groups, strict=False):
            if group.name != name:
                break
            shared += 1
        del open_groups[shared + 1 :]
        for name in step.groups[shared:]:
            group = Group(name, index, index, [])
            open_groups[-1].parts.append(group)
            open_groups.append(group)
        open_groups[-1].parts.append(index)
        for group in open_groups[1:]:
            group.stop = index + 1
    return root


def edges_in(program: Program) -> list[tuple[int, int]]:
    """The pairs of an operation and one that reads its result."""
    return [
        (source, index)
        for index, step in enumerate(program.steps)
        for source in dict.fromkeys(map(source_of, step.inputs))
        if source is not None
    ]
