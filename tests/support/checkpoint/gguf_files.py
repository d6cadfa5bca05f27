"""Write small GGUF files and decode their blocks element by element, independently of the code under test."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import synthetic

from fp4kit.formats import E2M1, E4M3

STRING, ARRAY, UINT32 = 8, 9, 4
Info = tuple[int, np.ndarray, tuple[int, ...]]  # type number, bytes, shape in NumPy's order
LAYERS, EXPERTS, HIDDEN = 2, 4, 128
_NUMBERS = {"F32": 0, "F16": 1, "BF16": 30}


def text(value: str) -> bytes:
    """Return a string as GGUF stores it: its length, then its UTF-8 bytes."""
    return struct.pack("<Q", len(value.encode())) + value.encode()


def key(name: str, value: Any) -> bytes:
    """Return one key of the header and its value as GGUF stores them.

    The value is a string, an int (stored as uint32) or a list of strings.
    """
    if isinstance(value, str):
        return text(name) + struct.pack("<I", STRING) + text(value)
    if isinstance(value, int):
        return text(name) + struct.pack("<II", UINT32, value)
    return text(name) + struct.pack("<IIQ", ARRAY, STRING, len(value)) + b"".join(map(text, value))


def plain(x: np.ndarray) -> Info:
    """Return an unquantized tensor (float32, float16 or bfloat16) as `write` takes it."""
    name = synthetic.DTYPE_NAMES[x.dtype]
    return _NUMBERS[name], np.ascontiguousarray(x).reshape(-1).view(np.uint8), x.shape


def write(path: Path, tensors: Mapping[str, Info], keys: Mapping[str, Any] | None = None, alignment: int = 32) -> None:
    """Write a GGUF file of version 3.

    Args:
        path: the file to write.
        tensors: {name: (number of the type, bytes, shape)}.
        keys: header keys, in addition to an architecture and a layer count.
        alignment: the multiple of bytes at which tensors begin.
    """
    keys = {"general.architecture": "llama", "llama.block_count": LAYERS, **(keys or {})}
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(keys)) + b"".join(key(*pair) for pair in keys.items())
    data = b""
    for name, (number, raw, shape) in tensors.items():
        head += text(name) + struct.pack(f"<I{len(shape)}Q", len(shape), *shape[::-1])
        head += struct.pack("<IQ", number, len(data))
        data += raw.tobytes() + bytes(-raw.size % alignment)
    path.write_bytes(head + bytes(-len(head) % alignment) + data)


def q8_0(x: np.ndarray) -> Info:
    """Quantize a matrix to Q8_0, whose blocks hold a float16 scale and 32 int8 codes; return it as `write` takes it."""
    blocks = x.astype(np.float32).reshape(-1, 32)
    scales = (np.abs(blocks).max(axis=1) / 127).astype(np.float16)
    codes = np.rint(blocks / scales.astype(np.float32)[:, None]).astype(np.int8)
    return 8, np.concatenate([scales.view(np.uint8).reshape(-1, 2), codes.view(np.uint8)], axis=1).reshape(-1), x.shape


def q8_0_values(info: Info) -> np.ndarray:
    """Return the values of a matrix that q8_0 returned."""
    blocks = info[1].reshape(-1, 34)
    scales = np.ascontiguousarray(blocks[:, :2]).view(np.float16).astype(np.float32)
    return (blocks[:, 2:].view(np.int8).astype(np.float32) * scales).reshape(info[2])


def model(dtype: np.dtype = synthetic.BF16, experts: bool = True) -> dict[str, np.ndarray]:
    """Return the unquantized tensors of a small model by their llama.cpp names.

    Layer 0 is dense, layer 1 has experts, or only their router if ``experts`` is False. The experts' down projections
    have K = 96, which is not a multiple of 64. Matrices have the given dtype; norms and the router are float32.
    """
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (96, HIDDEN), "output.weight": (96, HIDDEN)}
    for i in range(LAYERS):
        rows = {"attn_q": 128, "attn_k": 64, "attn_v": 64, "attn_output": 128}
        shapes |= {f"blk.{i}.{name}.weight": (count, HIDDEN) for name, count in rows.items()}
    shapes |= {f"blk.0.ffn_{part}.weight": (192, HIDDEN) for part in ("gate", "up")}
    shapes |= {"blk.0.ffn_down.weight": (HIDDEN, 192)}
    if experts:
        shapes |= {f"blk.1.ffn_{part}_exps.weight": (EXPERTS, 96, HIDDEN) for part in ("gate", "up")}
        shapes |= {"blk.1.ffn_down_exps.weight": (EXPERTS, HIDDEN, 96)}
    found = {name: synthetic.random(name, shape, 0.05, dtype) for name, shape in shapes.items()}
    norms = ["output_norm", *(f"blk.{i}.{name}_norm" for i in range(LAYERS) for name in ("attn", "ffn"))]
    found |= {f"{name}.weight": np.ones(HIDDEN, np.float32) for name in norms}
    return found | {"blk.1.ffn_gate_inp.weight": synthetic.random("router", (EXPERTS, HIDDEN), 0.05, np.dtype("f4"))}


def write_model(path: Path, dtype: np.dtype = synthetic.BF16, **keys: Any) -> dict[str, np.ndarray]:
    """Write the tensors of `model` to a GGUF file and return them.

    Args:
        path: the file to write.
        dtype: the dtype of the tensors.
        keys: further header keys and their values.
    """
    found = model(dtype)
    write(path, {name: plain(x) for name, x in found.items()}, {"tokenizer.ggml.tokens": ["a", "bé", ""], **keys})
    return found


def decoded(raw: np.ndarray, kind: str) -> np.ndarray:
    """Return the values of one row of blocks, decoded element by element as in llama.cpp.

    The steps follow dequantize_row_* in ggml-quants.c.

    Args:
        raw: the bytes of the row.
        kind: "mxfp4" or "nvfp4".
    """
    size, scales, group = (17, 1, 32) if kind == "mxfp4" else (36, 4, 16)
    doubled = [int(2 * value) for value in E2M1.values]  # integers have no -0
    found: list[float] = []
    for block in raw.reshape(-1, size):
        codes = block[scales:].reshape(scales, group // 2)
        for scale, row in zip(block[:scales], codes, strict=True):
            half = 2.0 ** (int(scale) - 128) if kind == "mxfp4" else unsigned_e4m3(int(scale)) / 2
            nibbles = [int(byte) & 15 for byte in row] + [int(byte) >> 4 for byte in row]
            with np.errstate(over="ignore"):
                found += [np.float32(doubled[nibble]) * np.float32(half) for nibble in nibbles]
    return np.array(found, np.float32)


def unsigned_e4m3(byte: int) -> float:
    """Return the value of a scale byte, as ggml_ue4m3_to_fp32 does: 0 for 0x7F, 480 for 0xFF, never NaN.

    For any other byte, the sign bit is ignored.
    """
    if byte == 0xFF:
        return 480.0
    return 0.0 if byte == 0x7F else float(E4M3.values[byte & 0x7F])
