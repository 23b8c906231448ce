"""The file of an exported program: an identifying header, the inputs and outputs, and the program.

    magic    16 bytes
    prefix   format, length of the header and of the program (little-endian, 4, 8 and 8 bytes)
    checksum sha256 of all the rest, 32 bytes
    header   JSON
    program  StableHLO, as `jax.export` serialises it

The first three are the same in all future formats, so that a newer file differs from a damaged one.
The header is only data, and reading executes nothing in the file.
"""

import dataclasses
import hashlib
import json
import pathlib
import struct
from typing import Any

from .._pytree import open_to_replace
from ._form import Form, NodeForm, from_plain, to_plain

FORMAT = 1
_MAGIC = b"\x89eqxlike.export\n"
_PREFIX = struct.Struct("<IQQ")
_CHECKSUM_SIZE = hashlib.sha256().digest_size
_START = len(_MAGIC) + _PREFIX.size + _CHECKSUM_SIZE


@dataclasses.dataclass(frozen=True)
class Header:
    """The description of a program.

    - `name`: the name of the function.
    - `parameters`: the names of its arguments.
    - `inputs`, `outputs`: their forms; that of the inputs is a tuple.
    - `platforms`: where it runs.
    - `vjp_order`: how many times it can be differentiated.
    - `calling_convention_version`: that of `jax.export`.
    - `versions`: the versions of the libraries that made it.
    """

    name: str
    parameters: tuple[str, ...]
    inputs: NodeForm
    outputs: Form
    platforms: tuple[str, ...]
    vjp_order: int
    calling_convention_version: int
    versions: dict[str, str]


def write(path: pathlib.Path, header: Header, program: bytes) -> None:
    """Replaces the file at `path` as a whole.

    **Raises:** `OSError` if it cannot be written.
    """
    forms = {"inputs": to_plain(header.inputs), "outputs": to_plain(header.outputs)}
    text = json.dumps(vars(header) | forms).encode()
    prefix = _PREFIX.pack(FORMAT, len(text), len(program))
    with open_to_replace(path) as file:
        for part in (_MAGIC, prefix, _checksum(prefix, text, program), text, program):
            file.write(part)


def read(path: pathlib.Path) -> tuple[Header, bytes]:
    """Reads the file at `path`.

    **Raises:** `OSError` if it cannot be read; `ValueError` if it is another kind of file, damaged
    or of a newer format.
    """
    content = path.read_bytes()
    if content[: len(_MAGIC)] != _MAGIC[: len(content)] or not content:
        raise ValueError(f"{path} is not an exported program: give a file that `save` has written.")
    if len(content) < _START:
        raise ValueError(f"{path} is cut off: it ends after {len(content)} bytes.")
    prefix = content[len(_MAGIC) : len(_MAGIC) + _PREFIX.size]
    version, header_size, program_size = _PREFIX.unpack(prefix)
    size = _START + header_size + program_size
    if len(content) < size:
        raise ValueError(f"{path} is cut off: it should have {size} bytes, and has {len(content)}.")
    text, program = content[_START : _START + header_size], content[_START + header_size :]
    if _checksum(prefix, text, program) != content[_START - _CHECKSUM_SIZE : _START]:
        raise ValueError(f"{path} is damaged: its checksum is not that of what it holds.")
    if version > FORMAT:
        raise ValueError(
            f"{path} was written by a newer version of eqxlike, in format {version}; this one "
            f"reads formats up to {FORMAT}: update eqxlike, or export again."
        )
    try:
        return _header_from(json.loads(text)), program
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        raise ValueError(f"{path} is damaged: its header tells of no program.") from None


def _checksum(*parts: bytes) -> bytes:
    checksum = hashlib.sha256()
    for part in parts:
        checksum.update(part)
    return checksum.digest()


def _header_from(plain: dict[str, Any]) -> Header:
    read: dict[str, Any] = {name: from_plain(plain[name]) for name in ("inputs", "outputs")}
    read |= {name: tuple(map(str, plain[name])) for name in ("parameters", "platforms")}
    read |= {name: int(plain[name]) for name in ("vjp_order", "calling_convention_version")}
    read["versions"] = {name: str(version) for name, version in plain["versions"].items()}
    header = Header(**plain | read)
    inputs = header.inputs
    if not isinstance(inputs, NodeForm) or len(inputs.children) != len(header.parameters):
        raise ValueError(inputs)
    if len(set(header.parameters)) != len(header.parameters):
        raise ValueError(header.parameters)
    if not isinstance(header.name, str) or b"\0" in header.name.encode():
        # JAX uses this as the name of the program, and accepts no other.
        raise ValueError(header.name)
    return header
