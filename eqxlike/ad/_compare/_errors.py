"""Exceptions as the text that stands in a row."""


def described(error: Exception) -> str:
    """The type, the message and the notes of an exception."""
    name = type(error).__name__
    # JAX puts a line of dashes before a note on its traceback, which is not shown.
    notes = [note for note in getattr(error, "__notes__", ()) if not note.startswith("---")]
    return "\n".join([f"{name}: {error}" if str(error) else name, *notes])
