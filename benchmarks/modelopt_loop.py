"""Model-Optimizer's quantizers, one a tensor, as its loop over experts runs them."""

from __future__ import annotations

import contextlib
import io
import subprocess
import sys
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import peers
from measure import Bench, Call

ATTRIBUTES: dict[str, dict[str, Any]] = {
    "fp8-modelopt": {"num_bits": (4, 3), "axis": None},
    "int8-modelopt-channel": {"num_bits": 8, "axis": 0},
    "nvfp4-modelopt": {
        "num_bits": (2, 1),
        "block_sizes": {-1: 16, "type": "dynamic", "scale_bits": (4, 3)},
    },  # by Triton
}
EXTENSIONS = {"fp8-modelopt": "get_cuda_ext_fp8", "int8-modelopt-channel": "get_cuda_ext"}
PATIENCE = 120  # seconds for a build that is under way
NAME = "Model-Optimizer loop"


class Loop:
    """Model-Optimizer's loop. Its CUDA extensions, which take up to 45 s, are built in processes of their own from now
    on.

    Where an extension cannot be built, FP8 runs as operations of eager PyTorch, and INT8 fails, which is recorded.
    """

    def __init__(self, bench: Bench) -> None:
        self._builds: dict[str, subprocess.Popen[bytes]] = {}
        if bench.peers and peers.torch() is not None and peers.module("modelopt") is not None:
            for recipe, name in EXTENSIONS.items():
                code = f"from modelopt.torch.quantization import extensions; extensions.{name}(raise_if_failed=True)"
                quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
                self._builds[recipe] = subprocess.Popen([sys.executable, "-W", "ignore", "-c", code], **quiet)

    @cached_property
    def _modules(self) -> tuple[Any, ...]:
        """Quantizers and their settings, with the extensions loaded; nothing where Model-Optimizer is missing."""
        names = ("nn", "config", "extensions")
        found = [peers.module(f"modelopt.torch.quantization.{name}") for name in names] if self._builds else [None]
        if any(m is None for m in found):
            return ()
        for recipe, build in self._builds.items():
            self._load(getattr(found[2], EXTENSIONS[recipe]), build)
        return tuple(found[:2])

    @staticmethod
    def _load(extension: Any, build: subprocess.Popen[bytes]) -> None:
        """Call what loads an extension, once it is built; if it was not, tell it that there is none, or it would build
        it.
        """
        try:
            built = build.wait(PATIENCE) == 0
        except subprocess.TimeoutExpired:
            build.kill()
            built = False
        if not built:
            extension.extension = None
            return
        with contextlib.redirect_stdout(io.StringIO()):
            extension()

    def calls(self, recipe: str, xs: Sequence[Any], amaxes: Sequence[Any]) -> dict[str, Call]:
        """{name: call} for the tensors with elements, their amaxes set; empty without quantizers for the recipe."""
        if recipe not in ATTRIBUTES or not self._modules:
            return {}
        nn, config = self._modules
        pairs: list[tuple[Any, Any]] = []

        def loop() -> None:
            if not pairs:  # here, so that what fails is recorded
                for x, amax in zip(xs, amaxes, strict=True):
                    quantizer = nn.TensorQuantizer(config.QuantizerAttributeConfig(**ATTRIBUTES[recipe])).cuda()
                    limits = peers.tensor(amax.reshape(-1))
                    quantizer.amax = limits.reshape(-1, 1) if amax.ndim else limits.reshape(())
                    pairs.append((quantizer, peers.tensor(x)))
            for quantizer, x in pairs:
                quantizer(x)

        eager = recipe == "fp8-modelopt" and self._builds[recipe].returncode != 0
        return {f"{NAME}, eager" if eager else NAME: loop}
