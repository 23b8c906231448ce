"""The file format of exported programs: two lines, then the program serialised by `jax.export`.

The first line has a magic string and the SHA-256 of everything after this line. The second line is
JSON: the format number, and a description of the inputs and outputs of the program. Reading a file
executes no code.
"""

import dataclasses
import hashlib
import json
import pathlib
from typing import Any

from ..extend import Tree, from_plain, open_to_replace, to_plain
from ._descriptions import build

FORMAT = 1
_MAGIC = b"eqxlike.export "


@dataclasses.dataclass(frozen=True)
class Header:
    """The description of a program.

    - `name`: name of the function.
    - `inputs`: structure and array types of the inputs. The root has a child for each argument.
    - `outputs`: structure and array types of the outputs.
    - `platforms`: platforms on which the program runs.
    - `vjp_order`: how many times the program can be differentiated.
    - `calling_convention_version`: version of `jax.export`'s calling convention.
    - `versions`: maps the names of the libraries that exported the program to their versions.
    """

    name: str
    inputs: Tree
    outputs: Tree
    platforms: tuple[str, ...]
    vjp_order: int
    calling_convention_version: int
    versions: dict[str, str]

    @property
    def parameters(self) -> tuple[str, ...]:
        """The names of the arguments."""
        return tuple(self.inputs.node.child_names())


def write(path: pathlib.Path, header: Header, program: bytes) -> None:
    """Writes a program to `path`, and replaces an existing file atomically.

    **Raises:** `OSError` if the file cannot be written.
    """
    trees = {"inputs": to_plain(header.inputs), "outputs": to_plain(header.outputs)}
    content = json.dumps({"format": FORMAT} | vars(header) | trees).encode() + b"\n" + program
    with open_to_replace(path) as file:
        file.write(_MAGIC + _checksum(content) + b"\n" + content)


def read(path: pathlib.Path) -> tuple[Header, bytes]:
    """Reads a program from `path`.

    **Raises:**

    - `OSError` if the file cannot be read.
    - `ValueError` if the file is not an exported program, is damaged, or has a newer format.
    """
    first, _, content = path.read_bytes().partition(b"\n")
    if not first.startswith(_MAGIC):
        raise ValueError(f"{path} is not an exported program: pass a file that `save` has written.")
    if first != _MAGIC + _checksum(content):
        raise ValueError(f"{path} is cut off or damaged: its checksum differs from its content.")
    text, _, program = content.partition(b"\n")
    try:
        plain = json.loads(text)
        version = plain.pop("format")
        header = _header_from(plain) if version <= FORMAT else None
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError):
        raise ValueError(f"{path} is damaged: its header does not describe a program.") from None
    if header is None:
        raise ValueError(
            f"{path} was written by a newer version of eqxlike, in format {version}; this one "
            f"reads formats up to {FORMAT}: update eqxlike, or export again."
        )
    return header, program


def _checksum(content: bytes) -> bytes:
    return hashlib.sha256(content).hexdigest().encode()


def _header_from(plain: dict[str, Any]) -> Header:
    """Builds the header from JSON data. Raises an error of any type if the data are invalid."""
    read: dict[str, Any] = {name: from_plain(plain[name]) for name in ("inputs", "outputs")}
    read |= {name: int(plain[name]) for name in ("vjp_order", "calling_convention_version")}
    read["platforms"] = tuple(map(str, plain["platforms"]))
    read["versions"] = {name: str(version) for name, version in plain["versions"].items()}
    header = Header(**plain | read)
    for tree in (header.inputs, header.outputs):
        build(tree.node, iter(tree.arrays))
    if len(set(header.parameters)) != len(header.inputs.node.children):
        raise ValueError(header.parameters)
    if b"\0" in header.name.encode():
        # JAX names the program after the function, and this name may not contain a null byte.
        raise ValueError(header.name)
    return header
