# SPDX-License-Identifier: Apache-2.0
"""`python -m lab flips`: flips random bits of checkpoints and exported weights, one at a time, and sees each found.

A flip counts as found by `stretto checkpoint verify` if that names the file, the tensor (or the file's header or index)
and a range of bytes with the flip in it; and as found in use if a resumed run, or the import of weights, is refused
with the names of file and tensor. A run cannot detect damage to a file that it does not read (torch's own index).
"""

import io
import random
import struct
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from stretto.bench.settings import Option
from stretto.quantities import require_least

if TYPE_CHECKING:
    from stretto.models import GPTConfig


@dataclass(frozen=True)
class FlipsSetting:
    """Number of bits that `python -m lab flips` flips, and the seed of where."""

    flips: Annotated[int, Option("Bits to flip, over all formats and places.")] = 500
    seed: Annotated[int | None, Option("Seed of where (default: a random one, which is printed).")] = None

    def __post_init__(self) -> None:
        require_least(1, flips=self.flips)


@dataclass(frozen=True)
class _Target:
    """Files of one kind in one format. path: is verified and used; pattern: of the files that are damaged.

    use: loads it, and raises ValueError if it is damaged; None if nothing but `verify` reads these files.
    """

    format: str
    what: str
    path: Path
    pattern: str
    use: Callable[[Path], Any] | None


@dataclass(frozen=True)
class _Bytes:
    """Bytes of a file, and whether a run reads them.

    name: of the tensor, as `verify` has it; used_as: as a run has it. Both are None where the bytes are no tensor's.
    has_container: they are checked by the CRCs in torch's zip container, which its records alone have.
    """

    start: int
    stop: int
    name: str | None
    used_as: str | None
    is_read: bool
    has_container: bool = False


def bench_flips(setting: FlipsSetting, out: Path) -> dict[str, Any]:
    """Flip bits in checkpoints of four formats; count those that are found, by name."""
    from stretto.bench.harness import Column, print_table, write_result

    seed = random.randrange(1 << 32) if setting.seed is None else setting.seed
    print(f"seed {seed}", flush=True)
    generator = random.Random(seed)
    with tempfile.TemporaryDirectory(prefix="stretto-flips-") as folder, _one_rank():
        places = _write_all(Path(folder))
        rows = [_flip_all(place, count, generator) for place, count in _share(places, setting.flips)]
    columns = (
        Column("format", "format"),
        Column("what", "files"),
        Column("bytes", "bytes", "{:,}"),
        Column("flips", "bits flipped"),
        Column("verified", "found and named by verify"),
        Column("used", "found and named in use"),
        Column("not_read", "not read in use"),
    )
    print_table(f"{setting.flips} flipped bits", columns, rows)
    missed = [flip for row in rows for flip in row["missed"]]
    write_result(out, "flips", columns, rows, seed=seed)
    result: dict[str, Any] = {"seed": seed, "rows": rows}
    return result | ({"failure": f"not found or not named: {missed}"} if missed else {})


