"""Test the record of producer releases that were found equal to fp4kit: what tools/live_record.py stores.

docs/live-producers.json must be current.
"""

import json
from pathlib import Path

from together import together
from tool_module import tool_module

import fp4kit
from fp4kit.evidence.live import run

ROOT = Path(__file__).resolve().parents[3]
RECORD = json.loads((ROOT / "docs" / "live-producers.json").read_text())
ADAPTERS = {(adapter.title or adapter.name): adapter for adapter in run.adapters()}


def producer(name, differing=0, version="2.0"):
    """Return the JSON that a live run reports for the producer `name`. differing: the number of arrays that differ."""
    recipes = {"mxfp4-ocp": {"arrays": 5, "elements": 99, "differing": differing, "exceptions": {}}}
    counts = {"arrays": 5, "elements": 99, "differing": differing, "exceptions": {"ties": 1}, "seconds": 1.0}
    return {
        "producer": name,
        "version": version,
        "versions": {name: version},
        "recipes": recipes,
        **counts,
        "differences": [],
    }


def test_a_run_replaces_the_entries_of_producers_that_were_equal():
    ran = {
        "date": "2026-11-25",
        "fp4kit": "0.1.0",
        "seed": 3,
        "producers": [producer("a"), producer("b", 1), producer("c")],
    }
    record, differing = tool_module("live_record").merged({"a": {"version": "1.0"}, "b": {"version": "1.0"}}, ran)
    assert differing == ["b"] and record["b"] == {"version": "1.0"}
    assert list(record) == ["a", "b", "c"] and record["a"]["version"] == "2.0"
    assert record["a"]["recipes"] == {"mxfp4-ocp": 5} and record["a"]["exceptions"] == {"ties": 1}
    assert (record["a"]["date"], record["a"]["seed"]) == ("2026-11-25", 3)


@together("name", RECORD)
def test_entries_cover_the_recipes_of_today(name):
    """Each entry covers all current recipes and calls of its producer; a new one requires a new run."""
    entry, adapter = RECORD[name], ADAPTERS[name]
    wanted = {id for id, call in adapter.calls.items() if run._between(call.first, entry["version"], call.last)}
    assert set(entry["recipes"]) == wanted, f"{name}: run fp4kit recipes --live --json and tools/live_record.py"
    assert wanted <= set(fp4kit.recipes())
    assert min(entry["recipes"].values()) >= 20 and entry["arrays"] == sum(entry["recipes"].values())


def test_the_page_names_every_producer():
    page = (ROOT / "docs" / "live-producers.md").read_text()
    for name, adapter in ADAPTERS.items():
        assert f"\n| {name} | " in page and adapter.name in page
