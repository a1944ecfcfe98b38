# SPDX-License-Identifier: Apache-2.0
"""Verifies checkpoints and exported models on the disk: reads all their bytes, and compares them with checksums.

It lists what has no checksum. Needs no torch, unless a folder has torch's index alone.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from stretto.cluster import read_bounded
from stretto.huggingface.folder import WEIGHTS_FILES
from stretto.suggestions import did_you_mean_file
from stretto.train.checkpoint.folders import checkpoints_by_step
from stretto.train.checkpoint.integrity import Damage, DamagedError, file_checksum, read_range
from stretto.train.checkpoint.metadata import MAX_METADATA_BYTES, METADATA_FILE, WITHOUT_CHECKSUMS, parse_metadata
from stretto.train.checkpoint.pieces import READERS, StoredPiece, check_piece
from stretto.train.checkpoint.safetensors_checksums import BLOCK, StoredTensor, header_bytes, read_header
from stretto.train.checkpoint.torch_format import INDEX_FILE, is_torch_checkpoint, read_pieces
from stretto.train.checkpoint.weights import files_of_index

_BLOCKS_AT_ONCE = 16
_OVERLAP = "two pieces overlap"


@dataclass
class VerificationResult:
    """The result for `path`. kind: its format; bytes: how many were compared with a checksum.

    damages: what is not as it was written. unverified: what nothing could be compared with, in words.
    """

    path: Path
    kind: str
    bytes: int = 0
    tensors: int = 0
    damages: list[Damage] = field(default_factory=list)
    unverified: list[str] = field(default_factory=list)

    def describe(self) -> str:
        """A line on what was found, and one on each damage and on what could not be verified."""
        verdict = "DAMAGED" if self.damages else "whole" if self.bytes else "not verified"
        lines = [f"{self.path}: {verdict} ({self.kind}, {self.tensors} tensors, {self.bytes:,} bytes verified)"]
        lines += [f"  damaged: {damage}" for damage in self.damages]
        lines += [f"  not verified: {text}" for text in self.unverified]
        return "\n".join(lines)


def verify(path: Path) -> list[VerificationResult]:
    """Verify a checkpoint, all checkpoints of a run, a folder of torch's, or safetensors files.

    Bytes that the disk does not return (EIO) are damaged. Raises ValueError if there is none of these at `path`, and
    PermissionError for what this user may not read.
    """
    if path.is_dir():
        if (path / "checkpoints").is_dir():
            found = [_verify_while_run_may_delete(each) for each in checkpoints_by_step(path)]
            if not found:
                raise ValueError(f"the run in {path} has no checkpoint")
            return found
        if is_torch_checkpoint(path):
            return [_verify_torch_folder(path)]
        if (path / METADATA_FILE).is_file() or (path / INDEX_FILE).is_file():
            return [_verify_checkpoint(path)]
        if index := next((path / name for name in reversed(WEIGHTS_FILES) if (path / name).is_file()), None):
            return [_verify_weights(path, index)]
        if files := sorted(path.glob("*.safetensors")):
            return [_verify_files(path, files)]
        raise ValueError(f"{path} has no checkpoint, no run and no safetensors file")
    if not path.exists():
        raise ValueError(f"there is nothing at {path}{did_you_mean_file(path)}")
    if not path.is_file():
        raise ValueError(f"{path} is no folder and no regular file")
    if path.name.endswith((".safetensors", ".safetensors.index.json")):
        return [_verify_weights(path, path)]
    raise ValueError(f"{path} is no checkpoint's folder and no safetensors file")


def _verify_while_run_may_delete(path: Path) -> VerificationResult:
    """Verify a checkpoint of a run, which may be training and delete it concurrently: then it is not damaged."""
    result = _verify_checkpoint(path)
    if result.damages and not path.exists():
        return VerificationResult(path, "checkpoint", unverified=["all of it: it was deleted meanwhile"])
    return result


def _verify_checkpoint(path: Path) -> VerificationResult:
    """Verify a checkpoint of Stretto's: index, other files, and all pieces of the shard files."""
    file = path / METADATA_FILE
    if not file.is_file():
        damage = Damage(METADATA_FILE, None, 0, 0, "it is missing: the checkpoint is not complete")
        return VerificationResult(path, "checkpoint", damages=[damage])
    result = VerificationResult(path, "checkpoint")
    with _finding_damage(result, file):
        try:
            metadata = parse_metadata(file, read_bounded(file, MAX_METADATA_BYTES, "a checkpoint's index"))
        except ValueError as error:
            result.damages.append(Damage(file.name, None, 0, file.stat().st_size, str(error)))
    if result.damages:
        return result
    result = VerificationResult(path, f"format {metadata.format}, step {metadata.step}", tensors=len(metadata.tensors))
    pieces = [StoredPiece(name, chunk) for name, entry in metadata.tensors.items() for chunk in entry.chunks]
    if metadata.format == WITHOUT_CHECKSUMS:
        result.unverified.append(f"{METADATA_FILE} and {INDEX_FILE}, of which format 1 has no checksums")
    else:
        with _finding_damage(result, file):
            result.bytes += file.stat().st_size
    for name, stored in metadata.files.items():
        _verify_file(result, name, stored.bytes, stored.checksum)
    _verify_pieces(result, pieces)
    known = {METADATA_FILE, INDEX_FILE, *(piece.place.file for piece in pieces)}
    _list_unknown(result, known)
    return result


