# SPDX-License-Identifier: Apache-2.0
"""`stretto init`: writes a configuration to start from."""

import shlex
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any

import typer

from stretto.atomic_files import create_atomically
from stretto.cli.console import Json, print_json, refusing_bad_input
from stretto.huggingface.public_models import PUBLIC_MODELS
from stretto.suggestions import name_known


def init(
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="Which configuration to write; without it, all are listed.")
    ] = None,
    file: Annotated[
        Path | None, typer.Argument(metavar="FILE.toml", help="The file to write (default: NAME.toml).")
    ] = None,
    as_json: Json = False,
) -> None:
    """Write a configuration to start from, with comments; or list the configurations that there are.

    An existing file is never overwritten.

    - stretto init
    - stretto init demo
    - stretto init llama runs/mine.toml
    - stretto init qwen3-8b
    """
    with refusing_bad_input(as_json=as_json):
        known = {
            each.name.removesuffix(".toml"): each.read_text(encoding="utf-8")
            for each in (files("stretto") / "configs").iterdir()
        }
        public = known.pop("public")
        known |= {each: _fill_in(public, each, config) for each, config in PUBLIC_MODELS.items()}
        if name is None:
            summaries = {each: known[each].partition("\n")[0].removeprefix("# ") for each in sorted(known)}
            if as_json:
                print_json({"configurations": summaries})
            else:
                print("\n".join(f"{each:15}{summary}" for each, summary in summaries.items()))
            return
        if name not in known:
            raise ValueError(f"there is no configuration {name!r}{name_known(name, sorted(known))}")
        file = Path(f"{name}.toml") if file is None else file
        _write_new(file, known[name])
    if as_json:
        print_json({"file": file})
    else:
        print(f"wrote {file}: change it as you like, then run `stretto train {shlex.quote(str(file))}`")


def _fill_in(template: str, name: str, config: dict[str, Any]) -> str:
    """The configuration of a public model, in which sequences have at most as many tokens as its positions."""
    positions = config.get("max_position_embeddings") or config["n_positions"]
    return template.replace("{name}", name).replace("seq_len = 4096", f"seq_len = {min(4096, positions)}")


def _write_new(file: Path, text: str) -> None:
    """Write a file whole or not at all. Raises ValueError for one that exists."""
    if not file.parent.is_dir():
        raise ValueError(f"{file.parent} is not a folder: {file} cannot be written there")
    try:
        create_atomically(file, text)
    except FileExistsError:
        raise ValueError(f"{file} exists already: name another file, `stretto init NAME FILE.toml`") from None
    except OSError as error:
        raise ValueError(f"{file} cannot be written: {error.strerror}") from error
