"""Check, in a sample of all tests that convert a model, that plan, report and verify agree about the result."""

from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest

from fp4kit.arguments import IN_COMMAND
from fp4kit.checkpoint.findings import findings_of_plan
from fp4kit.checkpoint.plan.plan import Plan
from fp4kit.checkpoint.verify.verify import verify_checkpoint as verify


@pytest.fixture(autouse=True)
def _messages_name_options() -> Iterator[None]:
    """Let messages name options, as on the command line. tests/call/test_explained_calls.py tests those of Python."""
    before = IN_COMMAND.set(True)
    yield
    IN_COMMAND.reset(before)


@pytest.fixture(autouse=True)
def _findings_agree(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Compare the findings after each conversion, in one of 16 tests, or in all of them with --every-recipe."""
    if crc32(request.node.nodeid.encode()) % 16 and not request.config.getoption("--every-recipe"):
        yield
        return
    module = import_module("fp4kit.checkpoint.convert.convert")
    execute = module._execute

    def checked(plan: Plan, target: Path, *arguments: Any) -> Any:
        report = execute(plan, target, *arguments)
        path = report.files[0] if report.files else target
        planned, made, found = (
            {*issues} for issues in (findings_of_plan(plan, target), report.findings, verify(path).issues)
        )
        assert planned <= made <= found, (planned - made, made - found)
        return report

    monkeypatch.setattr(module, "_execute", checked)
    yield