def _verify_torch_folder(path: Path) -> VerificationResult:
    """Verify what torch.distributed.checkpoint has written, by the CRCs in the containers of its files."""
    result = VerificationResult(path, "folder of torch.distributed.checkpoint")
    with _finding_damage(result, path / INDEX_FILE):
        pieces = read_pieces(path)
    if result.damages:
        return result
    result.tensors = len({piece.tensor for piece in pieces})
    result.unverified.append(f"{INDEX_FILE}, of which torch writes no checksum")
    _verify_pieces(result, pieces)
    _list_unknown(result, {INDEX_FILE, *(piece.place.file for piece in pieces)})
    return result


@contextmanager
def _finding_damage(result: VerificationResult, file: Path) -> Iterator[None]:
    """Note a file as damaged if the block finds it so, or cannot read it: the disk has lost its bytes, or it was
    deleted."""
    try:
        try:
            yield
        except DamagedError as error:
            result.damages.append(Damage(file.name, None, 0, file.stat().st_size, str(error)))
    except PermissionError:
        raise
    except OSError as error:
        result.damages.append(Damage(file.name, None, 0, 0, _cannot_be_read(error)))


def _cannot_be_read(error: OSError) -> str:
    return f"it cannot be read: {error.strerror or error}"


def _verify_file(result: VerificationResult, name: str, size: int, checksum: str) -> None:
    file = result.path / name
    with _finding_damage(result, file):
        there = file.stat().st_size if file.is_file() else None
        if there != size:
            found = "it is missing" if there is None else f"it has {there} bytes of {size}"
            result.damages.append(Damage(name, None, 0, size, found))
        elif (found := file_checksum(file)) != checksum:
            result.damages.append(Damage(name, None, 0, size, "the checksum differs", checksum, found))
        else:
            result.bytes += size


def _verify_pieces(result: VerificationResult, pieces: Sequence[StoredPiece]) -> None:
    """Verify pieces, several at a time, and that the files have no other bytes."""
    by_file: defaultdict[str, list[StoredPiece]] = defaultdict(list)
    for piece in pieces:
        by_file[piece.place.file].append(piece)
    unchecked = 0
    with ThreadPoolExecutor(READERS) as pool:
        for name, those in sorted(by_file.items()):
            those.sort(key=lambda piece: piece.place.start)
            file = result.path / name
            if not file.is_file():
                stop = max(piece.place.start + piece.place.bytes for piece in those)
                result.damages.append(Damage(name, None, 0, stop, "the file is missing"))
                continue
            gaps: list[Damage] = []
            with _finding_damage(result, file):
                gaps = list(_find_gaps(name, those, file.stat().st_size))
            result.damages += gaps
            if any(gap.reason == _OVERLAP for gap in gaps):  # a small file could demand any amount of reading
                continue
            for piece, (damage, has_checksum) in zip(those, pool.map(partial(_verify_piece, file), those), strict=True):
                unchecked += not has_checksum
                if damage is not None:
                    result.damages.append(damage)
                elif has_checksum:
                    result.bytes += piece.place.bytes
    if unchecked:
        result.unverified.append(f"the numbers of {unchecked} pieces, which were written without CRCs")


