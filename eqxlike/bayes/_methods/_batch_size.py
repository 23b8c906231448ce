"""The number of examples in a step."""

from ..._numbers import whole_number
from .._inference import Method, Problem


def check_batch_size(method: Method, size: int | None, problem: Problem | None = None) -> None:
    """Raises `ValueError` unless `size`, a field of `method`, is `None` or a number of examples.

    **Arguments:**

    - `problem`: whose data has to have as many.
    """
    if size is None:
        return
    name = f"{type(method).__name__}: batch_size"
    whole_number(size, name)
    if problem is not None and size > problem.target.num_data:
        raise ValueError(
            f"{name} is {size}, and the data has {problem.target.num_data} examples: give a "
            "smaller one, or None for all of them."
        )
