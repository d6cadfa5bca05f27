"""List the rows of vLLM, triton_kernels, Quark, auto-round, fouroversix, SGLang, DeepGEMM and qwix.

rows.py defines GoldenRow and imports this module. To avoid a circular import, each function here takes the class
GoldenRow as ``row``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

Rows = Iterator[Any]


def serving_rows(row: Callable[..., Any]) -> Rows:
    """Yield all rows of this module. ``row`` is the class GoldenRow."""
    for family in (_vllm, _triton_kernels, _quark, _auto_round, _fouroversix, _others):
        yield from family(row)


def _vllm(row: Callable[..., Any]) -> Rows:
    """Yield the GoldenRow objects for recorded outputs of vLLM. ``row`` is the class GoldenRow."""
    yield row("nvfp4-vllm-emulation", "vllm", "nvfp4", min_amax=1e-8)
    yield row("nvfp4-vllm-emulation", "vllm", "nvfp4", fake=True)
    yield row("nvfp4-vllm-emulation-cuda", "producers_h200", "vllm_nvfp4_fake_gpu", fake=True, skip="nonfinite_block")
    # Compare the recorded tensor scale too, which a row with fake=True does not compare.
    yield row("nvfp4-vllm-emulation-cuda", "producers_h200", "vllm_nvfp4_fake_gpu")
    yield row("mxfp4-vllm", "vllm", "mxfp4", on_gpu="vllm_mxfp4")
    yield row("mxfp4-vllm-cpu", "vllm", "mxfp4")
    yield row("mxfp8-modelopt", "vllm", "mxfp8", skip="nonfinite_block")  # also named mxfp8-vllm


def _triton_kernels(row: Callable[..., Any]) -> Rows:
    """Yield the GoldenRow objects for recorded outputs of triton_kernels. ``row`` is the class GoldenRow."""
    for name, variant in (
        ("mxfp4-triton-kernels", "mxfp4_up"),
        ("mxfp4-triton-kernels-down", "mxfp4_down"),
        ("mxfp8-triton-kernels", "mxfp8_e4m3_up"),
        ("mxfp8-triton-kernels-down", "mxfp8_e4m3_down"),
        ("mxfp8-triton-kernels-e5m2", "mxfp8_e5m2_up"),
    ):
        yield row(name, "triton_kernels", variant, skip="nan_element" if "mxfp4" in variant else "")
        yield row(name, "producers_h200", f"triton_kernels_{variant}", skip="nonfinite_block")
    yield row("mxfp4-triton-kernels", "triton_kernels", "mxfp4_up", fake=True, skip="nonfinite_block")


def _quark(row: Callable[..., Any]) -> Rows:
    """Yield the GoldenRow objects for recorded outputs of Quark. ``row`` is the class GoldenRow."""
    yield row("nvfp4-quark", "quark", "nvfp4", skip="infinite_quotient")
    yield row("nvfp4-quark-file2file", "quark", "nvfp4_file2file", skip="infinite_quotient")
    for mode in ("even", "floor", "ceil"):
        yield row(f"mxfp4-quark-{mode}", "quark", f"mxfp4_{mode}", skip="nonfinite_block", decoded=True)
        yield row(f"mxfp4-quark-{mode}", "quark", f"mxfp4_{mode}", fake=True, values=("output",), skip="applied_scale")
    for element in ("e2m3", "e3m2"):
        yield row(f"mxfp6-quark-{element}-even", "quark", f"mxfp6_{element}_even", skip="nonfinite_block")
    yield row("mxfp8-quark-even", "quark", "mxfp8_e4m3_even", fake=True, skip="nonfinite_block")
    yield row("mxfp8-quark-even", "quark", "mxfp8_e4m3_even", min_scale=1, skip="nonfinite_block")


def _auto_round(row: Callable[..., Any]) -> Rows:
    """Yield the GoldenRow objects for recorded outputs of auto-round. ``row`` is the class GoldenRow."""
    yield row("nvfp4-auto-round", "auto_round", "nvfp4")
    yield row("nvfp4-auto-round-fake", "auto_round", "nvfp4", fake=True)
    yield row("nvfp4-auto-round-opt", "auto_round", "nvfp4_opt_rtn")
    yield row("mxfp4-auto-round-opt", "auto_round", "mxfp4_opt_rtn", skip="nonfinite_block")
    yield row("mxfp4-auto-round", "auto_round", "mxfp4")
    yield row("mxfp4-auto-round", "auto_round", "mxfp4", fake=True)
    for mode in ("rceil", "rceil_v2"):
        yield row(f"mxfp4-auto-round-{mode.replace('_', '-')}", "auto_round", f"mxfp4_{mode}")
    yield row("mxfp8-auto-round", "auto_round", "mxfp8")
    yield row("mxfp8-auto-round-rceil", "auto_round", "mxfp8_rceil")


def _fouroversix(row: Callable[..., Any]) -> Rows:
    """Yield the GoldenRow objects for recorded outputs of fouroversix. ``row`` is the class GoldenRow."""
    for name, variant in (("", "mse"), ("-mae", "mae"), ("-absmax", "abs_max")):
        yield row(f"nvfp4-fouroversix{name}", "fouroversix", f"nvfp4_{variant}", skip="nonfinite_tensor", decoded=True)
    yield row("nvfp4-fouroversix", "fouroversix", "nvfp4_mse_2d", block=(16, 16), skip="nonfinite_tensor")
    for name, variant in (("6", "static_6"), ("6-2d", "static_6_2d"), ("4", "static_4")):
        yield row(f"nvfp4-fouroversix-{name}", "fouroversix", f"nvfp4_{variant}", skip="nonfinite_tensor", decoded=True)
    for top in ("6", "4"):
        yield row(f"mxfp4-fouroversix-{top}", "fouroversix", f"mxfp4_static_{top}", decoded=True)
    for name, variant, block in (
        ("", "mse", None),
        ("", "mse_2d", (16, 16)),
        ("-mae", "mae", None),
        ("-6", "static_6", None),
    ):
        fields = {"block": block, "skip": "nonfinite_tensor", "on_gpu": f"fouroversix_triton_nvfp4_{variant}"}
        yield row(f"nvfp4-fouroversix-triton{name}", "fouroversix", f"nvfp4_{variant}", **fields)


def _others(row: Callable[..., Any]) -> Rows:
    """Yield the GoldenRow objects for recorded outputs of SGLang, DeepGEMM and qwix. ``row`` is the class GoldenRow."""
    yield row("mxfp4-sglang-util", "sglang", "mxfp4")
    yield row("mxfp4-sglang-kv", "sglang", "kv_mxfp4_b16")
    for name in ("mxfp4", "mxfp8"):
        yield row(f"{name}-deepgemm", "deepgemm", name)
        yield row(f"{name}-qwix", "qwix", name)
    yield row("nvfp4-qwix", "qwix", "nvfp4")
