"""Write the kernels for quantize_driver.cpp into a folder: two cubins, and their declarations in kernels.h.

python export_kernels.py sm_90 build
"""

import sys
from pathlib import Path

import fp4kit.cuda

if len(sys.argv) != 3 or not Path(sys.argv[2]).is_dir():
    sys.exit("usage: export_kernels.py ARCH FOLDER, such as sm_90 and an existing folder")
arch, folder = sys.argv[1], Path(sys.argv[2])
found = [
    fp4kit.cuda.source(operation, "nvfp4-te", "float32", arch, shape=(64, 256))
    for operation in ("tensor_amax", "quantize")
]
for kernel in found:
    (folder / f"{kernel.operation}.cubin").write_bytes(fp4kit.cuda.compile(kernel))
(folder / "kernels.h").write_text("\n".join(kernel.declaration for kernel in found))
