# SPDX-License-Identifier: Apache-2.0
"""Tests of how the source is laid out: what keeps a reader who has never seen it from getting lost
(docs/decisions/016).
"""

import ast
import importlib.util
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from functools import cache
from math import isnan, nan
from pathlib import Path

import pytest

from tests.differences import largest

SOURCE = Path(importlib.util.find_spec("stretto").origin).parent
MAX_FILES = 20
MAX_PARAMETERS = 12
MAX_SHORT_FILES = 25
SHORT = 60  # lines


@cache
def parse_files() -> dict[Path, ast.Module]:
    return {path: ast.parse(path.read_text()) for path in sorted(SOURCE.rglob("*.py"))}


@pytest.fixture(scope="module", autouse=True)
def _forget_files() -> Iterator[None]:
    """A million nodes would make each later collection of garbage take a second."""
    yield
    parse_files.cache_clear()
    find_definitions.cache_clear()


@cache
def find_definitions() -> list[tuple[Path, ast.AST]]:
    """All classes and functions. No expression has one, and most nodes are expressions."""
    found, left = [], [(path.relative_to(SOURCE), tree) for path, tree in parse_files().items()]
    while left:
        path, node = left.pop()
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            found.append((path, node))
        left += [(path, child) for child in ast.iter_child_nodes(node) if not isinstance(child, ast.expr)]
    return found


def nodes_of(kind: type) -> Iterator[tuple[Path, ast.AST]]:
    return ((path, node) for path, node in find_definitions() if isinstance(node, kind))


def test_no_two_classes_share_a_name():
    places = defaultdict(list)
    for path, node in nodes_of(ast.ClassDef):
        places[node.name].append(str(path))
    assert len(places) > 300
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


def test_no_folder_has_more_files_than_a_reader_takes_in():
    counts = Counter(path.parent.relative_to(SOURCE) for path in parse_files() if path.name != "__init__.py")
    assert {str(folder): count for folder, count in counts.items() if count > MAX_FILES} == {}


def test_few_files_are_so_short_that_another_could_hold_them():
    short = [
        str(path.relative_to(SOURCE))
        for path in parse_files()
        if path.name not in ("__init__.py", "__main__.py") and len(path.read_text().splitlines()) < SHORT
    ]
    assert len(short) <= MAX_SHORT_FILES, short


def is_schema(node: ast.FunctionDef) -> bool:
    """True if torch.library makes an operator's schema of the function's parameters, which it takes one by one."""
    return all(
        argument.annotation is not None and ast.unparse(argument.annotation) in SCHEMA_TYPES
        for argument in node.args.args + node.args.kwonlyargs
    )


SCHEMA_TYPES = {
    "Tensor", "Tensor | None", "Sequence[Tensor]", "list[Tensor]", "str", "int", "float", "bool", "list[int]",
    "Sequence[int]", "list[float]", "Sequence[float]", "torch.dtype", "torch.dtype | None", "int | None",
    "float | None",
    "Sequence[Tensor] | None",
}  # fmt: skip


OF_DESCRIPTORS = {
    "ops/moe/grouped/kernels.py: multiply_groups",
    "ops/moe/grouped/kernels.py: multiply_groups_in_order",
    "ops/moe/grouped/kernels.py: sum_outer_products",
    "ops/moe/tensor_parallel_kernels.py: multiply_and_send",
}
"""Kernels of tensor descriptors, which Triton takes one by one, beside the sizes and tiles that belong to them."""


def test_no_function_has_so_many_parameters_that_their_order_must_be_looked_up():
    wide = {}
    for path, node in nodes_of(ast.FunctionDef):
        arguments = node.args
        count = len(arguments.posonlyargs + arguments.args + arguments.kwonlyargs)
        name = f"{path}: {node.name}"
        if count > MAX_PARAMETERS and path.parts[0] != "cli" and not is_schema(node) and name not in OF_DESCRIPTORS:
            wide[name] = count
    assert wide == {}


