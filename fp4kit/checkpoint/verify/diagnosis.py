"""Find the fault that makes a layer differ from its source, so that verify can name it. A fault is, for example,
swapped nibbles. A Check holds one matrix of the checkpoint and the rows of the source model from which it was made.

For the first four layers that differ, the faults that fp4kit.identify knows are tried, such as swapped nibbles. For AWQ
layers, it is first tried whether the factors per column are stored as their reciprocals.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from math import prod

import numpy as np

from fp4kit.checkpoint.identify.corruptions import StoredLayer
from fp4kit.checkpoint.identify.diagnose import explain, without_numbers
from fp4kit.checkpoint.identify.fp8_layers import Fp8Layer, explain_fp8
from fp4kit.checkpoint.identify.read_layers import stored_layer
from fp4kit.checkpoint.model.slabs import Readers, slabs, values_of
from fp4kit.checkpoint.model.statistics import sqnr_db
from fp4kit.checkpoint.verify.reencode import Check, fused_groups, rows_of, usual_db

_MOST_LAYERS = 4  # at most this many layers are examined, because this takes much longer than comparing
_MOST_ELEMENTS = 1 << 26  # layers with more elements are not examined
_ROWS = 64  # rows of an AWQ layer that are compared
_NEAR_USUAL_DB = 10.0  # an AWQ layer's SQNR under the right factors is within this of the format's usual SQNR


def faults_of(checks: Iterable[Check], names: Collection[str]) -> dict[str, str]:
    """Find the faults of the first four suitable layers in ``names``."""
    by_name = {check.stored.name: check for check in checks if check.origin is not None and check.stored.experts == 1}
    groups = fused_groups(check.stored for check in by_name.values())
    tried = [by_name[name] for name in names if name in by_name and prod(by_name[name].stored.shape) <= _MOST_ELEMENTS]
    found = {}
    with Readers() as readers:
        for check in tried[:_MOST_LAYERS]:
            members = [one for name, one in by_name.items() if name in groups and groups[name] == _group(check, groups)]
            found[check.stored.name] = _fault_of(check, members, readers)
    return {name: fault for name, fault in found.items() if fault}


def _group(check: Check, groups: Mapping[str, str]) -> str:
    """Return the name of the group with which a layer shares its tensor scale; "" if it is in no group."""
    return groups.get(check.stored.name, "")


def _fault_of(check: Check, members: list[Check], readers: Readers) -> str:
    """Return the fault of one layer as text, such as "nibbles are swapped"; "" if none is found."""
    form, origin = check.stored.container, check.origin
    if form is None or origin is None:
        return ""
    if _has_reciprocal_columns(check, readers):
        return "pre_quant_scale is stored as its reciprocals"
    x, amaxes = origin.values(readers), tuple(one.origin.amax(readers) for one in members if one.origin is not None)
    shared = (max(amaxes),) if amaxes else ()
    parts = stored_layer(check.stored, check.expert, readers)
    if isinstance(parts, Fp8Layer):
        cause = explain_fp8(parts, x, shared).cause
        return "scales are stored as their reciprocals" if cause is not None and "inverted" in cause else ""
    assert isinstance(parts, StoredLayer)
    mishap = explain(parts, x, amaxes=shared, unnamed=False).mishap
    return "" if mishap is None else without_numbers(mishap)


def _has_reciprocal_columns(check: Check, readers: Readers) -> bool:
    """Return whether an AWQ layer decodes to its source if its factors per column are replaced by their reciprocals."""
    count, origin, form = min(_ROWS, check.stored.shape[-2]), check.origin, check.stored.container
    assert origin is not None and form is not None
    slab = next(slabs(readers, check.stored, check.expert, (0, -(-count // form.block[0]) * form.block[0])))
    usual = usual_db(check, readers)
    if slab.column_scale is None or slab.low_rank is not None or usual is None:
        return False
    x = rows_of(origin, 0, count).values(readers).astype(np.float64)
    with np.errstate(all="ignore"):
        inverted = slab._replace(column_scale=np.float32(1) / slab.column_scale)
        error = values_of(check.stored, inverted)[:count].astype(np.float64) - x
    return sqnr_db(float(np.square(x).sum()), float(np.square(error).sum())) > usual - _NEAR_USUAL_DB
