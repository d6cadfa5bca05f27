"""Turn a plan into jobs. A job converts or copies some data, and knows where in the output files its result belongs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from fp4kit.checkpoint.containers.container import VALUES
from fp4kit.checkpoint.model.layers import Piece
from fp4kit.checkpoint.plan.job import COPY, Job, Target
from fp4kit.checkpoint.plan.plan import Plan, TensorPlan


def jobs_of(
    plan: Plan, positions: Mapping[str, tuple[Path, int]], device: Sequence[int | None] = (None,)
) -> Iterator[Job]:
    """Yield the jobs of a plan, in the order of its tensors: one per tensor to copy, and one per piece to convert.

    Args:
        plan: the plan.
        positions: name of an output tensor -> (output file, offset of the tensor's first byte).
        device: the numbers of the CUDA devices to use, with None for the CPU. Jobs that convert get them in turn; jobs
            that copy need none.
    """
    number = 0
    for tensor in plan.tensors:
        if tensor.place is not None:
            path, at = positions[tensor.outputs[0].name]
            # The key of a copy is the name of the tensor. All other keys end in "#" and a number. If the name contains
            # "#", append "#", so that the key of the copy differs from all of them.
            key = f"{tensor.name}#" if "#" in tensor.name else tensor.name
            yield Job(key, COPY, tensor.place, (Target(VALUES, path, at, tensor.bytes_in, tensor.dtype),))
            continue
        for piece in tensor.pieces:
            yield _job(plan, tensor, piece, positions, device[number % len(device)])
            number += 1


def _job(
    plan: Plan, tensor: TensorPlan, piece: Piece, positions: Mapping[str, tuple[Path, int]], device: int | None
) -> Job:
    """Return the job that converts one piece (some rows of a weight) of a tensor's plan.

    Args:
        plan: the whole plan, with the user's request.
        tensor: the plan of the tensor.
        piece: the piece to convert.
        positions: name of an output tensor -> (output file, offset of the tensor's first byte).
        device: the number of the CUDA device that computes; None for the CPU.
    """
    targets = []
    for output in piece.outputs:
        path, at = positions[output.name]
        begin, count = piece.share(output.nbytes)
        targets.append(Target(output.part, path, at + begin, count, output.dtype))
    key = f"{piece.module}#{piece.number}"
    group = (tensor.group or {}).get(piece.module, key)
    request, search, recipe = plan.request, plan.request.search, tensor.recipe or plan.request.recipe
    searched = (
        ("", None)
        if search is None or not search.supports(recipe)
        else (search.objective, search.columns_of((piece.module, piece.weight), piece.expert))
    )
    input_amax = plan.input_amaxes.get(piece.module)
    return Job(
        key,
        tensor.action,
        piece.weight,
        tuple(targets),
        piece.expert,
        piece.span,
        group,
        recipe,
        piece.form,
        request.input_scale,
        request.nonfinite,
        piece.transposed,
        device,
        *searched,
        None if input_amax is None else float(input_amax),
    )