def test_the_zero_of_a_wait_for_a_slot_or_a_slice_is_used():
    """Nothing else orders the stores into a slot, and the loads from it, after the wait."""
    waits = {"await_credit", "wait_slice"}
    calls = [ast.unparse(node.value) for tree in parse_files().values() for node in ast.walk(tree) if is_call(node)]
    assert [call for call in calls if call.partition("(")[0].rpartition(".")[2] in waits] == []


def is_call(node: ast.AST) -> bool:
    """True if it is a statement of its own, a call whose result is dropped."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)


# Attributes named after this package, which no class of its own declares: `parallel.state` and subclasses hold state.
HUNG = re.compile(r"""(?:\.|attr\([^()]*['"])_?stretto_\w+""")


def test_nothing_hangs_attributes_on_objects_of_others():
    assert HUNG.findall('y.stretto_axis = 1; getattr(x, "_stretto_axis", 0); stretto_like = 2') != []
    assert {str(path): found for path in parse_files() if (found := HUNG.findall(path.read_text()))} == {}


MAKERS = {"arange", "as_tensor", "empty", "eye", "full", "linspace", "ones", "rand", "randint", "randn", "randperm"} | {
    "scalar_tensor", "tensor", "tril_indices", "triu_indices", "zeros"
}  # fmt: skip
OF_USERS = ("bench/", "models/", "stress/")  # they make what runs on the device of whoever calls them


def test_tensors_are_made_on_a_device_that_is_named():
    """Else they are made wherever `torch.set_default_device` or a `with torch.device(...)` of a user's points to."""
    unnamed, calls = [], re.compile(rf"\btorch\s*\.\s*({'|'.join(MAKERS)})\b")
    for path, tree in parse_files().items():
        name = path.relative_to(SOURCE).as_posix()
        is_left_out = name.startswith(OF_USERS) or not calls.search(path.read_text())  # to walk all nodes takes seconds
        for node in [] if is_left_out else ast.walk(tree):
            match node:
                case ast.Call(func=ast.Attribute(value=ast.Name("torch"), attr=maker), keywords=keywords):
                    if maker in MAKERS and not any(each.arg in ("device", None) for each in keywords):
                        unnamed.append((name, node.lineno))
    assert unnamed == []


def name_module(path: Path) -> str:
    parts = path.relative_to(SOURCE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def is_for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


def find_statements(tree: ast.Module) -> Iterator[ast.AST]:
    """All statements, those of functions included, but not those under TYPE_CHECKING, which never run."""
    left: list[ast.AST] = [tree]
    while left:
        node = left.pop()
        yield node
        inner = node.orelse if is_for_types(node) else ast.iter_child_nodes(node)
        left += [each for each in inner if not isinstance(each, ast.expr)]


def find_homes(trees: Mapping[str, ast.Module]) -> dict[str, str]:
    """The module of each name that a package imports lazily (`stretto.lazy`): it lists them under TYPE_CHECKING."""
    return {
        f"{package}.{alias.asname or alias.name}": node.module
        for package, tree in trees.items()
        for block in tree.body
        if is_for_types(block)
        for node in block.body
        if isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names
    }


def find_imports(module: str, trees: Mapping[str, ast.Module], homes: Mapping[str, str]) -> set[str]:
    """The modules of Stretto that a module imports: when it is imported itself, or in a function."""
    found = set()
    for node in find_statements(trees[module]):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            found |= {name if name in trees else homes.get(name, node.module) for name in names}
    return (found & trees.keys()) - {module}


def test_imports_in_functions_count_and_those_for_types_do_not():
    source = """
import a
if TYPE_CHECKING:
    import b
else:
    import c
def function():
    with context:
        from package import d, lazy, eager
"""
    lazy = "if TYPE_CHECKING:\n    from package.home import lazy"
    others = ("a", "b", "c", "package.d", "package.home")
    trees = {"own": ast.parse(source), "package": ast.parse(lazy)} | {name: ast.parse("") for name in others}
    homes = find_homes(trees)
    assert find_imports("own", trees, homes) == {"a", "c", "package.d", "package.home", "package"}
    assert find_imports("package", trees, homes) == set()


def find_circle(graph: dict[str, set[str]]) -> list[str]:
    """A circle of imports, or []: takes away what imports nothing that is left, until nothing changes."""
    left = {module: set(imports) for module, imports in graph.items()}
    while True:
        leaves = {module for module, imports in left.items() if not imports & left.keys()}
        if not leaves:
            break
        left = {module: imports for module, imports in left.items() if module not in leaves}
    if not left:
        return []
    path = [min(left)]
    while path.count(path[-1]) == 1:
        path.append(min(left[path[-1]] & left.keys()))
    return path[path.index(path[-1]) :]


@pytest.mark.parametrize(
    ("graph", "circle"),
    [
        ({"a": {"b"}, "b": {"c"}, "c": set()}, []),
        ({"a": {"b"}, "b": {"c"}, "c": {"b"}}, ["b", "c", "b"]),
        ({"a": {"a"}}, ["a", "a"]),
    ],
)
def test_circles_are_found(graph, circle):
    assert find_circle(graph) == circle


def test_no_modules_import_each_other_in_a_circle():
    trees = {name_module(path): tree for path, tree in parse_files().items()}
    homes = find_homes(trees)
    assert find_circle({module: find_imports(module, trees, homes) for module in trees}) == []


OF_OBJECTS = {"all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list"}
OF_OBJECTS |= {"send_object_list", "recv_object_list"}
# Of a process that this one has started itself, and of torch's own files, by an unpickler that makes no other classes.
UNPICKLE = {"collectives/executor/processes.py", "train/checkpoint/storage.py", "train/checkpoint/torch_format.py"}


def test_asserts_call_no_methods():
    """PYTHONOPTIMIZE removes them, with what they do."""
    calling = re.compile(r"^\s*assert [^\"'\n]*(\.\w+\(|:=)", re.MULTILINE)
    found = {str(path): calling.findall(path.read_text()) for path in sorted(SOURCE.rglob("*.py"))}
    assert {path: calls for path, calls in found.items() if calls} == {}


OF_DIFFERENCES = re.compile(
    r"^ *(assert|if) (not |all\()?max\(.*\) [<>]=? .*(e-\d|\*\*-\d|EXACT|ROUNDING|TOLERANCE)",
    re.IGNORECASE | re.MULTILINE,
)


def test_differences_are_compared_where_one_is_nan():
    """The largest of `tests.differences` is NaN then, and no limit holds; `max` would be that of the others."""
    assert [isnan(largest(*values)) for values in ([1.0, nan], [[nan, 2.0, nan]], [[1.0, 2.0]])] == [True, True, False]
    assert largest([], default=3.0) == largest(1.0, 3.0, 2.0) == 3.0
    assert OF_DIFFERENCES.search(f"assert {'max'}(map(max, found)) < 1e-5")
    files = [path for name in ("lab", "tests") for path in (SOURCE.parents[1] / name).rglob("*.py")]
    assert [str(path) for path in files if OF_DIFFERENCES.search(path.read_text())] == []


def test_nothing_unpickles_what_another_rank_sends():
    """`stretto.memory.plain_data` exchanges values. Benches, which the library does not use, are not looked at."""
    pickled, names = set(), re.compile("|".join(("pickle", *OF_OBJECTS)))
    for path, tree in parse_files().items():
        name = path.relative_to(SOURCE).as_posix()
        is_left_out = name.startswith("bench/") or not names.search(path.read_text())
        for node in [] if is_left_out else ast.walk(tree):
            assert not (isinstance(node, ast.Attribute) and node.attr in OF_OBJECTS), (name, node.lineno, node.attr)
            if isinstance(node, ast.Import) and any(alias.name == "pickle" for alias in node.names):
                pickled.add(name)
    assert pickled <= UNPICKLE
