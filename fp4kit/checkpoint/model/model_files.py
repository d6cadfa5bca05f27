"""Find the files that make up a model, check that they are complete (by headers only), write and check the manifest of
a converted model, and decide which other files a conversion copies. A model is a directory with model.safetensors, with
shards and an index (a JSON file that maps every tensor to its shard) or with numbered shards, or a single GGUF or
safetensors file. The manifest records the recipe, the source, and the size and SHA-256 of every written file.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, NoReturn

from fp4kit.checkpoint.executors import run_all
from fp4kit.checkpoint.model.graph_files import is_graph, read_graph
from fp4kit.checkpoint.model.weights import Tensors, Weight, weights_of
from fp4kit.checkpoint.selection.names import ARCHITECTURE, config_of
from fp4kit.contract.schema import FILE as CONTRACT
from fp4kit.lazy import lazy_property
from fp4kit.storage.files import (
    CheckpointError,
    MissingError,
    SafetensorsFile,
    counted,
    listed,
    load_object,
    names_path,
    other_file,
    read_header,
    shown,
)
from fp4kit.storage.gguf_file import is_gguf, read_gguf_model

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
DIFFUSERS_SINGLE = "diffusion_pytorch_model.safetensors"
DIFFUSERS_INDEX = "diffusion_pytorch_model.safetensors.index.json"
CONFIG = "config.json"
MODEL_INDEX = "model_index.json"  # lists the components of a Diffusers pipeline, each a directory
HF_QUANT_CONFIG = "hf_quant_config.json"
DESCRIPTION = "quant_model_description"  # msmodelslim: DESCRIPTION.json, or in older versions DESCRIPTION_TYPE.json
MSMODELSLIM = "msmodelslim"
_ASCEND = ("ascend", "modelslim", MSMODELSLIM)  # what engines call the method
_NUMBERED = re.compile(r"(.*)-(\d+)-of-(\d+)\.safetensors")


@dataclass(frozen=True)
class Source:
    """Describe an opened model that has passed all checks: a directory that agrees with its index, or a single file.

    Attributes:
        root: the directory, or the GGUF or safetensors file.
        config: the content of config.json. For a GGUF file, facts from its header (see ggml_names.config_of); for a
            safetensors file, {}.
        hf_quant_config: the content of hf_quant_config.json; None if there is no such file.
        files: the headers of the model's files, sorted by name.
        ignored: the names of safetensors files in the directory that are not part of the model.
        has_index: True if the directory has an index file, of transformers or of Diffusers.
    """

    root: Path
    config: Mapping[str, Any]
    hf_quant_config: Mapping[str, Any] | None
    files: tuple[SafetensorsFile, ...]
    ignored: tuple[str, ...] = ()
    has_index: bool = False

    @lazy_property
    def tensors(self) -> Tensors:
        """A map from tensor name to (its file, its header entry), in file order and, within a file, in byte order."""
        return {entry.name: (file, entry) for file in self.files for entry in file.entries}

    @lazy_property
    def _weights(self) -> dict[str, Weight]:
        return weights_of(self.tensors, self.config)

    @property
    def weights(self) -> dict[str, Weight]:
        """A map from tensor name to weight, quantized or not, as ``weights_of`` finds them; a new dict."""
        return dict(self._weights)


def resolved(path: Path) -> Path:
    """Return ``path`` as an absolute path with symbolic links resolved."""
    try:
        path.stat()
    except OSError as error:
        if error.errno == errno.ELOOP:
            why = "its symbolic links form a cycle; replace the link by the file itself"
            raise CheckpointError(f"{shown(str(path))}: {why}") from None
    return Path(os.path.realpath(path))


def contained(path: Path, root: Path) -> Path:
    """Return ``path`` with symbolic links resolved, after checking that the result is inside the directory ``root``."""
    real_root = resolved(root)
    roots = [real_root]
    if real_root.parent.name == "snapshots":
        roots.append(resolved(real_root.parent.parent / "blobs"))
    real = resolved(path)
    if not any(real.is_relative_to(allowed) for allowed in roots):
        raise CheckpointError(f"{shown(path.name)}: links to a file outside {root}; replace the link by the file")
    return real


def existing_file(root: Path, name: str) -> Path:
    """Return the path of the file ``name`` in the directory ``root``, with symbolic links resolved."""
    path = root / name
    real = contained(path, root)
    if not real.is_file():
        state = "is not a regular file" if real.exists() else "is missing"
        raise CheckpointError(f"{shown(name)}: {state} in {root}; download or copy it again")
    return real


def check_shard_name(name: object) -> str:
    """Return ``name``, a shard's name from an index, after checking that it is a plain file name."""
    # The name must end in .safetensors, must not begin with a dot or a dash, and may have up to 255 bytes.
    plain = isinstance(name, str) and re.fullmatch(r"[^/\\:\x00-\x1f.-][^/\\:\x00-\x1f]*\.safetensors", name)
    if not plain or len(str(name).encode("utf-8", "replace")) > 255:
        raise CheckpointError(
            f"{INDEX}: shard name {shown(repr(name))}: a plain file name that ends in .safetensors is needed"
        )
    return str(name)


