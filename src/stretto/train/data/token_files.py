# SPDX-License-Identifier: Apache-2.0
"""Opens and checks files of token ids in nanoGPT's and Megatron-LM's formats."""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from stretto.cluster import reading
from stretto.train.data.files import cut_short, file_size, read_head
from stretto.train.data.stream import Segment, TokenStream

TOKEN_DTYPES = {"uint16": "<u2", "uint32": "<u4", "int64": "<i8"}
NANOGPT_HEAD_BYTES = 4096
LLMC_MAGIC = 20240520

MEGATRON_MAGIC = b"MMIDIDX\x00\x00"
MEGATRON_OLD_MAGIC = b"TNTIDX\x00\x00"
MEGATRON_HEADER = struct.Struct("<9sQBQQ")  # magic, version, dtype code, sequences, document indices
MEGATRON_DTYPES = {1: "|u1", 2: "|i1", 3: "<i2", 4: "<i4", 5: "<i8", 6: "<f8", 7: "<f4", 8: "<u2"}
CHUNK_ENTRIES = 1 << 20  # entries of an index table that are checked at a time; bounds the check's memory


def open_nanogpt(files: Sequence[Path], token_dtype: str) -> TokenStream:
    """Open nanoGPT's files: only raw little-endian ids. Raises ValueError if a file cannot have this format."""
    if token_dtype not in TOKEN_DTYPES:
        raise ValueError(f"token_dtype={token_dtype!r} is not one of {', '.join(TOKEN_DTYPES)}")
    return TokenStream(_nanogpt_segment(file, token_dtype) for file in files)


def open_megatron(files: Sequence[Path]) -> TokenStream:
    """Open Megatron-LM's .bin files, each with its .idx: the sequences of all documents in one stream.

    Checks the whole index, and that it fits the size of the .bin. Raises ValueError if the two do not fit.
    """
    return TokenStream(_megatron_segment(file) for file in files)


