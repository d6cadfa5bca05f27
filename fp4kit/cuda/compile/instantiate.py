"""The C++ text that instantiates one kernel: the recipe's structs, the types, and the kernel's own file."""

from __future__ import annotations

from collections.abc import Mapping

PRELUDE = '#include "block.cuh"\n#include "fake.cuh"\n#include "scale_layout.cuh"\n'


def instantiation(file: str, struct: str = "", **names: str | bool) -> str:
    """Source of one instantiation of file.cu; names are types (`Input="Bfloat16"`) and constants (`kAligned=True`)."""
    return "\n".join([PRELUDE + struct, *_definitions(names), f'#include "{file}.cu"', ""])


def _definitions(names: Mapping[str, str | bool]) -> list[str]:
    lines = []
    for name, value in names.items():
        if isinstance(value, bool):
            lines.append(f"constexpr bool {name} = {str(value).lower()};")
        elif "::" in value:
            lines.append(f"constexpr {value.split('::')[0]} {name} = {value};")
        else:
            lines.append(f"using {name} = {value};")
    return lines