def index_name(root: Path) -> str | None:
    """Return the name of the index file in the directory ``root``, or None if there is no index."""
    return next((name for name in (INDEX, DIFFUSERS_INDEX) if os.path.lexists(root / name)), None)


def _load_weight_map(root: Path) -> dict[str, str] | None:
    """Return the map from tensor name to shard name in the index of a directory; None if there is no index."""
    name = index_name(root)
    if name is None:
        return None
    weight_map = load_object(existing_file(root, name), name).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{name}: has no weight_map; an object that maps tensor names to shards is needed")
    return {tensor: check_shard_name(shard) for tensor, shard in weight_map.items()}


def safetensors_in(root: Path) -> list[str]:
    """Return the sorted names that end in .safetensors in a directory; [] if there are none."""
    return sorted(name for name in os.listdir(root) if name.endswith(".safetensors"))


def _model_file_names(root: Path, weight_map: Mapping[str, str] | None) -> list[str]:
    """Return the names of the safetensors files that make up the model in ``root``."""
    present = safetensors_in(root)
    if weight_map is not None:
        names = sorted(set(weight_map.values()))
        if SINGLE in present and SINGLE not in names:
            raise CheckpointError(
                f"{root}: has both {SINGLE} and {INDEX}, but the index does not name {SINGLE}; remove one of them"
            )
        return names
    if not present:
        raise CheckpointError(
            f"{root}: no .safetensors file; a Hugging Face model directory with safetensors is needed"
            f"{_hint_on_directory(root) or _hint_on_other_models(root)}"
        )
    single = next((name for name in (SINGLE, DIFFUSERS_SINGLE) if name in present), None)
    series: dict[tuple[str, int], set[int]] = {}  # numbered files, such as -00001-of-00003
    for match in filter(None, map(_NUMBERED.fullmatch, present if single is None else ())):
        series.setdefault((match[1], int(match[3])), set()).add(int(match[2]))
    for (stem, total), found in series.items():
        if total != len(found):
            raise CheckpointError(
                f"{shown(stem)}: {len(found)} of {total} numbered shards are present and there is no {INDEX}; "
                "download the missing ones"
            )
    return present if single is None else [single]


def _equal_names(names: list[str]) -> Iterator[str]:
    """Yield an error message if two shard names differ only in case. Some file systems treat them as one file."""
    folded: dict[str, str] = {}
    for name in names:
        if folded.setdefault(name.casefold(), name) != name:
            yield f"{shown(name)} and {shown(folded[name.casefold()])} differ only in case; rename one"


def _disagreements(weight_map: Mapping[str, str] | None, files: Iterable[SafetensorsFile]) -> Iterator[str]:
    """Yield an error message if two files contain a tensor, or if index and shards disagree about where tensors are."""
    shard_of: dict[str, str] = {}
    for file in files:
        for entry in file.entries:
            if shard_of.setdefault(entry.name, file.name) != file.name:
                yield (
                    f"{shown(entry.name)}: is in both {shown(shard_of[entry.name])} and {file.label}; "
                    "remove the file that is not part of the model; shards of tensor parallelism must be merged first"
                )
    if weight_map is None:
        return
    absent = [f"{name} in {shard}" for name, shard in weight_map.items() if shard_of.get(name) != shard]
    if absent:
        yield f"{INDEX}: names {listed(absent)}, but the shard does not contain it; download the model again"
    unlisted = [f"{name} of {shard}" for name, shard in shard_of.items() if name not in weight_map]
    if unlisted:
        yield f"{INDEX}: does not name {listed(unlisted)}; download the model again"


