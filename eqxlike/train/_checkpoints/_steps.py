"""Checkpoints beside each other in a folder, each named by its step."""

import os
import pathlib
import re

from ._files import check_files
from ._manifest import NAME, read_manifest

_PATTERN = re.compile(r"step_(\d+)")


def name_of(step: int) -> str:
    """The name of the checkpoint of a step: in the order of the names is that of the steps."""
    return f"step_{step:09d}"


def steps_in(folder: pathlib.Path) -> dict[int, pathlib.Path]:
    """The checkpoints in a folder by their steps, newest first, whole or not."""
    try:
        entries = os.listdir(folder)
    except FileNotFoundError:
        return {}
    matches = [match for match in map(_PATTERN.fullmatch, entries) if match]
    found = {int(match[1]): folder / match[0] for match in matches if (folder / match[0]).is_dir()}
    return {step: found[step] for step in sorted(found, reverse=True)}


def newest_whole_near(path: pathlib.Path) -> pathlib.Path | None:
    """The newest checkpoint whose files are all as they were written: beside a checkpoint in its
    folder, or in a folder that is none.
    """
    folder = path.parent if _PATTERN.fullmatch(path.name) else path
    if not folder.is_dir():
        return None
    others = [other for other in steps_in(folder).values() if other != path]
    return next((other for other in others if _is_whole(other)), None)


def _is_whole(path: pathlib.Path) -> bool:
    try:
        check_files(path, read_manifest(path))
    except (ValueError, OSError):
        return False
    return (path / NAME).exists()
