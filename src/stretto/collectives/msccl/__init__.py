# SPDX-License-Identifier: Apache-2.0
"""Programs written for msccl-tools, run unmodified and compiled here.

A script that imports `msccl.language`, `msccl.language.collectives`, `msccl.language.routines` or `msccl.topologies` is
run with stand-ins for these modules, for the length of that run only. Its programs are traced with the meaning that
they have there (a reference names a place and reads its current contents) and compiled by Stretto's compiler.
docs/collectives.md#msccl-programs says what corresponds to what, and what is not supported.
"""

from stretto.collectives.msccl.script import ImportedProgram, ImportedScript, import_msccl
from stretto.collectives.msccl.values import ScriptError

__all__ = ["ImportedProgram", "ImportedScript", "ScriptError", "import_msccl"]
