"""Record which releases of producers gave results equal to fp4kit's.

    fp4kit recipes --live --json | python tools/live_record.py

If all arrays of a producer were equal, its entry in fp4kit/evidence/live/equal.json is replaced. Other entries stay.
Then run tools/readme.py, which writes the table of the documentation page.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

RECORD = Path(__file__).resolve().parent.parent / "fp4kit" / "evidence" / "live" / "equal.json"
KEPT = ("version", "versions", "seconds", "arrays", "elements", "exceptions")


def merged(record: dict[str, Any], run: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the record with new entries, sorted by name, and the names of the producers whose arrays differed.

    A producer gets a new entry if arrays of it were compared and all were equal. The arguments are not changed.

    Args:
        record: {producer: entry}, the content of fp4kit/evidence/live/equal.json.
        run: the JSON document that fp4kit recipes --live --json prints.
    """
    found = dict(record)
    differing = []
    for producer in run["producers"]:
        if producer["differing"]:
            differing.append(producer["producer"])
        elif producer["arrays"]:
            entry = {
                "date": run["date"],
                "fp4kit": run["fp4kit"],
                "seed": run["seed"],
                **{key: producer[key] for key in KEPT},
            }
            found[producer["producer"]] = {
                **entry,
                "recipes": {id: r["arrays"] for id, r in producer["recipes"].items()},
            }
    return dict(sorted(found.items())), differing


if __name__ == "__main__":
    record, differing = merged(json.loads(RECORD.read_text()) if RECORD.exists() else {}, json.load(sys.stdin))
    RECORD.write_text(json.dumps(record, indent=1) + "\n")
    if differing:
        sys.exit(f"{', '.join(differing)}: something differs; the entries are not replaced")
