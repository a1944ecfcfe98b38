# SPDX-License-Identifier: Apache-2.0
"""Compiles a program to a schedule, by passes from one immutable value to the next (MSCCLang, sections 4 and 5).

program -> instances -> chunk DAG -> instruction DAG -> fused -> channels -> order -> thread blocks -> schedule
"""

from stretto.collectives.compiler.compile import CompileError, compile_program

__all__ = ["CompileError", "compile_program"]
