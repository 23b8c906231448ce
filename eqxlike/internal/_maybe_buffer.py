"""The type of what is a buffer inside of a loop, and an array elsewhere."""

from typing import Any

from ..loops import Buffer


class MaybeBuffer:
    """`MaybeBuffer[T]` is the type of a `T` or of the buffer that a loop makes of it.

    >>> isinstance(3, MaybeBuffer[int])
    True
    """

    def __class_getitem__(cls, item: Any) -> Any:
        return item | Buffer
