"""Keep a journal of a conversion, so that an interrupted run can continue. The journal is a file of JSON lines in the
partial directory, beside the output files. Its first line is a key that identifies the run. Every further line records
that a job (the conversion of one tensor or matrix) was measured or is done.

The key is a hash of the source (name, size, modification time and header of every file, and its config), the request
and the version of fp4kit. A line may reach the disk before the bytes of the job do. Therefore a job that is recorded as
done is skipped only if its bytes in the output files still have the recorded CRC-32.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fp4kit import __version__
from fp4kit.checkpoint.model.model_files import Source
from fp4kit.checkpoint.plan.job import Done, Measured
from fp4kit.checkpoint.plan.request import Request
from fp4kit.recipes.serialization import as_data
from fp4kit.storage.files import MAX_BYTES, CheckpointError
from fp4kit.storage.gguf_file import GgufFile
from fp4kit.storage.safetensors_file import SafetensorsFile


def header_digest(file: SafetensorsFile) -> str:
    """Return the SHA-256 of the header of a safetensors or GGUF file, as hexadecimal text."""
    with file.path.open("rb") as stream:
        if isinstance(file, GgufFile):
            return hashlib.sha256(stream.read(file.data_start)).hexdigest()
        length = stream.read(8)
        return hashlib.sha256(length + stream.read(int.from_bytes(length, "little"))).hexdigest()


def source_facts(source: Source) -> dict[str, dict[str, Any]]:
    """Return {file name: {"bytes": size, "header_sha256": SHA-256 of the header}} for the files of a model's
    tensors.
    """
    return {file.name: {"bytes": file.size, "header_sha256": header_digest(file)} for file in source.files}


def identity(source: Source) -> str:
    """Return a text that identifies a model: its absolute path, and a hash of its files' names, sizes and headers."""
    facts = json.dumps(source_facts(source), sort_keys=True).encode()
    return f"{source.root.absolute()} {hashlib.sha256(facts).hexdigest()}"


def request_facts(request: Request) -> dict[str, Any]:
    """Return a request as an object for JSON, for the key of a run and for the manifest."""
    recipe = as_data(request.recipe)
    codes = {"codes": request.codes, "recipe": request.made_by, "recipe_of_form": recipe} if request.codes else {}
    search = {} if request.search is None else {"scale_search": request.search.facts()}
    split = {} if request.split_max_size is None else {"split_max_size": request.split_max_size}
    hadamard: dict[str, Any] = {} if request.hadamard is None else {"hadamard": request.hadamard}
    hadamard |= {} if request.hadamard_seed is None else {"hadamard_seed": request.hadamard_seed}
    hadamard |= {"hadamard_only": list(request.hadamard_only)} if request.hadamard_only else {}
    recipes = {"recipes": [[pattern, as_data(one)] for pattern, one in request.recipes]} if request.recipes else {}
    ignore = {"ignore": list(request.ignore)} if request.ignore else {}
    adapter: dict[str, Any] = {}
    if request.adapter is not None:
        adapter = {"adapter": {**request.adapter.facts, "scales": request.adapter_scales}}
    activations = {} if request.activations is None else {"activations": dict(request.activations.facts)}
    return {
        "recipe": recipe,
        "format": request.format,
        "wishes": asdict(request.wishes),
        "input_scale": request.input_scale,
        "requantize": request.requantize,
        "nonfinite": request.nonfinite,
        **codes,
        **recipes,
        **search,
        **activations,
        **ignore,
        **split,
        **hadamard,
        **adapter,
        **({"allow_loss": True} if request.allow_loss else {}),
    }


def key_of(source: Source, request: Request) -> str:
    """Return the key that identifies a run, a SHA-256 as hexadecimal text."""
    times = {file.name: file.path.stat().st_mtime_ns for file in source.files}
    facts = [__version__, source_facts(source), times, dict(source.config), request_facts(request)]
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()


_LONGEST_KEY = 1 << 10  # how many bytes of a journal's first line are read; the line holds a SHA-256


class Journal:
    """Read the journal of an interrupted run, or create a new journal, and append lines to it.

    path: the file of the journal; it is created if it does not exist.
    key: the key of this run, from key_of.
    measured, done: job key -> what the interrupted run recorded; empty for a new journal. A line that was cut off or
        is damaged counts as not written.

    Raises CheckpointError if the journal's key is not ``key``, or if the file is too large to be a journal. In both
    cases the file stays unchanged.
    """

    def __init__(self, path: Path, key: str) -> None:
        self.measured: dict[str, Measured] = {}
        self.done: dict[str, Done] = {}
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            self._begin(path, key)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the journal's file."""
        os.close(self._file)

    def _begin(self, path: Path, key: str) -> None:
        """Read the complete lines of the journal, cut off an incomplete last line, and write the key to a new
        journal.
        """
        size = os.fstat(self._file).st_size
        if size > MAX_BYTES:
            raise CheckpointError(
                f"{path}: has {size} bytes; a journal has at most {MAX_BYTES} bytes, so it is damaged; "
                "remove it with fp4kit convert --remove-stale, and start again"
            )
        text = path.read_bytes()
        end = text.rfind(b"\n") + 1
        lines = [_parsed(line) for line in text[:end].splitlines()]
        if lines and lines[0].get("key") != key:
            raise CheckpointError(
                f"{path.parent}: was started from another source, with other options or by another version; "
                "remove it with fp4kit convert --remove-stale, and start again"
            )
        os.ftruncate(self._file, end)
        for line in lines:
            self._believe(line)
        if not lines:
            self._write({"key": key})

    def _believe(self, line: Mapping[str, Any]) -> None:
        """Store the result in one line of the interrupted run in ``measured`` or ``done``. Ignore a damaged line."""
        with suppress(TypeError):  # the line has too many or too few fields
            if "measured" in line:
                self.measured[str(line["measured"][0])] = Measured(*line["measured"])
            if "done" in line:
                self.done[str(line["done"][0])] = Done(*line["done"])

    def _write(self, line: dict[str, Any]) -> None:
        """Append ``line`` to the file as one line of JSON."""
        data = json.dumps(line).encode() + b"\n"
        while data:
            data = data[os.write(self._file, data) :]

    def note_measured(self, found: Measured) -> None:
        """Append a line with the measurements of a job's weight, such as its amax."""
        # ``measured``, which holds what an interrupted run recorded, is not changed.
        self._write({"measured": list(found)})

    def note_done(self, found: Done) -> None:
        """Append a line that records that a job is done, with the CRC-32 of the bytes that it wrote."""
        self._write({"done": list(found)})


def key_of_lines(path: Path) -> str | None:
    """Return the key of the run that wrote the journal ``path``, or None if the file does not begin with a key."""
    with path.open("rb") as file:
        key = _parsed(file.readline(_LONGEST_KEY)).get("key")
    return key if isinstance(key, str) else None


def _parsed(line: bytes) -> dict[str, Any]:
    """Return the JSON object in a line; {} if the line is damaged, or holds something other than a JSON object."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
