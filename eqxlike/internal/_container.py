"""Classes that number the values of their attributes."""

from typing import Any


class ContainerMeta(type):
    """A metaclass of classes whose attributes are numbers, for values that are looked up by them.

    !!! example

        >>> class Words(metaclass=ContainerMeta):
        ...     first = "one"
        ...     second = "two"
        >>> Words.second, Words[Words.second], len(Words)
        (1, 'two', 2)
    """

    reverse_lookup: list[Any]

    def __new__(cls, name: str, bases: tuple[type, ...], dict: dict[str, Any]) -> "ContainerMeta":
        numbered, lookup = {}, []
        for key, value in dict.items():
            if not (key.startswith("__") and key.endswith("__")):
                lookup.append(value)
                value = len(lookup) - 1
            numbered[key] = value
        assert "reverse_lookup" not in numbered
        return super().__new__(cls, name, bases, numbered | {"reverse_lookup": lookup})

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, int) or super().__instancecheck__(instance)

    def __getitem__(cls, item: int) -> Any:
        return cls.reverse_lookup[item]

    def __len__(cls) -> int:
        return len(cls.reverse_lookup)
