"""Compare every field of every row of the tables with tests/data/tables.json.

To add a container, add its row there too, by hand: the file is the second statement of what a container is.
"""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from fp4kit.checkpoint.containers.configs import FORMATS, KINDS, LOADED, MIXTURES, WRITTEN, container_id, declarations
from fp4kit.checkpoint.containers.table import CODES, CONTAINERS, INPUT_SCALE, TENSOR_SCALE, Container
from fp4kit.checkpoint.loaders import support
from fp4kit.checkpoint.loaders.exclusions import READERS
from fp4kit.contract.engine_table import VERSIONS
from fp4kit.formats import ElementFormat

TABLES: dict[str, Any] = json.loads((Path(__file__).parents[2] / "data" / "tables.json").read_text())


def plain(value: Any) -> Any:
    """Return a field's value as JSON has it."""
    return list(value) if isinstance(value, tuple) else value.name if isinstance(value, ElementFormat) else value


@pytest.mark.parametrize(("form", "row"), list(zip(CONTAINERS, TABLES["containers"], strict=True)), ids=str)
def test_every_field_of_a_container(form: Container, row: dict[str, Any]) -> None:
    assert {field.name: plain(getattr(form, field.name)) for field in fields(form)} == row


def test_every_cell_of_the_engines() -> None:
    cells = {
        (container, family, engine): support.cell(container, family, engine)
        for container in (*LOADED, *MIXTURES)
        for family in support.FAMILIES
        for engine in VERSIONS
    }
    found = {
        " | ".join(key): [cell.status, cell.how, cell.note]
        for key, cell in cells.items()
        if cell.status != "unknown" or cell.note
    }
    assert found == TABLES["cells"]


@pytest.mark.parametrize("kind", KINDS)
def test_best_format(kind: str) -> None:
    assert {family: support.best_format(kind, family) for family in support.FAMILIES} == TABLES["best"][kind]


def test_what_is_written_is_declared_and_read() -> None:
    assert {form.format for form in WRITTEN} == {*FORMATS} - {"bf16"}
    for form in WRITTEN:
        config, _ = declarations(form, ["lm_head"], False, {}, ["a.experts.0.w1"])
        assert config["quant_method"] and {one.engine for one in READERS[container_id(form, True)]} == {
            *form.engines
        }, form


def test_a_tensor_scale_implies_no_input_scale() -> None:
    suffixes = {CODES: ".weight", TENSOR_SCALE: ".scale"}
    form = Container("x", "x", "fp8 tensor", CONTAINERS[3].element, None, (1, 0), suffixes, "F8_E4M3", "F32")
    assert [one.name for one in form.outputs("a", (4, 8), has_input_scale=True)] == ["a.weight", "a.scale"]
    assert INPUT_SCALE not in form.specs((4, 8), True) and form.engines == ()
