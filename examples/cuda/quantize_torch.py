"""Make a PyTorch operator from fp4kit's kernels, without nvcc and CuPy: the CUDA driver loads and launches cubins."""

import ctypes
import sys
from functools import cache

import fp4kit
import fp4kit.cuda

try:
    import torch
except ImportError:
    sys.exit("quantize_torch.py: needs PyTorch and a GPU")

RECIPE = "nvfp4-te"


def check(result):
    """Raise RuntimeError if a function of the driver failed."""
    if result:
        raise RuntimeError(f"the CUDA driver returned error {result}")


@cache
def driver():
    """Return the library of the CUDA driver."""
    return ctypes.CDLL("libcuda.so.1")


@cache
def load(kernel, device):
    """Return the driver's handle of a kernel on the current device."""
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    check(driver().cuModuleLoadData(ctypes.byref(module), fp4kit.cuda.compile(kernel)))
    check(driver().cuModuleGetFunction(ctypes.byref(function), module, kernel.name.encode()))
    return function


def launch(kernel, device, **tensors):
    """Launch a kernel on PyTorch's current stream. Its only parameter is the struct of arguments."""
    data = kernel.pack(**{name: tensor.data_ptr() for name, tensor in tensors.items()})
    struct = ctypes.create_string_buffer(data, len(data))
    parameters = (ctypes.c_void_p * 1)(ctypes.addressof(struct))
    stream = ctypes.c_void_p(torch.cuda.current_stream(device).cuda_stream)
    sizes = (kernel.grid, 1, 1, kernel.block, 1, 1, 0)  # 0 bytes of dynamic shared memory
    check(driver().cuLaunchKernel(load(kernel, device), *sizes, stream, parameters, None))


@torch.library.custom_op("fp4kit_example::quantize", mutates_args=())
def quantize(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the codes, the block scales and the tensor scale of a matrix."""
    x = x.contiguous()
    arch = "sm_{}{}".format(*torch.cuda.get_device_capability(x.device))
    arguments = RECIPE, str(x.dtype).removeprefix("torch."), arch
    options = {"shape": tuple(x.shape), "aligned": x.data_ptr() % 16 == 0}
    find, encode = (fp4kit.cuda.source(name, *arguments, **options) for name in ("tensor_amax", "quantize"))
    packed, scales, tensor_scale = results(x)
    amax = x.new_zeros((), dtype=torch.float32)
    launch(find, x.device, x=x, amax=amax)
    launch(encode, x.device, x=x, packed=packed, scales=scales, tensor_amax=amax, tensor_scale=tensor_scale)
    return packed, scales, tensor_scale


@quantize.register_fake
def results(x):
    """Return new tensors for the result, as torch.compile needs them."""
    rows, columns = x.shape
    packed, scales = (x.new_empty((rows, columns // n), dtype=torch.uint8) for n in (2, 16))
    return packed, scales, x.new_empty((), dtype=torch.float32)


if __name__ == "__main__":
    if len(sys.argv) > 1 or not torch.cuda.is_available():
        sys.exit("usage: quantize_torch.py, without arguments; needs PyTorch with CUDA and a GPU")
    x = (torch.arange(1024 * 1024, device="cuda") * 37 % 101 - 50).reshape(1024, 1024).bfloat16()
    q = fp4kit.quantize(x.cpu(), RECIPE)
    for name, tensor in zip(("packed", "block_scale", "tensor_scale"), quantize(x), strict=True):
        print(name, "equal" if torch.equal(tensor.cpu(), getattr(q, name)) else "different")
