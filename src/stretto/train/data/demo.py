# SPDX-License-Identifier: Apache-2.0
"""A corpus that needs no download: the documentation in Python's standard library."""

import ast
import hashlib
import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from stretto.atomic_files import create_atomically
from stretto.cluster import reading
from stretto.train.data.cache import cached_file

MIN_BYTES = 1_000_000

# Modules and packages whose docstrings are read: the longest ones that every Python since 3.11 has on every system
# (Debian, for example, packages idlelib, tkinter and distutils separately).
# fmt: off
MODULES = (
    "_collections_abc", "_pydecimal", "_pyio", "abc", "argparse", "ast", "asyncio", "base64", "bdb",
    "bisect", "bz2", "calendar", "cmd", "code", "codecs", "codeop", "collections", "compileall",
    "concurrent", "configparser", "contextlib", "copy", "csv", "ctypes", "dataclasses", "datetime", "dbm",
    "difflib", "dis", "doctest", "email", "encodings", "enum", "filecmp", "fileinput", "fractions",
    "ftplib", "functools", "getopt", "gettext", "glob", "graphlib", "gzip", "hashlib", "heapq", "hmac",
    "html", "http", "imaplib", "importlib", "inspect", "ipaddress", "json", "linecache", "locale",
    "logging", "lzma", "mailbox", "mimetypes", "modulefinder", "multiprocessing", "netrc", "numbers",
    "operator", "optparse", "os", "pathlib", "pdb", "pickle", "pickletools", "pkgutil", "platform",
    "plistlib", "poplib", "pprint", "profile", "pstats", "pty", "py_compile", "pyclbr", "pydoc", "queue",
    "quopri", "random", "re", "reprlib", "rlcompleter", "runpy", "sched", "secrets", "selectors", "shelve",
    "shlex", "shutil", "site", "smtplib", "socket", "socketserver", "ssl", "statistics", "string",
    "subprocess", "symtable", "sysconfig", "tarfile", "tempfile", "textwrap", "threading", "timeit",
    "token", "tokenize", "tomllib", "trace", "traceback", "tracemalloc", "turtle", "types", "typing",
    "unittest", "urllib", "uuid", "venv", "warnings", "wave", "weakref", "webbrowser", "wsgiref", "xml",
    "xmlrpc", "zipfile", "zipimport", "zoneinfo",
)
# fmt: on


def demo_corpus() -> str:
    """Collect the language reference's topics and the docstrings of `MODULES`: over `MIN_BYTES` of English text.

    The text is the same for the same Python. Source files are parsed and never imported, since importing some of them
    has side effects. Raises ValueError if this Python lacks the sources of its library.
    """
    library = Path(os.__file__).parent
    text = "\n\n".join([*_topics(library / "pydoc_data" / "topics.py"), *_docstrings(library)]) + "\n"
    size = len(text.encode())
    if size < MIN_BYTES:
        raise ValueError(
            f"{library}: its documentation has {size} bytes, but the demo needs {MIN_BYTES}: "
            "use a Python with the sources of its standard library, or set data.path to a text of your own"
        )
    return text


def write_demo_corpus(path: str | Path) -> Path:
    """Write `demo_corpus()` to a file in UTF-8, and make its folder, unless the file is there. Returns the path.

    Several ranks may call it at once: the first one's file stays, since others may read it already. The text is kept in
    the cache folder for this Python, since collecting it takes seconds; without a cache folder it is collected anew.
    """
    path = Path(path)
    if not path.exists():
        corpus = _cached_corpus()  # without one, no folder is left behind
        path.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):
            create_atomically(path, corpus)
    return path


def _cached_corpus() -> str:
    python = (sys.version, os.__file__, Path(__file__).read_text(encoding="utf-8"))
    name = f"demo/{hashlib.sha256(repr(python).encode()).hexdigest()[:16]}.txt"
    try:
        return cached_file(name, lambda file: file.write(demo_corpus().encode())).read_bytes().decode()
    except ValueError:  # the cache folder cannot be written to, or there is no corpus, which is raised again
        return demo_corpus()


def _topics(path: Path) -> Iterator[str]:
    """Yield the texts that `help("assert")` and the like show: the values of the dict `topics` in a module."""
    if not path.is_file():
        return
    for statement in _parse(path).body:
        match statement:
            case ast.Assign(targets=[ast.Name(id="topics")], value=value):
                yield from (text.strip("\n") for _, text in sorted(ast.literal_eval(value).items()))


def _docstrings(library: Path) -> Iterator[str]:
    """Yield docstrings with the names that they document, file by file, in the order of the source."""
    for module in MODULES:
        for path in [library / f"{module}.py", *sorted((library / module).rglob("*.py"))]:
            parts = path.relative_to(library).with_suffix("").parts
            if path.is_file() and not {"test", "tests"} & set(parts):
                yield from _documented(_parse(path), ".".join(parts).removesuffix(".__init__"))


def _documented(node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef, name: str) -> Iterator[str]:
    if docstring := ast.get_docstring(node):
        yield f"{name}\n\n{docstring}"
    for child in node.body:
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _documented(child, f"{name}.{child.name}")


def _parse(path: Path) -> ast.Module:
    with reading(path):
        return ast.parse(path.read_bytes(), filename=str(path))