@contextmanager
def _one_rank() -> Iterator[None]:
    """Have a process group of this process alone in the block."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _share(places: list[_Target], flips: int) -> Iterator[tuple[_Target, int]]:
    """Distribute the flips over the targets, as evenly as whole numbers allow."""
    for number, place in enumerate(places):
        yield place, flips * (number + 1) // len(places) - flips * number // len(places)


def _flip_all(place: _Target, count: int, generator: random.Random) -> dict[str, Any]:
    from stretto.train.checkpoint.verification import verify

    files = sorted(file for file in place.path.parent.glob(place.pattern) if file.is_file())
    parts = {file: _parts_of(place, file) for file in files}
    sizes = [file.stat().st_size for file in files]
    row: dict[str, Any] = {"format": place.format, "what": place.what, "bytes": sum(sizes), "flips": count}
    verified = used = not_read = 0
    missed = []
    for _ in range(count):
        (file,) = generator.choices(files, sizes)
        bit = generator.randrange(8 * file.stat().st_size)
        part = next(each for each in parts[file] if each.start <= bit // 8 < each.stop)
        if part.has_container:
            bit = 8 * generator.choice(_bytes_of_records(file, part)) + bit % 8
        with _flipped(file, bit):
            is_named = any(
                (damage.file, damage.tensor) == (file.name, part.name) and damage.start <= bit // 8 < damage.stop
                for result in verify(place.path)
                for damage in result.damages
            )
            verified += is_named
            is_used = place.use is not None and part.is_read
            is_refused = is_used and _is_refused(place, file, part)
            used += is_refused
            not_read += not is_used
        if not is_named or (is_used and not is_refused):
            missed.append({"file": f"{place.format}, {file.name}", "bit": bit, "tensor": part.name})
    if any(result.damages for result in verify(place.path)):
        raise AssertionError(f"{place.path} is damaged after all bits were put back")
    if place.use is not None:
        place.use(place.path)
    return row | {"verified": verified, "used": used, "not_read": not_read, "missed": missed}


def _is_refused(place: _Target, file: Path, part: _Bytes) -> bool:
    """True if the use of a damaged file ends in an error that names the file and the tensor."""
    assert place.use is not None
    try:
        place.use(place.path)
    except ValueError as error:
        return file.name in str(error) and (part.used_as or "") in str(error)
    return False


@contextmanager
def _flipped(file: Path, bit: int) -> Iterator[None]:
    """Flip a bit of a file in the block, and put it back."""
    content = bytearray(file.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    file.write_bytes(content)
    try:
        yield
    finally:
        content[bit // 8] ^= 1 << bit % 8
        file.write_bytes(content)


def _parts_of(place: _Target, file: Path) -> list[_Bytes]:
    """The meaning of an undamaged file's bytes, by range."""
    from stretto.train.checkpoint.safetensors_checksums import read_header
    from stretto.train.checkpoint.torch_format import read_index, read_pieces

    size = file.stat().st_size
    if file.suffix == ".safetensors":
        tensors = sorted(read_header(file).values(), key=lambda tensor: tensor.start)
        header = _Bytes(0, tensors[0].start, None, None, True)
        return [header, *(_Bytes(each.start, each.stop, each.name, each.name, True) for each in tensors)]
    if file.suffix != ".distcp":
        return [_Bytes(0, size, None, None, True)]
    used = {
        (chunk.file, chunk.start): name
        for name, entry in read_index(place.path).tensors.items()
        for chunk in entry.chunks
    }
    checked = {name for name, entry in read_index(place.path).tensors.items() if entry.chunks[0].checksum is not None}
    found = []
    for piece in read_pieces(place.path):
        if piece.place.file == file.name:
            name = used.get((file.name, piece.place.start))
            stop = piece.place.start + piece.place.bytes
            has_container = name not in checked
            found.append(_Bytes(piece.place.start, stop, piece.tensor, name, name is not None, has_container))
    return found


def _bytes_of_records(file: Path, part: _Bytes) -> list[int]:
    """The bytes of a file that are in records of a container."""
    content = file.read_bytes()[part.start : part.stop]
    found: list[int] = []
    with zipfile.ZipFile(io.BytesIO(content)) as container:
        for record in container.infolist():
            lengths = struct.unpack_from("<HH", content, record.header_offset + 26)
            first = part.start + record.header_offset + 30 + sum(lengths)
            found += range(first, first + record.file_size)
    return found


