"""Print a C header that describes a recipe to the CPU engine, for quantize.c.

python recipe_header.py nvfp4-te > recipe.h
"""

import sys

import fp4kit

for name, value in fp4kit.engine_keys(sys.argv[1]).items():
    text = f'"{value}"' if isinstance(value, str) else f"{value!r}f" if isinstance(value, float) else value
    print(f"#define {name.upper()} {'INFINITY' if text == 'inff' else text}")
