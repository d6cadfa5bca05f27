"""Define items. An item is a tensor, config key or metadata entry of a checkpoint that may concern quantization,
together with the decision whether fp4kit knows it.
"""

from __future__ import annotations

from typing import NamedTuple

UNDERSTOOD, CARRIED, DOUBTFUL, REFUSED, IGNORED = "understood", "carried", "doubtful", "refused", "ignored"


class Item(NamedTuple):
    """Describe one tensor, config key or metadata entry of a checkpoint, and the group that it belongs to.

    Attributes:
        group: UNDERSTOOD (fp4kit uses it, or it agrees with the tensors), CARRIED (it does not change the decoded
            weights), DOUBTFUL, REFUSED or IGNORED (see the head of closed_world.py).
        place: where the item is: "tensor", the name of a config file, or "metadata".
        name: the tensor's name, or the path of the key, such as "quantization_config.transform_config".
        why: why the item belongs to this group, in words for the user.
        what: dtype and shape of a tensor, such as "U8 [64, 32]", if they help to find the fault; otherwise "".
    """

    group: str
    place: str
    name: str
    why: str
    what: str = ""

    @property
    def subject(self) -> str:
        """The item's name for messages: "NAME (WHAT)" if ``what`` is not empty."""
        if self.what:
            return f"{self.name} ({self.what})"
        return self.name if self.place == "tensor" else f"{self.place}: {self.name}"
