"""Define items: what a checkpoint stores beside its quantized layers, and what reading makes of it."""

from __future__ import annotations

from typing import NamedTuple

UNDERSTOOD, CARRIED, REFUSED, IGNORED = "understood", "carried", "refused", "ignored"


class Item(NamedTuple):
    """Describe one thing that a checkpoint stores beside its quantized layers, and what reading makes of it.

    group: UNDERSTOOD, CARRIED, REFUSED or IGNORED.
    place: "tensor", the name of a config file, or "metadata".
    name: the tensor's name, or the path of the key, such as "quantization_config.transform_config".
    why: the reason for the group, in words for the user.
    what: dtype and shape of a tensor; "" for other items.
    """

    group: str
    place: str
    name: str
    why: str
    what: str = ""

    @property
    def subject(self) -> str:
        """The item's name, with dtype and shape if it is a tensor, and with its place if it is not."""
        if self.what:
            return f"{self.name} ({self.what})"
        return self.name if self.place == "tensor" else f"{self.place}: {self.name}"
