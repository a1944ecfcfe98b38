# SPDX-License-Identifier: Apache-2.0
"""An algorithm: a program in the chunk language, with the collective that it implements and its source."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from stretto.collectives.collective import Collective
from stretto.collectives.compiler import compile_program
from stretto.collectives.language import Program, trace
from stretto.collectives.schedule import Schedule
from stretto.suggestions import name_known


@dataclass(frozen=True)
class Algorithm:
    """A named program, which the decorator `algorithm` makes of a function.

    name: as the command line has it; program: the function; collective: makes its collective, from `in_place` and the
    program's parameters that its own signature names; source: its paper and section.
    """

    name: str
    program: Callable[..., None]
    collective: Callable[..., Collective]
    source: str

    @property
    def summary(self) -> str:
        """The first line of the program's docstring."""
        return (inspect.getdoc(self.program) or "").split("\n")[0]

    @property
    def parameters(self) -> tuple[str, ...]:
        """The names of its parameters: `ranks`, or `nodes` and `gpus`, and tuning parameters."""
        return tuple(name for name in self._names if name != "in_place")

    @property
    def _names(self) -> dict[str, None]:
        """The parameters of the program and of the collective, `in_place` included."""
        return dict.fromkeys(
            (*inspect.signature(self.program).parameters, *inspect.signature(self.collective).parameters)
        )

    @property
    def _required(self) -> dict[str, None]:
        """The parameters that have no default."""
        return {
            name: None
            for function in (self.program, self.collective)
            for name, parameter in inspect.signature(function).parameters.items()
            if parameter.default is inspect.Parameter.empty
        }

    def trace(self, **parameters: Any) -> Program:
        """Run the program once and record it. Raises ValueError for unknown parameters and bad values."""
        for name, value in parameters.items():
            if name == "in_place" and name not in self._names:
                raise ValueError(
                    f"{self.name} leaves no choice of in_place: neither its program nor its collective does"
                )
            if name not in self._names:
                raise ValueError(
                    f"{self.name} has no parameter {name!r}{name_known(name, self.parameters, 'it takes')}"
                )
            if name in ("nodes", "gpus") and value < 1:  # a product of two of these would be a number of ranks
                raise ValueError(f"{self.name} has at least 1 of {name}, not {value}")
        if missing := [repr(name) for name in self._required if name not in parameters]:
            raise ValueError(f"{self.name} needs {' and '.join(missing)}: it takes {', '.join(self.parameters)}")
        collective = self._call(self.collective, parameters)
        if not isinstance(collective, Collective):
            raise ValueError(f"{self.name} is given no collective to do: {collective!r} is none")
        with trace(collective) as traced:
            self._call(self.program, parameters)
        return traced.program

    def compile(
        self,
        *,
        protocol: str = "Simple",
        instances: int = 1,
        slots: int | None = None,
        min_bytes: int = 0,
        max_bytes: int = 0,
        **parameters: Any,
    ) -> Schedule:
        """Trace and compile it, as `compile_program` does; the schedule has the algorithm's name."""
        return compile_program(
            self.trace(**parameters),
            name=self.name,
            protocol=protocol,
            instances=instances,
            slots=slots,
            min_bytes=min_bytes,
            max_bytes=max_bytes,
        )

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        """The program itself, as a part of another."""
        self.program(*args, **kwargs)

    def _call(self, function: Callable[..., Any], parameters: dict[str, Any]) -> Any:
        return function(
            **{name: parameters[name] for name in inspect.signature(function).parameters if name in parameters}
        )


def algorithm(collective: Callable[..., Collective], source: str = "") -> Callable[[Callable[..., None]], Algorithm]:
    """Make an `Algorithm` of a program.

        @algorithm(lambda ranks: AllGather(ranks), source="...")
        def my_all_gather(ranks: int) -> None:
            ...

    collective: makes the collective, of those of the program's parameters that it names; source: where it is from.
    """

    def make(program: Callable[..., None]) -> Algorithm:
        return Algorithm(program.__name__.replace("_", "-"), program, collective, source)

    return make
