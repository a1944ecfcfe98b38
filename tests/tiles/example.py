# SPDX-License-Identifier: Apache-2.0
"""The example all-gather + GEMM, as its users have it."""

import importlib.util
from pathlib import Path

ROOT = Path(__file__).parents[2]
FILE = ROOT / "examples" / "all_gather_gemm.py"

_spec = importlib.util.spec_from_file_location("example_all_gather_gemm", FILE)
_module = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_module)
all_gather_gemm = _module.all_gather_gemm
launch = _module.launch


def read_code(name):
    """An example's kernel and its launch, as they stand in the file."""
    source = (ROOT / "examples" / f"{name}.py").read_text()
    return source[source.index("@triton.jit") : source.index("def main")].strip()
