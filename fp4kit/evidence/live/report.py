"""Build the tables that `fp4kit recipes --live` prints, from the results of live/run.py. A producer is a library that
quantizes, such as torchao.
"""

from __future__ import annotations

from fp4kit.evidence.live.run import ProducerResult, not_run

COLUMNS = ("producer", "version", "#recipes", "#arrays", "#differing", "exceptions used")
RECIPE_COLUMNS = ("recipe", "#arrays", "#differing", "exceptions used")
LEFT_OUT_COLUMNS = ("not run", "why")


def rows(results: list[ProducerResult]) -> list[tuple[str, ...]]:
    """Return one row per producer that ran at least one recipe. The headings of the columns are COLUMNS."""
    found: list[tuple[str, ...]] = []
    for result in results:
        if not result.reason and result.recipes:
            total = result.total
            counts = (f"{len(result.recipes)}", f"{total.arrays:,}", f"{total.differing:,}")
            found.append((result.producer, result.version, *counts, exceptions(total.exceptions)))
    return found


def differing_rows(results: list[ProducerResult]) -> list[tuple[str, ...]]:
    """Return one row per recipe for which its producer differed on at least one input, or raised an error."""
    return [
        (id, f"{tally.arrays:,}", f"{tally.differing:,}", exceptions(tally.exceptions))
        for result in results
        for id, tally in result.recipes.items()
        if tally.differing
    ]


def left_out_rows(results: list[ProducerResult], ids: tuple[str, ...]) -> list[tuple[str, str]]:
    """Return one (recipes, reason) row per reason why recipes of ``ids`` were not run."""
    reasons: dict[str, list[str]] = {}
    for id, reason in not_run(results, ids).items():
        reasons.setdefault(reason, []).append(id)
    return [(", ".join(names), reason) for reason, names in reasons.items()]


def exceptions(used: dict[str, int]) -> str:
    """Return the names of exceptions as one line, such as "NaN (3), zeros (1,024)", or "" if none were used."""
    return ", ".join(f"{name} ({count:,})" for name, count in sorted(used.items()))
