"""Print a C header that describes a recipe to the CPU engine, for quantize.c, and write the table reciprocals.bin.

python recipe_header.py nvfp4-te > recipe.h
"""

import sys
from pathlib import Path

import fp4kit

if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
    sys.exit("usage: recipe_header.py RECIPE, such as nvfp4-te; `fp4kit recipes` lists recipes")
for name, value in fp4kit.engine_keys(sys.argv[1]).items():
    text = f'"{value}"' if isinstance(value, str) else f"{value!r}f" if isinstance(value, float) else value
    print(f"#define {name.upper()} {'INFINITY' if text == 'inff' else text}")
Path("reciprocals.bin").write_bytes(fp4kit.get_reciprocals())
