"""Rewrite the generated parts of README.md: python tools/readme.py (tests/test_readme.py checks that nothing would change)."""

from __future__ import annotations

import re
from pathlib import Path

from fp4kit.agreement import COLUMNS, agreement_rows
from fp4kit.tables import RECIPE_COLUMNS, grouped_recipe_rows, markdown

README = Path(__file__).resolve().parent.parent / "README.md"


def generated() -> dict[str, str]:
    """Text of each part between `<!-- generated: NAME -->` and `<!-- end -->`."""
    return {"recipes": markdown(RECIPE_COLUMNS, grouped_recipe_rows()), "agreement": markdown(COLUMNS, agreement_rows())}


def rewritten(text: str) -> str:
    """The README with its generated parts as the code gives them."""
    for name, body in generated().items():
        pattern = re.compile(rf"(<!-- generated: {name} -->\n).*?(<!-- end -->)", re.DOTALL)
        text, count = pattern.subn(lambda match, body=body: match.group(1) + body + "\n" + match.group(2), text)
        if count != 1:
            raise ValueError(f"README.md: {count} parts are marked 'generated: {name}'; needs one")
    return text


if __name__ == "__main__":
    README.write_text(rewritten(README.read_text()))
