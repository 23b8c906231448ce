"""Exceptions as the text that stands in a row."""


def described(error: Exception) -> str:
    """The type, the message and the notes of an exception."""
    name = type(error).__name__
    lines = [f"{name}: {error}" if str(error) else name, *getattr(error, "__notes__", ())]
    return "\n".join(lines)
