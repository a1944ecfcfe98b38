# SPDX-License-Identifier: Apache-2.0
"""Registers "stretto" as a torch.distributed backend, without importing torch before the program does.

When torch is imported, it imports this module by the entry point "torch.backends", so that a script that only names the
backend finds it. Where Stretto is on the path but not installed, or with TORCH_DEVICE_BACKEND_AUTOLOAD=0, `import
stretto` registers the name, at once or as soon as torch.distributed has been imported.
"""

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Backend

NAME = "stretto"
_HOME = "torch.distributed.distributed_c10d"


def register() -> None:
    """Register the backend now if torch.distributed has been imported, else right after its import."""
    module = sys.modules.get(_HOME)
    if hasattr(module, "BackendConfig"):  # the module has run far enough
        _register(module)
    elif not any(isinstance(finder, _AfterImport) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AfterImport())


def _register(module: Any) -> None:
    if NAME not in module.Backend.backend_list:
        # Without GPUs do not register for cuda: frameworks that ask a group for its devices would put tensors there.
        version = module.torch.version
        devices = ["cpu"] if version.cuda is None and version.hip is None else ["cpu", "cuda"]
        module.Backend.register_backend(NAME, _create, extended_api=True, devices=devices)


def _create(request: Any, options: object = None) -> "Backend":
    from stretto.collectives.backend.factory import create_backend  # imported late: it is large, and compiles

    return create_backend(request, options)


class _AfterImport:
    """A meta path finder for torch.distributed's module that registers the backend once the module has run."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find the module as Python does, with a loader that registers the backend afterwards."""
        if fullname != _HOME:
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.loader is None:
            return spec
        run = spec.loader.exec_module

        def run_and_register(module: ModuleType) -> None:
            run(module)
            _register(module)

        spec.loader.exec_module = run_and_register  # type: ignore[method-assign]
        return spec