# Suffix of a file -> advice for the user who has no safetensors model but such a file.
_SAVE = "write safetensors with model.save_pretrained(DIR)"
_OTHER_MODELS = {
    ".gguf": "pass the GGUF file itself",
    **dict.fromkeys((".bin", ".h5", ".msgpack"), f"load the model with transformers and {_SAVE}"),
    **dict.fromkeys((".pt", ".pth", ".ckpt"), f"load the model with PyTorch and {_SAVE}"),
    ".npz": "load the arrays with NumPy and write safetensors with safetensors.numpy.save_file",
    ".onnx": "pass the ONNX file itself",
    ".xml": "pass the .xml file itself, if it is an OpenVINO model",
    ".distcp": f"merge the shards of torch.distributed, and {_SAVE}",
    ".incomplete": "the download has not ended; run hf download again",
    ".nemo": "export the model to Hugging Face's format with NeMo",
    ".engine": "use the safetensors model that the TensorRT engine was built from",
}


def _hint_on_other_models(root: Path) -> str:
    """Return advice to append to an error message about a directory without safetensors files; "" for no advice."""
    config = root / CONFIG
    declared = load_object(config, CONFIG).get("quantization_config") if config.is_file() else None
    torchao = isinstance(declared, Mapping) and declared.get("quant_method") == "torchao"
    for name in sorted(os.listdir(root)):
        suffix = Path(name).suffix.lower()
        if torchao and suffix in (".bin", ".pt"):
            return (
                f"; there is {shown(name)}, which holds pickled tensors of torchao: convert the unquantized release, or"
                " save the model with transformers after model.dequantize()"
            )
        if suffix in _OTHER_MODELS:
            return f"; there is {shown(name)}: {_advice_on(root / name)}"
    return ""


def _advice_on(path: Path) -> str:
    """Return what to do with a file whose suffix is in _OTHER_MODELS."""
    graph = path.with_suffix(".xml")
    is_openvino = path.suffix.lower() == ".bin" and graph.is_file()
    return (
        f"pass {shown(graph.name)}, the graph with these weights" if is_openvino else _OTHER_MODELS[path.suffix.lower()]
    )


def _hint_on_directory(root: Path) -> str:
    """Return advice to append to an error message about a directory without a model; "" for no advice."""
    snapshots = root / "snapshots"
    if root.name.startswith("models--") and snapshots.is_dir():
        found = sorted(path.name for path in snapshots.iterdir() if path.is_dir())
        if found:
            main = root / "refs" / "main"
            revision = main.read_text().strip() if main.is_file() else ""
            name = revision if revision in found else found[-1]
            return f"; this is a directory of the hub's cache; pass its snapshot, {shown(str(snapshots / name))}"
        return "; this is a directory of the hub's cache without a snapshot; download the model with hf download"
    folders = [path.parent.name for path in sorted(root.glob(f"*/{CONFIG}")) if any(path.parent.glob("*.safetensors"))]
    is_pipeline = (root / MODEL_INDEX).is_file()
    if not folders:
        return "; this is a pipeline without models in safetensors; download it again" if is_pipeline else ""
    kind = "a pipeline" if is_pipeline else "a directory of models"
    return f"; this is {kind}; pass the directory of one model in it: {listed([f'{root / name}' for name in folders])}"


def _hint_on_config(root: Path) -> str:
    """Return advice for an error message about a directory without config.json; never ""."""
    if os.path.lexists(root / "adapter_config.json"):
        return "this is an adapter (PEFT), not a model; merge it into its model with merge_and_unload() first"
    if os.path.lexists(root / "params.json"):
        return "this is a release in its author's own format; use the one for transformers, which has a config.json"
    return "download or copy it again"


