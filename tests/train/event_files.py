"""Reads TensorBoard's event files. Each record is an event with checksums.

The format: https://www.tensorflow.org/tutorials/load_data/tfrecord.
"""

import pathlib
import struct
from collections.abc import Iterator

from tensorboardX.proto.event_pb2 import Event, SessionLog


def scalars(folder: pathlib.Path) -> dict[str, list[tuple[int, float]]]:
    """The steps and values of each tag, as TensorBoard shows them. Files are read in the order of
    their names. If a session starts at a step, earlier values of that and later steps are removed.
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
        # One checksum follows the length, and another follows the event.
        yield data[12 : 12 + length]
        data = data[16 + length :]
