"""Quantize a float32 matrix with fp4kit's CPU engine by ctypes, as a program without NumPy would, and print its bytes.

fp4kit.h describes the structs and the functions. The program prints the codes and the block scales.
"""

import ctypes
from ctypes import c_float, c_int32, c_int64, c_void_p

import fp4kit


class Matrix(ctypes.Structure):
    """fp4kit_matrix of fp4kit.h."""

    _fields_ = [
        ("data", c_void_p),
        *((name, c_int64) for name in ("rows", "columns", "row_step", "column_step", "hadamard")),
    ]


FIELDS = """x:matrix encode:pointer decode:pointer amax:pointer tensor_step:int64 block_amax:pointer factors:pointer
block_step:int64 min_factor:float max_factor:float random:pointer random_step:int64 seed:pointer stream_first:int64
stream_stride:int64 packed:pointer scales:pointer packed_step:int64 scales_step:int64 needs_fallback:pointer
tile_rows:int64 tile_columns:int64 input:int32 block_rule:int32 element:int32 block:int32 block_rows:int32
threads:int32"""
KINDS = {"matrix": Matrix, "pointer": c_void_p, "int64": c_int64, "int32": c_int32, "float": c_float}


class EncodeCall(ctypes.Structure):
    """fp4kit_encode_call of fp4kit.h."""

    _fields_ = [(name, KINDS[kind]) for name, kind in (field.split(":") for field in FIELDS.split())]


rows, columns, keys = 4, 64, fp4kit.engine_keys("nvfp4-te")
engine = ctypes.CDLL(fp4kit.get_library())
if engine.fp4kit_api_version() != 2:
    raise SystemExit("this program needs version 2 of the C API")
index = {name: getattr(engine, f"fp4kit_{name}")(str(keys[name]).encode()) for name in ("block_rule", "element")}
call = EncodeCall(
    x=Matrix(None, rows, columns, columns, 1),
    packed_step=columns // 2,
    scales_step=columns // keys["block"],
    tile_rows=16,
    tile_columns=2048,
    **index,
    **{name: keys[name] for name in ("block", "block_rows", "tensor_step", "min_factor", "max_factor")},
)
x = (c_float * (rows * columns))(*((i * 37 % 101 - 50) / 16 for i in range(rows * columns)))
packed, scales = (ctypes.c_uint8 * (rows * columns // 2))(), (ctypes.c_uint8 * (rows * columns // keys["block"]))()
rule = engine.fp4kit_tensor_rule(str(keys["tensor_rule"]).encode())
if min(rule, *index.values()) < -1:
    raise SystemExit("the library does not know a key")
pointers = [ctypes.byref(array) for array in (packed, scales)]
status = engine.fp4kit_quantize(ctypes.byref(call), ctypes.byref(x), None, *pointers, None, None, rule, 1)
print(status, bytes(packed).hex(), bytes(scales).hex(), sep="\n")
