"""Name the examined engines and their versions, and define Finding, a fault that an engine would meet. Engines are
vLLM, SGLang and other programs that load quantized checkpoints.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

VERSIONS = {
    "vLLM": "0.33.0",
    "SGLang": "0.5.23",
    "transformers": "5.23.0",
    "compressed-tensors": "0.20.0",
    "Model-Optimizer": "0.47.0",
}
Status = Literal["loads", "fails", "wrong values", "unknown"]
How = Literal["run", "read", ""]
Severity = Literal["error", "warning"]
SERVING = ("vLLM", "SGLang", "transformers")  # engines that run a model; others in VERSIONS only decode its tensors


def named(engines: Iterable[str]) -> str:
    """Return the names of engines with their versions as one text, such as ``vLLM 0.33.0, SGLang 0.5.23``."""
    return ", ".join(f"{engine} {VERSIONS[engine]}" for engine in engines)


@dataclass(frozen=True)
class Finding:
    """Describe a fault that one engine would meet in one part of a checkpoint.

    engine, version: the name and version of the engine.
    severity: "error" if the engine rejects the checkpoint or decodes wrong values, otherwise "warning".
    subject: where the fault is: the name of a module, tensor or file, or "model" for the whole model.
    text: a message that says what is wrong.
    """

    engine: str
    version: str
    severity: Severity
    subject: str
    text: str

    def __str__(self) -> str:
        return f"{self.engine} {self.version}: {self.subject}: {self.text}"


def finding(engine: str, severity: Severity, subject: str, text: str) -> Finding:
    """Return a Finding about ``engine``, with the engine's version from VERSIONS."""
    return Finding(engine, VERSIONS[engine], severity, subject, text)
