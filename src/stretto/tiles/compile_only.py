# SPDX-License-Identifier: Apache-2.0
"""Compile a kernel without a GPU, from the arguments of an ordinary launch.

Tests without a GPU check machine code this way: whether a kernel compiles, and what stands before and after a signal.
Triton has no public interface for it; its private ones (3.6 to 3.9) are used only here.
"""

from typing import Any

from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile, make_backend
from triton.runtime.jit import DependenciesFinder, JITFunction, create_function_from_signature

from stretto.tiles.launches import FIXED_OPTIONS

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}


def compile_kernel(kernel: Any, arguments: tuple[Any, ...], options: dict[str, Any], target: str) -> dict[str, Any]:
    """The kernel in all its forms, by name: "ttir", "ttgir", "llir", then "ptx", "cubin" or "amdgcn", "hsaco".

    arguments, options: as in a launch, kernel[grid](*arguments, **options); tensors may be on the CPU. target: one of
    `TARGETS`. ValueError for others, and in a process whose kernels are interpreted. RuntimeError where Triton has
    moved a reduction out of a loop whose turns need one each, as 3.6 and 3.7 do with tensors that a loop carries.
    """
    forms = dict(_compile(kernel, arguments, options, target).asm)
    _check_reductions(forms["ttir"], forms["ttgir"])
    return forms


def count_shared_bytes(kernel: Any, arguments: tuple[Any, ...], options: dict[str, Any], target: str) -> int:
    """The shared memory of a block of this launch; else as `compile_kernel`."""
    return int(_compile(kernel, arguments, options, target).metadata.shared)


def _compile(kernel: Any, arguments: tuple[Any, ...], options: dict[str, Any], target: str) -> Any:
    if target not in TARGETS:
        raise ValueError(f"a kernel can be compiled for {', '.join(TARGETS)}, not for {target!r}")
    if not isinstance(kernel, JITFunction):
        raise ValueError("this process interprets its kernels: unset TRITON_INTERPRET to compile them")
    backend = make_backend(TARGETS[target])
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    # A driver would fill in these defaults; without a GPU there is none.
    named = {"debug": False, "sanitize_overflow": False, **FIXED_OPTIONS, **options}
    bound, specialization, rest = bind(*arguments, **named)
    parsed, signature, constants, attributes = kernel._pack_args(backend, named, bound, specialization, rest)
    source = ASTSource(kernel, signature, constants, attributes)
    return compile(source, target=TARGETS[target], options=parsed.__dict__)


def _check_reductions(before: str, after: str) -> None:
    """Raise a RuntimeError where fewer reductions are inside of loops than before layouts were assigned.

    What does not change in a loop has left it before that. Pipelines add reductions, outside of loops too.
    """
    found, kept = (_count_reductions(form) for form in (before, after))
    for depth in range(1, len(found)):
        if sum(found[depth:]) > sum(kept[depth:]):
            raise RuntimeError(
                f"Triton has moved a reduction out of {depth} nested loops: every turn would take the first's"
            )


def _count_reductions(form: str) -> list[int]:
    """Count the reductions and scans inside of 0, 1, 2, ... nested loops of a kernel, which is indented as it nests."""
    counts, loops = [0] * 8, list[int]()
    for line in form.splitlines():
        indent = len(line) - len(line.lstrip())
        while loops and line.strip() and indent <= loops[-1] and "} do {" not in line:
            loops.pop()
        counts[len(loops)] += '"tt.reduce"' in line or '"tt.scan"' in line
        if "scf.for" in line or "scf.while" in line:
            loops.append(indent)
    return counts


def _hash_dependencies_first() -> None:
    """Give kernels the same keys in Triton's cache in every process, as Triton 3.9 does.

    Before 3.9 a kernel's key has the globals of a function that it calls only if that function was hashed earlier. The
    key depends on what the process compiled before, and a kernel that is in the cache is compiled again.
    """
    update = DependenciesFinder._update_hash

    def update_hash(finder: DependenciesFinder, function: Any) -> None:
        function.cache_key  # noqa: B018  (a property that hashes)
        update(finder, function)

    DependenciesFinder._update_hash = update_hash


_hash_dependencies_first()
