"""Parse names of the amax buffers of quantizers, in both spellings of checkpoints, and match wildcards against them."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

SEPARATORS = (".", "_")
_FORM = "<module>.weight_quantizer.<i>._amax or <module>.weight_quantizer_<i>._amax"
_NAME = re.compile(r"(?P<base>(?:.+\.)?\w*?quantizers?)(?:[._](?P<index>[0-9]{1,7}))?(?:\.(?P<buffer>_\w*amax))?")


@dataclass(frozen=True)
class AmaxName:
    """The name of one amax buffer: "<base>.<index>.<buffer>" or "<base>_<index>.<buffer>".

    The index is absent for a module without experts, and for an amax that covers all experts of a module.

    Attributes:
        base: "<module>.weight_quantizer", or another quantizer of the module, such as input_quantizer.
        index: number of the expert, or None.
        buffer: the name of the buffer, such as "_amax" or "_global_amax".

    Source: Model-Optimizer's GroupedQuantizer writes ".<i>"; its pull request 1717 wrote "_<i>".
    """

    base: str
    index: int | None = None
    buffer: str = "_amax"

    @classmethod
    def find(cls, key: Any) -> AmaxName | None:
        """Return the AmaxName of a checkpoint's key, or None if the key names no amax buffer of a quantizer."""
        match = _NAME.fullmatch(key) if isinstance(key, str) else None
        if match is None:
            return None
        index = match["index"]
        return cls(match["base"], None if index is None else int(index), match["buffer"] or "_amax")

    @classmethod
    def parse(cls, key: Any, op: str = "amax state") -> AmaxName:
        """Return the AmaxName of a checkpoint's key."""
        name = cls.find(key)
        if name is None:
            raise ValueError(f"{op}: {key!r:.200} names no quantizer; needs {_FORM}")
        return name

    def key(self, separator: str = ".") -> str:
        """Return the name as a checkpoint spells it, such as "m.weight_quantizer.3._amax"."""
        return f"{self._quantizer(separator)}.{self.buffer}"

    def at(self, index: int | None) -> AmaxName:
        """Return a new AmaxName with the expert number ``index``, and this base and buffer."""
        return replace(self, index=index)

    def matches(self, pattern: str) -> bool:
        """Return whether a wildcard (fnmatch; case matters) matches one of the spellings of this name."""
        spellings = {self.base, *(self._quantizer(separator) for separator in SEPARATORS)}
        return any(fnmatchcase(s, pattern) or fnmatchcase(f"{s}.{self.buffer}", pattern) for s in spellings)

    def order(self) -> tuple[str, str, int]:
        """Return a sort key: by base, then buffer, then expert number, where a name without a number comes first."""
        return self.base, self.buffer, -1 if self.index is None else self.index

    def _quantizer(self, separator: str) -> str:
        """Return the name without the buffer: the base and, after the separator, the expert number."""
        return self.base if self.index is None else f"{self.base}{separator}{self.index}"
