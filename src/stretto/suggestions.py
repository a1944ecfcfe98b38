# SPDX-License-Identifier: Apache-2.0
"""Parts of error messages: what a misspelt name or path was probably meant to be, and all that is missing."""

import re
import types
from collections.abc import Collection, Iterable, Sequence
from difflib import get_close_matches
from functools import cache
from numbers import Integral, Real
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from stretto.quantities import to_whole

MAX_SUGGESTIONS = 3  # suggestions of one message
_SHORTEST_PART = 3  # letters of a name of which others may be longer forms


def similar_names(given: str, known: Iterable[str]) -> list[str]:
    """The known names that are spelt much like the given one, the most similar first; at most three.

    Case, dashes, underscores and dots do not count. A name with other digits is another thing, not a misspelling:
    "gpt3" is not "gpt-320b". A longer form of the given name is similar: "gpt2" and "gpt2-small".
    """
    by_letters = {_letters(name): name for name in known if _digits(name) == _digits(given)}
    by_letters.pop("", None)  # a model is a submodule of its own, named "", which no misspelt name means
    wanted = _letters(given)
    close = get_close_matches(wanted, by_letters, n=MAX_SUGGESTIONS, cutoff=0.6)
    if not close and len(wanted) >= _SHORTEST_PART:
        close = [letters for letters in by_letters if wanted in letters][:MAX_SUGGESTIONS]
    best = close[:1] if close and _is_certain(wanted, close) else close
    return [by_letters[letters] for letters in best]


def require_type(value: object, kind: type | types.UnionType, argument: str) -> None:
    """TypeError that names the argument and what it takes, unless a value is of this kind."""
    if not _is_of(value, kind):
        what = f"a {kind.__name__}" if isinstance(kind, type) else _describe(kind)
        raise TypeError(f"{argument} is {value!r:.60}, of type {type(value).__name__}, but must be {what}")


def require_fields(options: Any, prefix: str = "") -> None:
    """Raise ValueError for the first field of a dataclass whose value is none of its annotation's.

    Whole numbers do for floats, NaN does for nothing, True and False are no numbers, and lists do for tuples. A whole
    number of another library becomes Python's own.
    """
    for name, kind in _find_kinds(options.__class__).items():
        value = getattr(options, name)
        if (own := to_whole(value)) is not value:
            object.__setattr__(options, name, own)
        if not _is_of(value, kind):
            if get_origin(kind) is Literal and all(isinstance(each, str) for each in get_args(kind)):
                require_one_of(get_args(kind), prefix, **{name: value})
            raise ValueError(f"{prefix}{name} is {value!r:.80}, but must be {_describe(kind)}")


@cache
def _find_kinds(options: Any) -> dict[str, Any]:
    return {name: kind for name, kind in get_type_hints(options).items() if name in options.__dataclass_fields__}


def _is_of(value: object, kind: Any) -> bool:
    """True if a value is of an annotation's kind; what an annotation says of a mapping's or sequence's items is not
    looked at."""
    origin, members = get_origin(kind), get_args(kind)
    if origin is Literal:
        return any(type(value) is type(each) and value == each for each in members)
    if origin in (types.UnionType, Union):
        return any(_is_of(value, each) for each in members)
    if origin is tuple:
        return isinstance(value, tuple | list) and (members[1:] != (...,) or all(_is_of(e, members[0]) for e in value))
    if kind in (int, float):
        return isinstance(value, Integral if kind is int else Real) and not isinstance(value, bool) and value == value
    return isinstance(value, origin or kind)


def _describe(kind: Any) -> str:
    if get_origin(kind) is Literal:
        *others, last = map(repr, get_args(kind))
        return f"{', '.join(others)} or {last}"
    if get_origin(kind) in (types.UnionType, Union):
        return " or ".join(map(_describe, get_args(kind)))
    return _WORDS.get(kind) or (str(kind) if get_origin(kind) else kind.__name__)


_WORDS = {bool: "True or False", int: "a whole number", float: "a number", str: "text", types.NoneType: "None"}


def require_one_of(known: Iterable[object], prefix: str = "", /, **values: object) -> None:
    """Raise ValueError for a value that is none of the known ones, with its name, what comes before it, and these."""
    names = [str(each) for each in known]
    for name, value in values.items():
        if value not in names:
            near = did_you_mean(value, names)
            raise ValueError(f"{prefix}{name} is {value!r}, but must be one of {', '.join(names)}{near}")


def did_you_mean(given: object, known: Iterable[str]) -> str:
    """The end of an error message: "; did you mean 'this'?", or nothing where no known name is similar."""
    return _ask([repr(name) for name in similar_names(str(given), known)])


def name_known(given: object, known: Iterable[str], verb: str = "there are") -> str:
    """The end of an error message: what was probably meant, if a known name is similar, and all known names."""
    names = list(known)
    near = did_you_mean(given, names)
    return f"{near} {verb.capitalize()} {', '.join(names)}" if near else f": {verb} {', '.join(names)}"


def require_known_options(owner: str, given: Iterable[str], known: Collection[str]) -> None:
    """ValueError for the first option given that its owner ("a GPT") does not have."""
    for option in given:
        if option not in known:
            near = did_you_mean(option, known) or f": it has {', '.join(known)}"
            raise ValueError(f"{owner} has no option {option!r}{near}")


def did_you_mean_file(path: Path, suffixes: Collection[str] = ()) -> str:
    """The end of an error message for a path that will not do: what it is, or the most similar one in its folder.

    suffixes: of the files that would do, such as ".toml" (none: all files and folders). Links to nothing do not count.
    """
    if path.exists():
        return f": it is a {'folder' if path.is_dir() else 'file' if path.is_file() else 'pipe or a device'}"
    try:
        there = [
            each.name for each in path.parent.iterdir() if each.exists() and (not suffixes or each.suffix in suffixes)
        ]
    except OSError:  # no such folder, or none that may be read
        return ""
    close = get_close_matches(path.name, there, n=1, cutoff=0.6)
    return _ask([str(path.parent / name) for name in close])


def are_missing(names: Sequence[str]) -> str:
    """The beginning of an error message: "a is missing", or "a, b are missing"."""
    return f"{', '.join(names)} {'is' if len(names) == 1 else 'are'} missing"


def _ask(shown: list[str]) -> str:
    return f"; did you mean {' or '.join(filter(None, [', '.join(shown[:-1]), shown[-1]]))}?" if shown else ""


def _is_certain(wanted: str, close: list[str]) -> bool:
    """True if the best match is the name misspelt, not one of its longer forms: the others would only distract.

    One letter more, as in a plural, is a misspelling.
    """
    is_longer_form = wanted in close[0] and len(close[0]) > len(wanted) + 1
    return not is_longer_form and bool(get_close_matches(wanted, close[:1], cutoff=0.8))


def _letters(name: str) -> str:
    return re.sub(r"[-_.\s]", "", name.casefold())


def _digits(name: str) -> list[str]:
    return sorted(re.findall(r"[0-9]", name))
