# SPDX-License-Identifier: Apache-2.0
"""`stretto export`: writes a checkpoint's weights as safetensors, or a fine-tuned model as a Hugging Face folder."""

import math
from pathlib import Path
from typing import Annotated

import typer

from stretto.cli.console import Json, print_json, refusing_bad_input


def export(
    checkpoint: Annotated[
        Path,
        typer.Argument(metavar="RUN_OR_CHECKPOINT", help="A run's folder (its newest checkpoint) or a checkpoint's."),
    ],
    to: Annotated[
        Path,
        typer.Option(
            "--to",
            metavar="FILE.safetensors|FOLDER",
            help="The file to write, or of a Hugging Face model a new folder.",
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
            help="float64, float32, float16 or bfloat16; without it the checkpoint's, and in a folder config.json's."
        ),
    ] = None,
    pretrained: Annotated[
        Path | None,
        typer.Option(help="Where the folder is that training started from, if it has moved: it has the tokenizer."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Write a checkpoint's weights to a safetensors file, under the model's own names, whatever grid wrote them.

    A model that was fine-tuned from a Hugging Face folder can be written as such a folder, which from_pretrained loads.
    """
    from stretto.train.checkpoint.weights import export_folder, export_safetensors

    with refusing_bad_input(as_json=as_json):
        if max_file_gigabytes is not None and not math.isfinite(max_file_gigabytes):
            raise ValueError(
                f"--max-file-gigabytes is {max_file_gigabytes}, but must be a finite number; without it, all goes to "
                "one file"
            )
        limit = None if max_file_gigabytes is None else round(max_file_gigabytes * 1e9)
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
