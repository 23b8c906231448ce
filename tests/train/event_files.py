"""Reads the files of TensorBoard by their format: records with checksums, each an event.

The records: https://www.tensorflow.org/tutorials/load_data/tfrecord. The checksum: CRC-32C, RFC
3720.
"""

import pathlib
import struct
from collections.abc import Iterator

from tensorboardX.proto.event_pb2 import Event, SessionLog


def scalars(folder: pathlib.Path) -> dict[str, list[tuple[int, float]]]:
    """For each tag its steps and values, in the order of the files' names, as TensorBoard shows
    them: where a session starts at a step, what came before it of that step or later is gone.
    """
    found: dict[str, list[tuple[int, float]]] = {}
    for path in sorted(folder.iterdir()):
        for event in map(Event.FromString, _records(path.read_bytes())):
            if event.session_log.status == SessionLog.START:
                found = {
                    tag: [point for point in points if point[0] < event.step]
                    for tag, points in found.items()
                }
            for value in event.summary.value:
                found.setdefault(value.tag, []).append((event.step, value.simple_value))
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
