"""Time other libraries on the CPU in a separate process, which needs NumPy but not fp4kit.

    PYTHON cpu_peers.py SIZE THREADS [--quick]

The libraries are torchao (eager and with torch.compile), compressed-tensors, microxcaling and MLX, if that PYTHON has
them. Their input is the bfloat16 matrix of bench_cpu.py. With --quick, torch.compile is not used.

The process prints one line of JSON that lists the available calls. Then it reads the name of a call from each line,
makes the call once and prints its seconds. The caller can therefore let these calls take turns with its own. The first
use of a call compiles it and checks that its values equal the input to within the error of the format.

Versions tried: torch 2.13.0+cpu, torchao 0.18.0, compressed-tensors 0.20.0, mlx 0.32.4. microxcaling has no package, so
it was not tried.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from importlib import metadata
from typing import Any, NamedTuple

import numpy as np
from timing import WARMED

LARGEST_ERROR = {"nvfp4": 0.15, "mxfp4": 0.2, "mxfp8": 0.05}  # accepted root mean square error, relative to the input
PACKAGES = ("torch", "torchao", "compressed-tensors", "mlx", "numpy")


class Peer(NamedTuple):
    """Describe how a library quantizes and decodes one kind of format.

    Attributes:
        library: the library's name in the record, with its mode, such as "torchao RCEIL eager"
        kind: "nvfp4", "mxfp4" or "mxfp8"
        quantize: returns the library's quantized object, or None if the library offers only `fake`
        dequantize: decodes this object
        values: converts the decoded result to a float32 NumPy array
        fake: quantizes and decodes in one call, or None if the library offers quantize and dequantize
    """

    library: str
    kind: str
    quantize: Callable[[], Any] | None
    dequantize: Callable[[Any], Any]
    values: Callable[[Any], np.ndarray]
    fake: Callable[[], Any] | None = None


def matrix(size: int) -> np.ndarray:
    """Return the normally distributed matrix (size, size) of bench_cpu.py as float32, before its cast to bfloat16."""
    return np.random.default_rng(0).standard_normal((size, size), dtype=np.float32)


def _float32(y: Any) -> np.ndarray:
    """Return the values of a torch tensor as a float32 NumPy array."""
    return np.asarray(y.float().numpy())


def torchao(x: np.ndarray, threads: int, quick: bool) -> Iterator[Peer]:
    """Yield a Peer per mode of torchao's to_mx, and Peers for its NVFP4Tensor with and without a tensor scale.

    Raises ImportError if torchao is not installed.

    Args:
        x: the float32 input, which is cast to bfloat16
        threads: the number of threads that torch uses
        quick: False to yield a second Peer per call, compiled with torch.compile
    """
    import torch
    from torchao.prototype.mx_formats import mx_tensor as mx
    from torchao.prototype.mx_formats import nvfp4_tensor as nv

    torch.set_num_threads(threads)
    source, bf16 = torch.from_numpy(x).bfloat16(), torch.bfloat16
    elements = {"mxfp4": torch.float4_e2m1fn_x2, "mxfp8": torch.float8_e4m3fn}
    found: dict[tuple[str, str], tuple[Callable[..., Any], Callable[..., Any]]] = {}
    for kind, element in elements.items():
        for mode in ("FLOOR", "RCEIL"):
            scaling = mx.ScaleCalculationMode[mode]
            found[kind, mode] = (
                lambda x, e=element, s=scaling: mx.to_mx(x, e, 32, s),
                lambda q, e=element: mx.to_dtype(q[1], q[0], e, 32, bf16),
            )
    found["nvfp4", ""] = (
        lambda x: nv.NVFP4Tensor.to_nvfp4(x, per_tensor_scale=nv.per_tensor_amax_to_scale(x.abs().max())),
        lambda q: q.dequantize(bf16),
    )
    found["nvfp4", "without tensor scale"] = (nv.NVFP4Tensor.to_nvfp4, lambda q: q.dequantize(bf16))
    for (kind, mode), (quantize, dequantize) in found.items():
        name = f"torchao {mode}".strip()
        yield Peer(f"{name} eager", kind, lambda f=quantize: f(source), dequantize, _float32)
        if not quick:
            fast, back = (torch.compile(f, dynamic=False, fullgraph=True) for f in (quantize, dequantize))
            yield Peer(f"{name} compiled", kind, lambda f=fast: f(source), back, _float32)


def compressed_tensors(x: np.ndarray, threads: int, quick: bool) -> Iterator[Peer]:
    """Yield a Peer that quantizes a weight to NVFP4 as compressed-tensors does: first scales, then its compressor.

    Raises ImportError if compressed-tensors is not installed.

    Args:
        x: the float32 input, which is cast to bfloat16
        threads: the number of threads that torch uses
        quick: has no effect
    """
    import torch
    from compressed_tensors.compressors import quantize_and_pack_fp4, unpack_fp4_from_uint8
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.lifecycle.forward import dequantize
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    torch.set_num_threads(threads)
    source, e4m3 = torch.from_numpy(x).bfloat16(), torch.float8_e4m3fn
    settings = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "scale_dtype": e4m3}
    args = QuantizationArgs(**settings, symmetric=True)

    def quantize() -> Any:
        tensor_scale = generate_gparam(*torch.aminmax(source))
        blocks = source.view(len(source), -1, 16)
        scale, _ = calculate_qparams(*torch.aminmax(blocks, dim=-1), args, global_scale=tensor_scale)
        packed = quantize_and_pack_fp4(source, scale, global_scale=tensor_scale, group_size=16)
        return packed, scale.to(e4m3), tensor_scale

    def decode(q: Any) -> Any:
        packed, scale, tensor_scale = q
        codes = unpack_fp4_from_uint8(packed, packed.shape[0], packed.shape[1] * 2)
        return dequantize(codes, scale.to(codes.dtype), args=args, dtype=codes.dtype, global_scale=tensor_scale)

    yield Peer("compressed-tensors", "nvfp4", quantize, decode, _float32)


def microxcaling(x: np.ndarray, threads: int, quick: bool) -> Iterator[Peer]:
    """Yield a Peer per format for quantize_mx_op of microxcaling, which returns decoded values only.

    Raises ImportError if microxcaling is not installed.

    Args:
        x: the float32 input, which is cast to bfloat16
        threads: the number of threads that torch uses
        quick: has no effect
    """
    import torch
    from mx.mx_ops import quantize_mx_op
    from mx.specs import finalize_mx_specs

    torch.set_num_threads(threads)
    source = torch.from_numpy(x).bfloat16()
    for kind, element in (("mxfp4", "fp4_e2m1"), ("mxfp8", "fp8_e4m3")):
        specs = finalize_mx_specs({"w_elem_format": element, "scale_bits": 8, "block_size": 32, "custom_cuda": False})
        fake = lambda s=specs, e=element: quantize_mx_op(source, s, elem_format=e, axes=[-1], round="even")  # noqa: E731
        yield Peer("microxcaling", kind, None, lambda y: y, _float32, fake)


def mlx(x: np.ndarray, threads: int, quick: bool) -> Iterator[Peer]:
    """Yield a Peer per format for mx.quantize and mx.dequantize on MLX's CPU device.

    NVFP4 has two Peers, with and without a tensor scale. Raises ImportError if MLX is not installed.

    Args:
        x: the float32 input, which is cast to bfloat16
        threads: has no effect
        quick: has no effect
    """
    import mlx.core as mx

    mx.set_default_device(mx.cpu)
    source = mx.array(x).astype(mx.bfloat16)
    mx.eval(source)

    def calls(kind: str, scaled: bool) -> tuple[Callable[[], Any], Callable[[Any], Any]]:
        def quantize() -> Any:
            given = {"global_scale": mx.max(mx.abs(source)).astype(mx.float32)} if scaled else {}
            q = mx.quantize(source, mode=kind, **given)
            mx.eval(*q, *given.values())
            return q, given

        def dequantize(found: Any) -> Any:
            q, given = found
            y = mx.dequantize(*q, mode=kind, dtype=mx.bfloat16, **given)
            mx.eval(y)
            return y

        return quantize, dequantize

    for kind, scaled in (("nvfp4", True), ("nvfp4", False), ("mxfp4", False), ("mxfp8", False)):
        name = "MLX without tensor scale" if kind == "nvfp4" and not scaled else "MLX"
        yield Peer(name, kind, *calls(kind, scaled), lambda y: np.array(y.astype(mx.float32)))


LIBRARIES = (torchao, compressed_tensors, microxcaling, mlx)


class Timed:
    """Time one call of a peer (another library).

    The first use of `seconds` compiles the call and checks that its values are near the input.
    """

    def __init__(self, peer: Peer, operation: str, x: np.ndarray) -> None:
        self.peer, self.operation, self.x = peer, operation, x
        self.call: Callable[[], Any] | None = None
        self.last = 0.0

    def seconds(self) -> float:
        """Make one call and return its seconds. A short call is made once untimed first, as in bench_cpu.py.

        Raises ValueError at the first use if the values are wrong.
        """
        if self.call is None:
            self._try()
        assert self.call is not None
        if self.last < WARMED:
            self.call()
        start = time.perf_counter()
        self.call()
        self.last = time.perf_counter() - start
        return self.last

    def _try(self) -> None:
        """Check the peer's values, then keep the call to time in `self.call`.

        Raises ValueError if the values are wrong.
        """
        peer, made = self.peer, self.peer.fake or self.peer.quantize
        assert made is not None
        q = made()
        y = peer.values(peer.dequantize(q))
        error = float(np.sqrt(np.mean((y - self.x) ** 2) / np.mean(self.x**2)))
        if not error < LARGEST_ERROR[peer.kind]:
            raise ValueError(f"relative error {error:.2f}; at most {LARGEST_ERROR[peer.kind]} is accepted")
        self.call = (lambda: peer.dequantize(q)) if self.operation == "dequantize" else made
        self.call()


def found(x: np.ndarray, threads: int, quick: bool) -> tuple[dict[str, Timed], dict[str, str]]:
    """Return ({"operation/kind/library": call to time}, {library: error}).

    The second dict has the libraries that could not be loaded.
    """
    calls, missing = {}, {}
    for library in LIBRARIES:
        try:
            for peer in library(x, threads, quick):
                for operation in ("fake_quantize",) if peer.fake else ("quantize", "dequantize"):
                    calls[f"{operation}/{peer.kind}/{peer.library}"] = Timed(peer, operation, x)
        except Exception as error:
            missing[library.__name__] = first_line(error)
    return calls, missing


def first_line(error: BaseException) -> str:
    """Return the type of an error and the first line of its message, at most 160 characters."""
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"[:160]


def versions() -> dict[str, str]:
    """Return {package: version} for the installed packages of PACKAGES."""
    result = {}
    for name in PACKAGES:
        try:
            result[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return result


def main() -> None:
    """Print the available calls as one line of JSON, then make the call that each input line names.

    Each call is answered with one line of JSON, which holds its seconds or its error.
    What the libraries print goes to standard error.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("size", type=int)
    parser.add_argument("threads", type=int)
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    calls, missing = found(matrix(args.size), args.threads, args.quick)
    print(json.dumps({"calls": list(calls), "missing": missing, "versions": versions()}), file=answers, flush=True)
    for line in sys.stdin:
        try:
            answer: dict[str, Any] = {"seconds": calls[line.strip()].seconds()}
        except Exception as error:
            answer = {"error": first_line(error)}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
