"""Reads the files of TensorBoard by their format alone: records, checksums, and Protocol Buffers.

The records: https://www.tensorflow.org/tutorials/load_data/tfrecord. The checksum: CRC-32C, RFC
3720. The fields: `event.proto` and `summary.proto` of TensorBoard.
"""

import pathlib
import struct
from collections.abc import Iterator
from typing import Any


def scalars(folder: pathlib.Path) -> dict[str, list[tuple[int, float]]]:
    """For each tag its steps and values, in the order of the files' names, as TensorBoard shows
    them: where a session starts at a step, what came before it of that step or later is gone.
    """
    found: dict[str, list[tuple[int, float]]] = {}
    for path in sorted(folder.iterdir()):
        for event in map(dict, map(_fields, _records(path.read_bytes()))):
            step = event.get(2, 0)
            if 7 in event and dict(_fields(event[7])).get(1) == 1:  # session_log, START
                found = {tag: [p for p in points if p[0] < step] for tag, points in found.items()}
            for _, value in _fields(event.get(5, b"")):  # summary
                parts = dict(_fields(value))
                (number,) = struct.unpack("<f", parts[2])
                found.setdefault(parts[1].decode(), []).append((step, number))
    return found


def _records(data: bytes) -> Iterator[bytes]:
    while data:
        (length,) = struct.unpack_from("<Q", data)
        event, end = data[12 : 12 + length], 16 + length
        checksums = struct.unpack_from("<I", data, 8) + struct.unpack_from("<I", data, 12 + length)
        assert checksums == (_masked(_crc32c(data[:8])), _masked(_crc32c(event)))
        assert len(data) >= end
        yield event
        data = data[end:]


def _masked(checksum: int) -> int:
    return ((checksum >> 15 | checksum << 17) + 0xA282EAD8) & 0xFFFFFFFF


def _crc32c(data: bytes) -> int:
    checksum = 0xFFFFFFFF
    for byte in data:
        checksum ^= byte
        for _ in range(8):
            checksum = checksum >> 1 ^ (0x82F63B78 if checksum & 1 else 0)
    return checksum ^ 0xFFFFFFFF


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """The number of each field, and its value: a number, or bytes."""
    position = 0

    def varint() -> int:
        nonlocal position
        number = shift = 0
        while True:
            byte = data[position]
            position += 1
            number |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return number

    while position < len(data):
        field, kind = divmod(varint(), 8)
        if kind == 0:
            yield field, varint()
            continue
        length = {1: 8, 5: 4}.get(kind) or varint()
        yield field, data[position : position + length]
        position += length