def _write_all(folder: Path) -> list[_Target]:
    """Write a small model's training state in all formats."""
    import torch

    from stretto.models import GPTConfig

    torch.manual_seed(0)
    config = GPTConfig(layers=2, hidden=32, heads=4, kv_heads=2, vocab=101, max_seq_len=16, tie_embeddings=False)
    checkpoint = folder / "run" / "checkpoints" / "step-00000001"
    resume = _write_checkpoint(checkpoint, config)
    old = folder / "old" / "checkpoints" / "step-00000001"
    _write_format_1(checkpoint, old)
    of_torch = folder / "of-torch"
    _write_torch_folder(of_torch, config)
    from stretto.train.checkpoint.export import export_safetensors

    one, several = folder / "one.safetensors", folder / "several.safetensors"
    export_safetensors(checkpoint, one)
    index = export_safetensors(checkpoint, several, max_file_bytes=40_000)[-1]
    load = _importer(config)
    return [
        _Target("Stretto, format 2", "shards", checkpoint, f"{checkpoint.name}/*.distcp", resume),
        _Target("Stretto, format 2", "metadata.json", checkpoint, f"{checkpoint.name}/metadata.json", resume),
        _Target("Stretto, format 2", ".metadata (torch's index)", checkpoint, f"{checkpoint.name}/.metadata", None),
        _Target("Stretto, format 1", "shards", old, f"{old.name}/*.distcp", resume),
        _Target("torch.distributed.checkpoint", "shards", of_torch, f"{of_torch.name}/*.distcp", resume),
        _Target("safetensors", "one file", one, one.name, load),
        _Target("safetensors", "several files", index, "several-*.safetensors", load),
        _Target("safetensors", "index of several files", index, index.name, load),
    ]


def _write_checkpoint(path: Path, config: "GPTConfig") -> Callable[[Path], Any]:
    """Write a checkpoint after a step, in two files. Returns a function that resumes one, whatever its format."""
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.optim import AdamW

    from stretto.models import GPT
    from stretto.parallel import Grid, parallelize
    from stretto.train.checkpoint import load_checkpoint, training_state
    from stretto.train.checkpoint.storage import StateSavePlanner
    from stretto.train.checkpoint.writing import CheckpointWriter
    from stretto.train.optimizer import ShardOptimizer

    model = parallelize(GPT(config), Grid(device="cpu"))
    optimizer = ShardOptimizer(model, lambda groups: AdamW(groups, lr=0.1), weight_decay=0.1)
    tokens = torch.randint(config.vocab, (4, 16))
    model(tokens, tokens).backward()
    optimizer.step(0.1)
    description = {"step": 1, "torch": torch.__version__, "optimizer": "adamw", "model": {}, "run": {}, "data": {}}
    writer = CheckpointWriter(path, description, threads=2)
    path.parent.mkdir(parents=True)
    dcp.save(training_state(model, optimizer), storage_writer=writer, planner=StateSavePlanner())
    return lambda found: load_checkpoint(found, model, optimizer)


def _write_format_1(checkpoint: Path, path: Path) -> None:
    """Copy a checkpoint, with the index that Stretto wrote before it had checksums."""
    import shutil

    from stretto.train.checkpoint.metadata import METADATA_FILE, WITHOUT_CHECKSUMS, read_metadata

    shutil.copytree(checkpoint, path)
    metadata = read_metadata(checkpoint)
    tensors = {
        name: entry.model_copy(
            update={"chunks": tuple(chunk.model_copy(update={"checksum": None}) for chunk in entry.chunks)}
        )
        for name, entry in metadata.tensors.items()
    }
    changed = {"format": WITHOUT_CHECKSUMS, "checksum": None, "tensors": tensors}
    (path / METADATA_FILE).write_bytes(metadata.model_copy(update=changed).to_bytes())


def _write_torch_folder(path: Path, config: "GPTConfig") -> None:
    """Write a state as an FSDP2 script does, without Stretto."""
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

    from stretto.models import GPT

    model = GPT(config)
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.randint(config.vocab, (4, 16))
    model(tokens, tokens).backward()
    optimizer.step()
    weights, state = get_state_dict(model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True))
    dcp.save({"model": weights, "optim": state}, checkpoint_id=path)


def _importer(config: "GPTConfig") -> Callable[[Path], Any]:
    from stretto.models import GPT
    from stretto.train.checkpoint.weights import import_safetensors

    model = GPT(config)
    return lambda file: import_safetensors(model, file)