def check_kind_of_file(path: Path) -> None:
    """Raise CheckpointError, with advice, if a path has the suffix of a model or config that fp4kit does not read."""
    # Call this function for a file that could not be read as safetensors, so that the message says what to do.
    suffix = path.suffix.lower()
    if suffix in ("", ".gguf", ".safetensors") or (suffix not in (*_OTHER_MODELS, ".json") and other_file(path)):
        return
    raise CheckpointError(
        f"{shown(str(path))}: is not a safetensors or GGUF file, so fp4kit cannot read it{hint_on_path(path)}"
    )


def hint_on_path(path: Path) -> str:
    """Return advice to append to an error message about a path that is not a model directory; "" for no advice."""
    suffix = path.suffix.lower()
    if path.is_file() and (suffix in (".safetensors", ".json")):
        return f"; pass its directory, {shown(str(path.parent))}"
    if path.is_file():
        return f"; {_advice_on(path)}" if suffix in _OTHER_MODELS else ""
    name = re.fullmatch(r"(?:https?:/+)?(?:huggingface\.co/)?([\w-][\w.-]*/[\w.-]+)(?:/tree/.*)?", str(path))
    if name is None or path.parent.is_dir() or os.path.lexists(path):
        return ""
    return f"; for the hub's {name[1]}, run hf download {name[1]} --local-dir DIR and pass DIR"


def is_gguf_config(config: Mapping[str, Any]) -> bool:
    """Return whether ``config`` stands for a GGUF file, rather than being the content of a config.json."""
    return ARCHITECTURE in config


def is_deepseek_v4(config: Mapping[str, Any]) -> bool:
    """Return whether a model is DeepSeek-V4 or V4.1, judged by ``model_type`` in its config.json."""
    return config.get("model_type") in ("deepseek_v4", "deepseek_v41")


@names_path
def open_source(root: Path) -> Source:
    """Open and check a model without reading tensor data, and return it as a Source."""
    if not root.is_dir():
        return _open_file(root)
    parts = open_model_files(root)
    if not os.path.lexists(root / CONFIG):
        raise CheckpointError(f"{CONFIG}: is missing in {root}; {_hint_on_config(root)}")
    config, beside = load_configs(root)
    return Source(root, config, beside, *parts)


def open_original(source: Path, made: Path) -> Source:
    """Open the model from which the checkpoint at ``made`` was made. Raise CheckpointError if it is the same path."""
    if source.exists() and made.exists() and source.samefile(made):
        raise CheckpointError(f"--source {source}: is the checkpoint itself; give the model that it was made from")
    return open_source(source)


def load_configs(root: Path) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Return the content of config.json, {} if there is none, and of hf_quant_config.json, None if there is none."""
    config, beside = (
        load_object(existing_file(root, name), name) if os.path.lexists(root / name) else None
        for name in (CONFIG, HF_QUANT_CONFIG)
    )
    return {} if config is None else _with_description(root, config), beside


def _with_description(root: Path, config: dict[str, Any]) -> dict[str, Any]:
    """Return a config with msmodelslim's description of the weights, a file of its own, as ``quantization_config``."""
    names = sorted(name for name in os.listdir(root) if name.startswith(DESCRIPTION) and name.endswith(".json"))
    if not names:
        return config
    if len(names) > 1:
        raise CheckpointError(f"{listed(names)}: each describes the weights; remove those of other weights")
    content = load_object(existing_file(root, names[0]), names[0])
    description = {"quant_method": MSMODELSLIM, "file": names[0], **content}
    own = config.get("quantization_config")
    if isinstance(own, Mapping) and own.get("quant_method") not in (*_ASCEND, None):
        raise CheckpointError(
            f"{CONFIG}: declares quant_method {shown(repr(own['quant_method']))}, but {names[0]} declares"
            f" {MSMODELSLIM}; remove the one that does not belong to the weights"
        )
    return {**config, "quantization_config": description}


