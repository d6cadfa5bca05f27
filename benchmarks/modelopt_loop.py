"""Run Model-Optimizer's quantizers in a loop, one quantizer per tensor, as Model-Optimizer does for experts."""

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
    },  # computed by a Triton kernel
}
EXTENSIONS = {"fp8-modelopt": "get_cuda_ext_fp8", "int8-modelopt-channel": "get_cuda_ext"}
PATIENCE = 120  # seconds to wait for a build that has not finished
NAME = "Model-Optimizer loop"


class Loop:
    """Provide Model-Optimizer's loop. Building its CUDA extensions takes up to 45 s, so it starts in background
    processes at once.

    If an extension cannot be built, FP8 runs as eager PyTorch operations, and INT8 fails, which is recorded.
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
        """The modules with the quantizers and their settings, after loading the extensions. Empty if Model-Optimizer is
        not installed.
        """
        names = ("nn", "config", "extensions")
        found = [peers.module(f"modelopt.torch.quantization.{name}") for name in names] if self._builds else [None]
        if any(m is None for m in found):
            return ()
        for recipe, build in self._builds.items():
            self._load(getattr(found[2], EXTENSIONS[recipe]), build)
        return tuple(found[:2])

    @staticmethod
    def _load(extension: Any, build: subprocess.Popen[bytes]) -> None:
        """Load an extension once it is built. If the build failed, mark the extension as missing, because
        Model-Optimizer would otherwise build it again.
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
        """Return {name: call} that quantizes the tensors with their amaxes. Empty if there is no quantizer for the
        recipe.
        """
        if recipe not in ATTRIBUTES or not self._modules:
            return {}
        nn, config = self._modules
        pairs: list[tuple[Any, Any]] = []

        def loop() -> None:
            if not pairs:  # created in the call, so that an error is recorded as a failed peer
                for x, amax in zip(xs, amaxes, strict=True):
                    quantizer = nn.TensorQuantizer(config.QuantizerAttributeConfig(**ATTRIBUTES[recipe])).cuda()
                    limits = peers.tensor(amax.reshape(-1))
                    quantizer.amax = limits.reshape(-1, 1) if amax.ndim else limits.reshape(())
                    pairs.append((quantizer, peers.tensor(x)))
            for quantizer, x in pairs:
                quantizer(x)

        eager = recipe == "fp8-modelopt" and self._builds[recipe].returncode != 0
        return {f"{NAME}, eager" if eager else NAME: loop}
