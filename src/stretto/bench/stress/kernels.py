"""The kernels that the library launches, found in its source: what `stretto stress` has to cover.

A Triton kernel is a `@triton.jit` function whose name is used outside of other such functions, that is, on the host. A
CUDA kernel is a `__global__` function, in a file of CUDA C++ or in the text that a Python module writes.
"""

import ast
import re
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path

APART = ("bench", "cli")  # packages that are no library: benches have kernels of their own

_GLOBAL = re.compile(r"__global__ void\s+(?:__launch_bounds__\([^)]*\)\s*)?(\w+)\(")


def list_kernels(root: Path | None = None) -> list[str]:
    """All kernels of the library below a folder (default: this package), sorted.

    A Triton kernel is called by its module and name without the package's: "ops.few_rows.gemm_exchange". A CUDA kernel
    is called by its file and name, "collectives.executor.cuda.copied.cu:begin", and where a Python module writes
    several of one name by their order: "collectives.executor.cuda.source:run/2".
    """
    root = Path(str(files("stretto"))) if root is None else root
    sources = {
        path.relative_to(root): path.read_text(encoding="utf-8")
        for path in sorted(root.rglob("*"))
        if path.suffix in (".py", ".cu") and path.relative_to(root).parts[0] not in APART
    }
    return sorted([*_list_triton(sources), *_list_cuda(sources)])


def _list_triton(sources: dict[Path, str]) -> Iterator[str]:
    trees = {path: ast.parse(text) for path, text in sources.items() if path.suffix == ".py"}
    jitted = {path: {node.name for node in tree.body if _is_jitted(node)} for path, tree in trees.items()}
    every = set().union(*jitted.values())
    used: set[str] = set()
    for path, tree in trees.items():
        imported = {
            name.name
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("stretto")
            for name in node.names
        }
        used |= _find_names_on_host(tree) & (jitted[path] | imported & every)
    for path, names in jitted.items():
        for name in names & used:
            yield f"{'.'.join(path.with_suffix('').parts)}.{name}"


def _is_jitted(node: ast.AST) -> bool:
    return isinstance(node, ast.FunctionDef) and any("jit" in ast.unparse(one) for one in node.decorator_list)


def _find_names_on_host(tree: ast.AST) -> set[str]:
    """All names that are read outside of jitted functions."""
    found: set[str] = set()
    for node in ast.iter_child_nodes(tree):
        if _is_jitted(node):
            continue
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            found.add(node.id)
        found |= _find_names_on_host(node)
    return found


def _list_cuda(sources: dict[Path, str]) -> Iterator[str]:
    for path, text in sources.items():
        names = _GLOBAL.findall(text)
        module = ".".join((path if path.suffix == ".cu" else path.with_suffix("")).parts[:-1])
        stem = path.name if path.suffix == ".cu" else path.stem
        for number, name in enumerate(names, 1):
            order = f"/{number}" if path.suffix == ".py" else ""
            yield f"{module}.{stem}:{name}{order}"