def _open_file(path: Path) -> Source:
    """Open and check a model that is a single safetensors file or a GGUF model, and return it as open_source does."""
    if is_graph(path):
        return Source(path, {}, None, read_graph(path))
    if is_gguf(path):
        parts = read_gguf_model(path)
        return Source(path, config_of(parts[0].metadata), None, parts)
    if path.suffix.lower() == ".safetensors" and resolved(path).is_file() and not _is_part_of_model(path):
        return Source(path, {}, None, (read_header(resolved(path), path.name),))
    if path.suffix.lower() == ".safetensors" and resolved(path).is_file():
        raise CheckpointError(f"{path}: is a part of a model{hint_on_path(path)}")
    if resolved(path).exists():
        raise CheckpointError(f"{path}: is a file; a Hugging Face model directory is needed{hint_on_path(path)}")
    needed = "a Hugging Face model directory, a .safetensors or a GGUF file is needed"
    raise MissingError(f"{path}: does not exist; {needed}{hint_on_path(path)}")


def _is_part_of_model(path: Path) -> bool:
    """Return whether a safetensors file is part of a model directory, so that it is not a model of its own."""
    root = path.parent
    if _NUMBERED.fullmatch(path.name) is not None:
        return True
    if not os.path.lexists(root / CONFIG):
        return False
    try:
        return path.name in _model_file_names(root, _load_weight_map(root))
    except CheckpointError:
        return False


def open_model_files(root: Path) -> tuple[tuple[SafetensorsFile, ...], tuple[str, ...], bool]:
    """Open the safetensors files of a model directory and check them."""
    if (root / MODEL_INDEX).is_file() and not os.path.lexists(root / CONFIG):
        raise CheckpointError(f"{root}: has no {CONFIG}{_hint_on_directory(root)}")
    weight_map = _load_weight_map(root)
    names = _model_file_names(root, weight_map)
    for why in _equal_names(names):
        raise CheckpointError(why)
    files = tuple(read_header(existing_file(root, name), name) for name in names)
    for why in _disagreements(weight_map, files):
        raise CheckpointError(why)
    ignored = tuple(sorted(set(safetensors_in(root)) - set(names)))
    return files, ignored, weight_map is not None


MANIFEST = "fp4kit_manifest.json"
VERSION = 1


def file_digest(path: Path) -> str:
    """Return the SHA-256 of a file's content, as 64 hexadecimal digits. Raise OSError if the file cannot be read."""
    whole = hashlib.sha256()
    with path.open("rb") as file:
        while data := file.read(1 << 20):
            whole.update(data)
    return whole.hexdigest()


class Digest(NamedTuple):
    """The path, the size and the SHA-256 digest of a file.

    Attributes:
        path: the path of the file.
        sha256: the SHA-256 of the content, in hexadecimal.
        nbytes: the size in bytes.
    """

    path: Path
    sha256: str
    nbytes: int


def digest_of(path: Path) -> Digest:
    """Read a file and return its Digest: path, SHA-256 and size."""
    return Digest(path, file_digest(path), path.stat().st_size)


def names_in(folder: Path) -> list[str]:
    """Return the sorted names, relative to ``folder``, of the files in ``folder`` that its manifest must list."""
    # The manifest must list all files in the directory and its subdirectories, except itself and hidden files.
    names = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file() and _is_inside(path, folder))
    shown = (name for name in names if not any(part.startswith(".") for part in name.parts))
    return sorted(name.as_posix() for name in shown if name.as_posix() != MANIFEST)


def _is_inside(path: Path, folder: Path) -> bool:
    """Return whether ``path`` is inside ``folder``, or in the cache of the Hugging Face Hub that holds ``folder``."""
    try:
        contained(path, folder)
    except CheckpointError:
        return False
    return True