def _verify_piece(file: Path, piece: StoredPiece) -> tuple[Damage | None, bool]:
    place = piece.place
    try:
        if place.start + place.bytes <= (size := file.stat().st_size):
            with open(file, "rb", buffering=0) as opened:
                return check_piece(piece, read_range(opened, place.start, place.bytes))
        reason = f"the file ends at byte {size}"  # nothing is allocated for a size that is wrong
    except PermissionError:
        raise
    except OSError as error:
        reason = _cannot_be_read(error)
    return Damage(place.file, piece.tensor, place.start, place.start + place.bytes, reason), True


def _find_gaps(name: str, pieces: Sequence[StoredPiece], size: int) -> Iterator[Damage]:
    """Find bytes of a file that no piece has, and pieces that overlap; these are in order."""
    at = 0
    for piece in pieces:
        if piece.place.start > at:
            yield Damage(name, None, at, piece.place.start, "the index has no piece there")
        if piece.place.start < at:
            yield Damage(name, piece.tensor, piece.place.start, at, _OVERLAP)
        at = max(at, piece.place.start + piece.place.bytes)
    if at < size:
        yield Damage(name, None, at, size, "the index has no piece there")


def _list_unknown(result: VerificationResult, known: set[str]) -> None:
    unknown = []
    with suppress(FileNotFoundError):  # the run has deleted the checkpoint since
        unknown = sorted(file.name for file in result.path.iterdir() if file.name not in known)
    result.unverified += [f"{name}, which the index does not have" for name in unknown]


def _verify_weights(path: Path, file: Path) -> VerificationResult:
    """Verify a safetensors file, or those of an index."""
    damaged = VerificationResult(path, "safetensors")
    with _finding_damage(damaged, file):
        return _verify_files(path, files_of_index(file))
    return damaged


def _verify_files(path: Path, files: Sequence[Path]) -> VerificationResult:
    result = VerificationResult(path, f"safetensors, {len(files)} file{'s' if len(files) > 1 else ''}")
    for file in files:
        if not file.is_file():
            result.damages.append(Damage(file.name, None, 0, 0, "the file is missing"))
            continue
        with _finding_damage(result, file):
            _verify_safetensors(result, file)
    return result


def _verify_safetensors(result: VerificationResult, file: Path) -> None:
    """Verify one safetensors file. Of one without checksums, the header and the file's length are compared."""
    size = file.stat().st_size
    tensors = sorted(read_header(file).values(), key=lambda each: (each.start, each.stop))
    result.tensors += len(tensors)
    damages = list(_find_gaps_between(file, tensors, size))
    has_checksums = bool(tensors) and all(tensor.checksums is not None for tensor in tensors)
    if has_checksums:
        damages += filter(None, map(_verify_tensor, tensors))
    else:
        result.unverified.append(f"{file.name}, which has no checksums: another program has written it")
    result.damages += damages
    result.bytes += size if has_checksums and not damages else 0


def _find_gaps_between(file: Path, tensors: Sequence[StoredTensor], size: int) -> Iterator[Damage]:
    """Find bytes behind a file's header that belong to no tensor, and tensors that overlap or exceed the file."""
    ends = [(None, header_bytes(file)), *((tensor.name, tensor.stop) for tensor in tensors)]
    for (name, stop), following in zip(ends, [*(each.start for each in tensors), size], strict=True):
        low, high = sorted((stop, following))
        if high > size:
            yield Damage(file.name, name, low, high, f"the file ends at byte {size}")
        elif stop < following:
            yield Damage(file.name, name, low, high, "the header has no tensor there")
        elif stop > following:
            yield Damage(file.name, name, low, high, "two tensors overlap")


def _verify_tensor(tensor: StoredTensor) -> Damage | None:
    step = _BLOCKS_AT_ONCE * BLOCK
    with open(tensor.file, "rb", buffering=0) as file:
        for begin in range(0, tensor.stop - tensor.start, step):
            length = min(step, tensor.stop - tensor.start - begin)
            content = read_range(file, tensor.start + begin, length)
            if len(content) < length:
                reason = f"the file ends at byte {tensor.start + begin + len(content)}"
                return Damage(tensor.file.name, tensor.name, tensor.start + begin, tensor.stop, reason)
            if damage := tensor.check(content, begin):
                return damage
    return None
