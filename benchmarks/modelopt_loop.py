"""Time Model-Optimizer's quantizers in a loop with one quantizer per tensor, as Model-Optimizer quantizes experts."""

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
        "block_sizes": {-1: 16, "type": "dynamic", "scale_bits": (4, 3)},  # computed by a Triton kernel
    },
}
EXTENSIONS = {"fp8-modelopt": "get_cuda_ext_fp8", "int8-modelopt-channel": "get_cuda_ext"}
PATIENCE = 120  # seconds to wait for the build of an extension
NAME = "Model-Optimizer loop"


class Loop:
    """Build Model-Optimizer's CUDA extensions in the background, and provide calls that loop over its quantizers.

    A build takes up to 45 s, so it starts when the object is created. If an extension cannot be built, Model-Optimizer
    quantizes to FP8 with eager PyTorch operations. INT8 then fails, and the benchmark's row records the failure.
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
        """Return the modules `nn` and `config` of Model-Optimizer's quantization, after its extensions are loaded.

        Return () if PyTorch or Model-Optimizer is not installed, or if the benchmark runs without other libraries.
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
        """Load an extension once its build has finished.

        If the build failed, mark the extension as missing, so that Model-Optimizer does not try to build it again.
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
        """Return {name: call} of a loop that quantizes the tensors `xs` with their amaxes.

        The dict is empty if Model-Optimizer is not installed or has no quantizer for the recipe, or if other libraries
        are not timed.
        """
        if recipe not in ATTRIBUTES or not self._modules:
            return {}
        nn, config = self._modules
        pairs: list[tuple[Any, Any]] = []

        def loop() -> None:
            if not pairs:  # created in the first call, so that an error is recorded as a failed peer
                for x, amax in zip(xs, amaxes, strict=True):
                    quantizer = nn.TensorQuantizer(config.QuantizerAttributeConfig(**ATTRIBUTES[recipe])).cuda()
                    limits = peers.tensor(amax.reshape(-1))
                    quantizer.amax = limits.reshape(-1, 1) if amax.ndim else limits.reshape(())
                    pairs.append((quantizer, peers.tensor(x)))
            for quantizer, x in pairs:
                quantizer(x)

        eager = recipe == "fp8-modelopt" and self._builds[recipe].returncode != 0
        return {f"{NAME}, eager" if eager else NAME: loop}
