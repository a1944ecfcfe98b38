# SPDX-License-Identifier: Apache-2.0
"""`stretto checkpoint`: verifies checkpoints and exported models, and shows what is in them; and `stretto export`."""

from collections.abc import Mapping
from dataclasses import asdict
from datetime import datetime
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stretto.atomic_files import require_writable_folder
from stretto.cli.commands import App
from stretto.cli.console import Json, print_json, refusing_bad_input

if TYPE_CHECKING:
    from stretto.train.checkpoint.metadata import CheckpointMetadata

DAMAGED = 1

app = App(help="Verify, list and show checkpoints.")

Checkpoint = Annotated[
    Path, typer.Argument(metavar="RUN_OR_CHECKPOINT", help="A run's folder (its newest checkpoint) or a checkpoint's.")
]


def export(
    checkpoint: Checkpoint,
    to: Annotated[
        Path,
        typer.Option(
            "--to",
            metavar="FILE.safetensors|FOLDER",
            help="The file to write, or, for a Hugging Face model, a new folder.",
        ),
    ],
    max_file_gigabytes: Annotated[
        float | None,
        typer.Option(
            min=1e-6, help="Split into files of at most this size (10^9 bytes), with an index; 5 for a folder."
        ),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            help="float64, float32, float16 or bfloat16 (default: the checkpoint's; for a folder, config.json's)."
        ),
    ] = None,
    pretrained: Annotated[
        Path | None,
        typer.Option(
            help="The Hugging Face folder that training started from, if it has moved; the tokenizer is copied from it."
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Export a checkpoint's weights, written on any grid, to a safetensors file with the model's parameter names.

    A model that was fine-tuned from a Hugging Face folder can be written as such a folder, which from_pretrained loads.
    """
    from stretto.train.checkpoint.export import export_folder, export_safetensors

    with refusing_bad_input(as_json=as_json):
        limit = None if max_file_gigabytes is None else round(max_file_gigabytes * 1e9)
        require_writable_folder(to.parent, "--to")
        if to.suffix == ".safetensors":
            if pretrained is not None:
                raise ValueError(f"--pretrained is for folders, and --to is the file {to}: leave it out")
            files = export_safetensors(checkpoint, to, max_file_bytes=limit, dtype=dtype)
        else:
            files = export_folder(checkpoint, to, max_file_bytes=limit, dtype=dtype, pretrained=pretrained)
    if as_json:
        print_json({"files": [str(file) for file in files]})
    else:
        for file in files:
            print(f"wrote {file} ({file.stat().st_size / 1e6:,.1f} MB)")


@app.command()
def verify(
    path: Annotated[
        Path,
        typer.Argument(
            metavar="PATH",
            help="A checkpoint, a run (all its checkpoints), a folder of "
            "torch.distributed.checkpoint, or safetensors files.",
        ),
    ],
    as_json: Json = False,
) -> None:
    """Read all bytes and compare them with their checksums; name the files, tensors and bytes that are damaged.

    Says what has no checksum and could not be verified. Exit status: 0 nothing is damaged, 1 something is.
    """
    from stretto.train.checkpoint.verification import verify as verify_path

    with refusing_bad_input(as_json=as_json):
        found = verify_path(path)
    if as_json:
        verified = [asdict(each) | {"path": str(each.path)} for each in found]
        print_json({"is_damaged": any(each.damages for each in found), "verified": verified})
    else:
        print("\n".join(each.describe() for each in found))
    if any(each.damages for each in found):
        raise typer.Exit(DAMAGED)


@app.command("list")
def list_checkpoints(
    out: Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder.")], as_json: Json = False
) -> None:
    """List a run's checkpoints, oldest first, with size and age, and mark those that cannot be used.

    Reads their indices; `stretto checkpoint verify` reads all.
    """
    with refusing_bad_input(as_json=as_json):
        from stretto.train.checkpoint.folders import checkpoints_by_step

        if not (out / "checkpoints").is_dir():
            raise ValueError(f"{out} has no checkpoints: name the folder of a run (`out` in its configuration)")
        rows = [_summarize(path) for path in checkpoints_by_step(out)]
    if as_json:
        print_json({"checkpoints": rows})
        return
    print(f"{'checkpoint':24} {'format':>6} {'size':>10}  {'grid':24} written")
    for row in rows:
        name = Path(row["path"]).name
        if row["fault"] is not None:
            print(f"{name:24} {row['fault']}")
        else:
            size = f"{row['bytes'] / 1e6:,.1f} MB"
            print(f"{name:24} {row['format']:>6} {size:>10}  {row['grid']:24} {row['written']}")


def _summarize(path: Path) -> dict[str, Any]:
    from stretto.train.checkpoint.metadata import METADATA_FILE, read_metadata

    row: dict[str, Any] = {"path": str(path), "fault": None}
    try:
        metadata = read_metadata(path)
        written = datetime.fromtimestamp((path / METADATA_FILE).stat().st_mtime)
        size = sum(file.stat().st_size for file in path.iterdir() if file.is_file())
    except ValueError as error:
        return row | {"fault": str(error)}
    except OSError as error:  # another user's, or the run has deleted it since
        return row | {"fault": f"{error.filename or path} cannot be read: {error.strerror or error}"}
    return row | {
        "step": metadata.step,
        "format": metadata.format,
        "bytes": size,
        "grid": _describe_grid(metadata.run),
        "written": written.isoformat(" ", "seconds"),
    }


def _describe_grid(run: Mapping[str, Any]) -> str:
    """The axes of a run's grid that have more than one rank."""
    grid = run.get("grid")
    sizes = {axis: size for axis, size in grid.items() if size not in (1, "cut")} if isinstance(grid, dict) else {}
    return " ".join(f"{axis}={size}" for axis, size in sizes.items()) or ("one rank" if isinstance(grid, dict) else "")


@app.command()
def show(
    path: Checkpoint,
    tensors: Annotated[
        bool, typer.Option("--tensors", help="Also show each tensor with its shape, dtype, files and checksums.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Show a checkpoint's contents: its step, model, optimizer, and the size of its tensors."""
    with refusing_bad_input(as_json=as_json):
        from stretto.train.checkpoint.folders import resolve_checkpoint
        from stretto.train.checkpoint.torch_format import read_index

        found = resolve_checkpoint(path)
        metadata = read_index(found)
    if as_json:
        values = metadata.model_dump(mode="json")
        print_json({"path": str(found)} | (values if tensors else {k: v for k, v in values.items() if k != "tensors"}))
        return
    print(f"{found}: step {metadata.step}, format {metadata.format}")
    kind = metadata.model.get("kind", "gpt" if metadata.model else "not recorded")
    options = ", ".join(f"{key}={value}" for key, value in metadata.model.items() if not isinstance(value, dict | list))
    print(f"model: {kind}{f' ({options})' if options else ''}")
    print(f"optimizer: {metadata.optimizer or 'none'}; torch {metadata.torch or 'not recorded'}")
    if grid := _describe_grid(metadata.run):
        print(f"written by: {grid}")
    for name, (count, numbers, size) in _totals(metadata).items():
        print(f"{name}: {count} tensors, {numbers:,} numbers, {size / 1e6:,.1f} MB")
    if tensors:
        for name, entry in metadata.tensors.items():
            print(f"{name}  {list(entry.shape)} {entry.dtype}")
            for chunk in entry.chunks:
                place = f"{chunk.file} bytes {chunk.start} to {chunk.start + chunk.bytes}"
                print(f"    at {list(chunk.offsets)}: {list(chunk.sizes)} in {place} {chunk.checksum or ''}".rstrip())


def _totals(metadata: "CheckpointMetadata") -> dict[str, tuple[int, int, int]]:
    """Count for each kind of tensor (model, optimizer, training) the tensors, the numbers, and bytes."""
    totals: dict[str, tuple[int, int, int]] = {}
    for name, entry in metadata.tensors.items():
        count, numbers, size = totals.get(kind := name.partition(".")[0], (0, 0, 0))
        totals[kind] = count + 1, numbers + prod(entry.shape), size + prod(entry.shape) * entry.itemsize
    return totals