def manifest_of(digests: Mapping[str, Digest], facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of a manifest: a dict that can be written as JSON."""
    files = {name: {"sha256": one.sha256, "bytes": one.nbytes} for name, one in sorted(digests.items())}
    return {"fp4kit_manifest": VERSION, **facts, "files": files}


@names_path
def load_manifest(folder: Path) -> dict[str, Any] | None:
    """Return the content of a directory's manifest, or None if the directory has none."""
    path = folder / MANIFEST
    if not path.is_file() or not _is_inside(path, folder):
        return None
    found = load_object(path, MANIFEST)
    files = found.get("files")
    facts = files.values() if isinstance(files, dict) else [None]
    right = all(isinstance(one, dict) and isinstance(one.get("sha256"), str) for one in facts)
    if found.get("fp4kit_manifest") != VERSION or not right:
        raise CheckpointError(f"{MANIFEST}: is malformed or not of version {VERSION}; convert the model again")
    return found


class FileDifference(NamedTuple):
    """A file of a converted model that differs from the manifest. severity: "warning" if no loader reads the file."""

    name: str
    text: str
    severity: Literal["error", "warning"] = "error"


def differences(folder: Path, executor: Executor | None = None) -> list[FileDifference] | None:
    """Compare the files of a converted model with its manifest, to find missing, changed and additional files."""
    # A file whose size differs from the manifest is reported without being hashed, because a damaged sparse file may
    # appear to hold terabytes.
    found = load_manifest(folder)
    if found is None:
        return None
    present, files = set(names_in(folder)), found["files"]
    sizes = {name: text for name in files if name in present and (text := _other_size(folder / name, files[name]))}
    names = {folder / name: name for name in files if name in present and name not in sizes}
    wrong = [FileDifference(shown(name), text) for name, text in sizes.items()]
    for one in run_all(executor, deque((digest_of, (path,)) for path in names)):
        if one.sha256 != files[names[one.path]]["sha256"]:
            wrong.append(FileDifference(shown(names[one.path]), "its content differs from what the conversion wrote"))
    wrong += [FileDifference(shown(name), "is missing") for name in files if name not in present]
    return [*sorted(wrong), *map(_added, sorted(present - set(files)))]


def _added(name: str) -> FileDifference:
    """Return the difference for a file that the manifest does not list: an error if it may hold weights or code."""
    base = name.rpartition("/")[2]
    is_read = base.endswith((*WEIGHT_SUFFIXES, ".index.json", ".py")) or base.startswith(("adapter_", DESCRIPTION))
    if is_read or name in (*WRITTEN_AT_ROOT, *_DECLARATIONS):
        return FileDifference(shown(name), "was not written by the conversion")
    return FileDifference(shown(name), "was added after the conversion, and the manifest does not cover it", "warning")


def _other_size(path: Path, facts: Mapping[str, Any]) -> str | None:
    """Return the fault of a file's size, for a message; None if the size agrees with the manifest."""
    size, written = path.stat().st_size, facts.get("bytes")
    if written is None:
        return None
    if type(written) is not int:
        return "its size in the manifest is not a whole number"
    return None if size == written else f"has {size} bytes, but the conversion wrote {written} bytes"


COPIED_SUFFIXES = (".json", ".jsonl", ".txt", ".model", ".jinja", ".md", ".tiktoken", ".vocab", ".yaml")
COPIED_PREFIXES = ("LICENSE", "LICENCE", "NOTICE", "README")
WEIGHT_SUFFIXES = tuple(".bin .pt .pth .gguf .onnx .onnx_data .h5 .msgpack .ot .safetensors .npz".split())
WRITTEN_AT_ROOT = (CONFIG, HF_QUANT_CONFIG, MANIFEST, CONTRACT)  # never copied, because a conversion writes its own
# Files beside the config in which auto-round, GPTQ and AWQ tools declare how a model is quantized; msmodelslim's file
# is DESCRIPTION.
_DECLARATIONS = ("quantization_config.json", "quantize_config.json", "quant_config.json")


class AuxiliaryFile(NamedTuple):
    """Describe a file that a conversion copies.

    Attributes:
        name: the path of the file, relative both to the source directory and to the output directory.
        path: the real file, with links resolved.
        nbytes: the size in bytes.
    """

    name: str
    path: Path
    nbytes: int


class AuxiliaryFiles(NamedTuple):
    """List the files of a model directory, other than the model's tensors, that a conversion copies or skips.

    Attributes:
        copied: the files to copy.
        skipped: (name, reason) per file that is not copied.
    """

    copied: tuple[AuxiliaryFile, ...]
    skipped: tuple[tuple[str, str], ...]


def _walk(root: Path) -> Iterator[tuple[str, Path]]:
    """Yield (name relative to ``root``, path) for every file in a directory and its subdirectories."""
    for folder, directories, names in os.walk(root, onerror=_unreadable):
        links = [name for name in directories if (Path(folder) / name).is_symlink()]
        hidden = [name for name in directories if name.startswith(".") and name not in links]
        directories[:] = sorted(set(directories) - set(links) - set(hidden))
        for name in sorted([*names, *links, *hidden]):
            path = Path(folder) / name
            yield path.relative_to(root).as_posix(), path


def _unreadable(error: OSError) -> NoReturn:
    """Raise CheckpointError for a file or directory that cannot be read."""
    # os.walk calls this as its ``onerror``, because it would otherwise skip an unreadable directory silently.
    raise CheckpointError(
        f"{shown(str(error.filename))}: cannot be read ({error.strerror}); grant read permission, or remove it"
    )


def _skip_reason(name: str, path: Path, root: Path) -> str | None:
    """Return the reason not to copy a file, for the report; None if it is to be copied."""
    # A directory is never copied.
    base = path.name
    if path.is_dir():
        return "a link to a directory" if path.is_symlink() else "hidden directory"
    if base.startswith("."):
        return "hidden file"
    if base.endswith(".index.json"):
        return "index of other weights"
    if base.endswith(WEIGHT_SUFFIXES):
        return "weights that are not part of the model"
    if not (base.endswith(COPIED_SUFFIXES) or base.startswith(COPIED_PREFIXES)) or base.endswith(".py"):
        return "kind of file that is not copied"
    try:
        resolved(path)
    except CheckpointError:
        return "links that form a cycle"
    if not _is_inside(path, root):
        return "a link to a file outside the directory"
    return None if path.is_file() else "not a regular file"


_NEXT = ("num_nextn_predict_layers", "mtp_num_hidden_layers")  # layers of multi-token prediction, in config.json


def other_weights(root: Path, names: Collection[str], config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield (file name, what engines do with it) for each safetensors file beside a model that is not part of it."""
    if not root.is_dir():
        return
    index = index_name(root)
    text = config.get("text_config")
    counts = [part.get(key) for part in (config, text) if isinstance(part, Mapping) for key in _NEXT]
    count = next((count for count in counts if isinstance(count, int) and count > 0), 0)
    predicted = f"{counted(count, 'layer')} of multi-token prediction"
    for name in sorted(set(safetensors_in(root)) - set(names)):
        if name.startswith("adapter_"):
            yield name, "is an adapter (PEFT) that is not part of the model; merge it first, if the model needs it"
        elif index is None:
            read = " and ".join(sorted(names))
            how = f"{read} alone is read here and by transformers, but vLLM and SGLang load all safetensors files"
            yield name, f"there is no index, so {how}; remove the file, or write an index that names it"
        else:
            how = f"is not named by {index}, so vLLM and transformers do not load it"
            if count and name == "mtp.safetensors":
                how += f"; SGLang does, for the {predicted} in {CONFIG}"
            elif count:
                how += f"; {CONFIG} declares {predicted}, which may be in it"
            yield name, f"{how}; add its tensors to the index if they belong to the model"


def scan(root: Path, model_files: set[str], keeps_layers: bool = True) -> AuxiliaryFiles:
    """Decide for each file in a model directory that is not part of the model whether a conversion copies it."""
    copied: list[AuxiliaryFile] = []
    skipped: list[tuple[str, str]] = []
    for name, path in _walk(root) if root.is_dir() else ():
        if name in model_files or name in WRITTEN_AT_ROOT:
            continue
        reason = _skip_reason(name, path, root)
        if not reason and not keeps_layers and (name in _DECLARATIONS or name.startswith(DESCRIPTION)):
            reason = "describes how the source is quantized"
        if reason:
            skipped.append((name, reason))
            continue
        if not os.access(path, os.R_OK):
            _unreadable(PermissionError(errno.EACCES, os.strerror(errno.EACCES), path))
        copied.append(AuxiliaryFile(name, path.resolve(), path.stat().st_size))
    return AuxiliaryFiles(tuple(copied), tuple(skipped))
