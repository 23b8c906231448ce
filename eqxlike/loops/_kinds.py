"""The kinds of loop."""


def check_kind(kind: str, kinds: tuple[str, ...]) -> None:
    """Raises `ValueError` unless `kind` is one of `kinds`."""
    if kind not in kinds:
        raise ValueError(f"kind must be one of {', '.join(map(repr, kinds))}; got {kind!r}.")
