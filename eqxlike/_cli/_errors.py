"""Errors that end a command with one line."""


class CommandError(Exception):
    """The command cannot do what it was asked; its message is one line for the person who asked."""
