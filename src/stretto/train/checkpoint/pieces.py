# SPDX-License-Identifier: Apache-2.0
"""Reads pieces of shard files, each checked before it is used: by the index's checksum, else by torch's own CRCs.

Needs no torch.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from stretto.train.checkpoint.integrity import Damage, DamagedError, crc32, read_range, to_text
from stretto.train.checkpoint.metadata import StoredBox
from stretto.train.checkpoint.torch_container import Checked, check_container

READERS = 4  # threads that read pieces ahead
MAX_BYTES_AHEAD = 1 << 28  # of pieces that are read and not used yet, unless one is larger


@dataclass(frozen=True)
class StoredPiece:
    """A piece of a tensor: the tensor's name, for messages, and where its bytes are."""

    tensor: str | None
    place: StoredBox


def read_piece(folder: Path, piece: StoredPiece, threads: int | None = None) -> memoryview:
    """Read a piece's bytes. Raises DamagedError, which names file, tensor and bytes, if they are not what was written.

    threads: for the checksum; None for as many as this rank may use.
    """
    with open(folder / piece.place.file, "rb", buffering=0) as file:
        content = read_range(file, piece.place.start, piece.place.bytes)
    damage, _ = check_piece(piece, content, threads)
    if damage is not None:
        raise DamagedError(str(damage))
    return content


def check_piece(piece: StoredPiece, content: memoryview, threads: int | None = None) -> tuple[Damage | None, Checked]:
    """Check a piece's bytes. Returns what is damaged, if anything is, and how much could be checked."""
    place = piece.place
    start, stop = place.start, place.start + place.bytes
    if len(content) < place.bytes:
        reason = f"the file ends at byte {start + len(content)}"
        return Damage(place.file, piece.tensor, start, stop, reason), Checked.ALL
    if place.checksum is not None:
        found = to_text(crc32(content, threads))
        if found == place.checksum:
            return None, Checked.ALL
        return Damage(place.file, piece.tensor, start, stop, "the checksum differs", place.checksum, found), Checked.ALL
    checked, fault = check_container(content, threads)
    if fault is None:
        return None, checked
    # A damaged header may show elsewhere in the container, so all of the piece is named.
    reason = f"{fault.reason} (bytes {start + fault.start} to {start + fault.stop})"
    return Damage(place.file, piece.tensor, start, stop, reason, fault.expected, fault.found), checked


def read_ahead(folder: Path, pieces: Sequence[StoredPiece]) -> Iterator[memoryview]:
    """Read pieces as `read_piece` does, in this order, while their user works on those before."""
    waiting: deque[tuple[int, Future[memoryview]]] = deque()
    with ThreadPoolExecutor(READERS, thread_name_prefix="stretto-read") as pool:
        try:
            ahead = 0
            for piece in pieces:
                while waiting and ahead + piece.place.bytes > MAX_BYTES_AHEAD:
                    size, content = waiting.popleft()
                    yield content.result()
                    ahead -= size
                ahead += piece.place.bytes
                waiting.append((piece.place.bytes, pool.submit(read_piece, folder, piece)))
            while waiting:
                yield waiting.popleft()[1].result()
        finally:
            for _, content in waiting:
                content.cancel()