def _nanogpt_segment(path: Path, token_dtype: str) -> Segment:
    dtype = np.dtype(TOKEN_DTYPES[token_dtype])
    size = file_size(path)
    if size % dtype.itemsize:
        raise ValueError(
            f"{path}: has {size} bytes, not a multiple of the {dtype.itemsize} bytes of a {token_dtype}: "
            f"it is truncated (whole ids take {size - size % dtype.itemsize}) or of another type"
        )
    head = read_head(path, NANOGPT_HEAD_BYTES)
    if head[:8] == struct.pack("<ii", LLMC_MAGIC, 1):
        raise ValueError(f"{path}: begins with llm.c's header of 1024 bytes; a nanoGPT file holds only ids")
    if len(head) == NANOGPT_HEAD_BYTES and (wider := _wider_dtype(head, dtype)):
        raise ValueError(
            f"{path}: as {token_dtype}, every second id is 0 or hardly more: it holds {wider}: "
            f"set token_dtype to {wider!r}"
        )
    return Segment(path, dtype.str, size // dtype.itemsize)


def _wider_dtype(head: bytes, dtype: np.dtype) -> str | None:
    """Find the dtype of ids that are wider than `dtype`, if the first bytes of the file show that they are."""
    for name, wider in reversed(TOKEN_DTYPES.items()):
        if np.dtype(wider).itemsize > dtype.itemsize:
            words = np.frombuffer(head, dtype=dtype).reshape(-1, np.dtype(wider).itemsize // dtype.itemsize)
            lowest, rest = words[:, 0], words[:, 1:]
            # Ids of a vocabulary above 16 bits have small high halves, and low halves of any value.
            is_large = dtype.itemsize == 2 and lowest.max() >= 1 << 12 and rest[:, 0].max() < 16
            if 2 * np.count_nonzero(lowest) >= len(lowest) and not rest[:, 1:].any() and (is_large or not rest.any()):
                return name
    return None


def _megatron_segment(path: Path) -> Segment:
    index = _read_megatron_header(path.with_suffix(".idx"), path.name)
    data_size = file_size(path)
    data_end = index.check_sequences(data_size)
    index.check_documents()
    if data_end != data_size:
        raise ValueError(f"{path}: has {data_size} bytes, but its index describes {data_end}: they are not of one run")
    return Segment(path, index.dtype, data_end // np.dtype(index.dtype).itemsize)


@dataclass(frozen=True)
class _MegatronIndex:
    """An index with a valid header and the size that the header implies.

    After the header: `sequences` int32 lengths in tokens, `sequences` int64 positions in bytes of the .bin,
    `documents` int64 numbers of the sequences at which documents begin.
    """

    path: Path
    dtype: str
    sequences: int
    documents: int

    @property
    def size(self) -> int:
        """The file's size in bytes."""
        return MEGATRON_HEADER.size + self.sequences * (4 + 8) + self.documents * 8

    def check_sequences(self, data_size: int) -> int:
        """Find the end of the last sequence in bytes. Raises ValueError unless all are contiguous in `data_size`."""
        itemsize = np.dtype(self.dtype).itemsize
        end = 0
        for first in range(0, self.sequences, CHUNK_ENTRIES):
            count = min(CHUNK_ENTRIES, self.sequences - first)
            sizes = self._table("<i4", 4 * first, count)
            if sizes.min() < 0:
                at = int(np.argmax(sizes < 0))
                raise ValueError(f"{self.path}: sequence {first + at} has {sizes[at]} tokens, less than none")
            ends = end + np.cumsum(sizes * itemsize)
            starts = ends - sizes * itemsize
            pointers = self._table("<i8", 4 * self.sequences + 8 * first, count)
            if (pointers != starts).any():
                at = int(np.argmax(pointers != starts))
                raise ValueError(
                    f"{self.path}: sequence {first + at} begins at byte {pointers[at]}, "
                    f"but the one before it ends at {starts[at]}"
                )
            end = int(ends[-1])
            if end > data_size:
                raise ValueError(
                    f"{self.path.with_suffix('.bin')}: truncated: has {data_size} bytes, but by its index "
                    f"the first {first + count} of {self.sequences} sequences take {end}"
                )
        return end

    def check_documents(self) -> None:
        """Raise ValueError unless the document indices rise from 0 to the number of sequences."""
        previous = 0
        for first in range(0, self.documents, CHUNK_ENTRIES):
            count = min(CHUNK_ENTRIES, self.documents - first)
            indices = self._table("<i8", 12 * self.sequences + 8 * first, count)
            wrong = (np.diff(indices, prepend=previous) < 0) | (indices > self.sequences)
            if wrong.any():
                at = int(np.argmax(wrong))
                raise ValueError(
                    f"{self.path}: document index {first + at} is {indices[at]}; they rise from 0 to {self.sequences}"
                )
            previous = int(indices[-1])

    def _table(self, dtype: str, offset: int, count: int) -> NDArray[np.int64]:
        """Read `count` entries at `offset` bytes after the header."""
        with reading(self.path):
            entries = np.fromfile(self.path, dtype=dtype, count=count, offset=MEGATRON_HEADER.size + offset)
        if len(entries) < count:
            raise cut_short(self.path, file_size(self.path), self.size)
        return entries.astype(np.int64)


def _read_megatron_header(path: Path, data_name: str) -> _MegatronIndex:
    size = file_size(path)
    with reading(path), path.open("rb") as file:
        head = file.read(MEGATRON_HEADER.size)
    if head.startswith(MEGATRON_OLD_MAGIC):
        raise ValueError(f"{path}: is of Megatron-LM's old format: write the data again as 'mmap'")
    if not head.startswith(MEGATRON_MAGIC):
        raise ValueError(
            f"{path}: is not a Megatron-LM index: it begins with {head[:9]!r}, not {MEGATRON_MAGIC!r} "
            f"(if {data_name} holds raw ids, set format to 'nanogpt')"
        )
    if size < MEGATRON_HEADER.size:
        raise ValueError(f"{path}: truncated: has {size} bytes of a header of {MEGATRON_HEADER.size}")
    _, version, code, sequences, documents = MEGATRON_HEADER.unpack(head)
    if version != 1:
        raise ValueError(f"{path}: is of version {version}; the known version is 1")
    if code not in MEGATRON_DTYPES:
        raise ValueError(f"{path}: dtype code {code} is unknown; the codes are 1 to {max(MEGATRON_DTYPES)}")
    dtype = np.dtype(MEGATRON_DTYPES[code])
    if dtype.kind == "f":
        raise ValueError(f"{path}: dtype code {code} means {dtype.name}; token ids are integers")
    if sequences == 0:
        raise ValueError(f"{path}: describes no sequences")
    # From here on, the counts are bounded by the size of a file that is there.
    expected = MEGATRON_HEADER.size + sequences * (4 + 8) + documents * 8
    if size != expected:
        is_multimodal = size == expected + sequences  # whose sequences have a byte each, their mode
        fault = "multimodal" if is_multimodal else "truncated" if size < expected else "followed by something else"
        raise ValueError(
            f"{path}: {fault}: has {size} bytes, but {sequences} sequences and {documents} document indices "
            f"take {expected}"
        )
    return _MegatronIndex(path, dtype.str, sequences, documents)
