# SPDX-License-Identifier: Apache-2.0
"""Finds the kernels that the library launches in its source; `python -m tests.stress` has to cover all of them.

A Triton kernel is a `@triton.jit` function whose name is used outside of other such functions, that is, on the host. A
CUDA kernel is a `__global__` function, in a file of CUDA C++ or in the text that a Python module writes.
"""

import ast
import re
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path

APART = ("bench", "cli", "stress")  # packages outside the library; benches have kernels of their own

_GLOBAL = re.compile(r"__global__ void\s+(?:__launch_bounds__\([^)]*\)\s*)?(\w+)\(")


def list_kernels(root: Path | None = None) -> list[str]:
    """All kernels of the library below a folder (default: this package), sorted.

    A Triton kernel is called by its module and name without the package's: "ops.small_m.gemm_exchange". A CUDA kernel
    is called by its file and name, "collectives.executor.cuda.copy_engine.flags.cu:signal_arrival", and where a Python
    module writes several of one name by their order: "collectives.executor.cuda.fused.codegen:run/2".
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
    jitted = {
        path: {node.name for node in tree.body if isinstance(node, ast.FunctionDef) and _is_jitted(node)}
        for path, tree in trees.items()
    }
    used: set[tuple[Path, str]] = set()
    for path, tree in trees.items():
        known = {name: (path, name) for name in jitted[path]}
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("stretto"):
                source = _find_module(node.module or "", trees)
                for alias in node.names:
                    if source is not None and alias.name in jitted[source]:
                        known[alias.asname or alias.name] = source, alias.name
                    inner = _find_module(f"{node.module}.{alias.name}", trees)
                    if inner is not None:  # a module, whose kernels are its attributes
                        module = alias.asname or alias.name
                        known |= {f"{module}.{name}": (inner, name) for name in jitted[inner]}
        used |= {known[name] for name in _find_names_on_host(tree) if name in known}
    for path, name in used:
        yield f"{'.'.join(path.with_suffix('').parts)}.{name}"


def _find_module(name: str, trees: dict[Path, ast.Module]) -> Path | None:
    path = Path(f"{name.partition('.')[2].replace('.', '/')}.py")
    return path if path in trees else None


def _is_jitted(node: ast.AST) -> bool:
    return isinstance(node, ast.FunctionDef) and any("jit" in ast.unparse(one) for one in node.decorator_list)


def _find_names_on_host(tree: ast.AST) -> set[str]:
    """All names, and attributes of names ("module.name"), that are read outside of jitted functions.

    Excludes local variables of functions.
    """
    found: set[str] = set()
    own: set[str] = set()
    imported: set[str] = set()
    if isinstance(tree, ast.FunctionDef):
        own = {argument.arg for argument in (*tree.args.args, *tree.args.kwonlyargs)}
    left = list(ast.iter_child_nodes(tree))
    while left:
        node = left.pop()
        match node:
            case ast.FunctionDef():
                if not _is_jitted(node):
                    found |= _find_names_on_host(node)
                continue
            case ast.Name(id=name, ctx=ast.Store()):
                own.add(name)
            case ast.Name(id=name):
                found.add(name)
            case ast.Attribute(value=ast.Name(id=module), attr=name):
                found.add(f"{module}.{name}")
            case ast.ImportFrom(names=aliases):
                imported |= {alias.asname or alias.name for alias in aliases}
        left += ast.iter_child_nodes(node)
    return found - (own - imported if isinstance(tree, ast.FunctionDef) else set())


def _list_cuda(sources: dict[Path, str]) -> Iterator[str]:
    for path, text in sources.items():
        names = _GLOBAL.findall(text)
        module = ".".join((path if path.suffix == ".cu" else path.with_suffix("")).parts[:-1])
        stem = path.name if path.suffix == ".cu" else path.stem
        for number, name in enumerate(names, 1):
            order = f"/{number}" if path.suffix == ".py" else ""
            yield f"{module}.{stem}:{name}{order}"
