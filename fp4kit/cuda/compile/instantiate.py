"""Write the C++ text that instantiates one kernel.

It defines the structs of the recipe, and the types and constants that the kernel uses. Then it includes the kernel's
file.
"""

from __future__ import annotations

from collections.abc import Mapping

PRELUDE = '#include "block.cuh"\n#include "fake.cuh"\n#include "scale_layout.cuh"\n#include "row_step.cuh"\n'


def instantiation(file: str, struct: str = "", **names: str | bool) -> str:
    """Return the C++ source that instantiates the kernels in `file`.cu once."""
    return "\n".join([PRELUDE + struct, *_definitions(names), f'#include "{file}.cu"', ""])


def _definitions(names: Mapping[str, str | bool]) -> list[str]:
    """Return one C++ definition per name: of a bool constant, of an enum constant ("Enum::value"), or of a type
    alias.
    """
    lines = []
    for name, value in names.items():
        if isinstance(value, bool):
            lines.append(f"constexpr bool {name} = {str(value).lower()};")
        elif "::" in value:
            lines.append(f"constexpr {value.split('::')[0]} {name} = {value};")
        else:
            lines.append(f"using {name} = {value};")
    return lines
