"""Quantize a CuPy array by launching fp4kit's kernels from this program, and compare the bits with fp4kit.quantize."""

import sys
import tempfile

import numpy as np

import fp4kit
import fp4kit.cuda

try:
    import cupy
except ImportError:
    sys.exit("quantize_cupy.py: needs CuPy and a GPU")


def load(kernel):
    """Return the CuPy function of a kernel. RawModule would compile a text with -ftz=true, so it gets the cubin."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(fp4kit.cuda.compile(kernel))
        file.flush()
        return cupy.RawModule(path=file.name).get_function(kernel.name)


def launch(kernel, **arrays):
    """Launch a kernel on the current stream. Its parameter is a struct, which CuPy takes as an array of one element."""
    data = bytearray(kernel.pack(**{name: array.data.ptr for name, array in arrays.items()}))
    load(kernel)((kernel.grid,), (kernel.block,), (np.frombuffer(data, np.dtype((np.void, len(data)))),))


def quantize(x):
    """Return the codes, the block scales and the tensor scale of a contiguous matrix by nvfp4-te."""
    (rows, columns), arch = x.shape, f"sm_{cupy.cuda.Device().compute_capability}"
    options = {"shape": x.shape, "aligned": x.data.ptr % 16 == 0}
    find, encode = (
        fp4kit.cuda.source(operation, "nvfp4-te", x.dtype.name, arch, **options)
        for operation in ("tensor_amax", "quantize")
    )
    amax, tensor_scale = cupy.zeros((), np.float32), cupy.empty((), np.float32)
    packed, scales = cupy.empty((rows, columns // 2), np.uint8), cupy.empty((rows, columns // 16), np.uint8)
    launch(find, x=x, amax=amax)
    launch(encode, x=x, packed=packed, scales=scales, tensor_amax=amax, tensor_scale=tensor_scale)
    return packed, scales, tensor_scale


def main():
    """Print whether all bits are equal."""
    x = cupy.asarray(((np.arange(1024 * 1024) * 37 % 101 - 50) / 16).astype(np.float32).reshape(1024, 1024))
    q = fp4kit.quantize(x, "nvfp4-te")
    for name, array in zip(("packed", "block_scale", "tensor_scale"), quantize(x), strict=True):
        same = array.get().tobytes() == getattr(q, name).get().tobytes()
        print(name, "equal" if same else "different")


if __name__ == "__main__":
    main()
