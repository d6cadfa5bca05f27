"""Implement grouped operations: one call for N tensors, bit-identical to a loop of single calls.

On a GPU, a single kernel launch computes all tensors of a dtype.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from fp4kit.arguments import as_entries, as_flag, explains_calls, explains_class
from fp4kit.arrays.imports import import_arrays, is_array
from fp4kit.arrays.returns import PlanLibrary, library_of, returns_in_library, returns_in_plan_library, tensor_type
from fp4kit.call.inputs import clip_amax
from fp4kit.call.parse import (
    Call,
    QuantizeOptions,
    array_call,
    backward_call,
    check_fake_rule,
    each,
    fake_call,
    quantize_call,
    with_amaxes,
    with_options,
)
from fp4kit.ops.amax import amax_call
from fp4kit.ops.engines import (
    convert_and_call,
    facts_of,
    find,
    new_clip_group,
    new_group,
    run_call,
    run_group,
    with_threads,
)
from fp4kit.ops.quantize import fake_quantize, quantize
from fp4kit.quantized.container import Quantized
from fp4kit.recipes import Recipe, recipe_of
from fp4kit.types import Hadamard, RecipeId, RoundingMode, ScaleLayout


class PlanInput(NamedTuple):
    """A record of one argument of a GroupedPlan when the plan was made, so that later changes can be detected.

    Attributes:
        value: the argument: a sequence of N entries, or an array.
        entries: the entries of the argument. An array counts as a single entry.
        tensors: the entries that are PyTorch tensors. Their memory can be replaced while the object stays the same.
        addresses: the memory address of each of these tensors.
    """

    value: Any
    entries: list[Any]
    tensors: list[Any]
    addresses: list[int]

    @classmethod
    def of(cls, name: str, value: Any) -> PlanInput:
        """Return a PlanInput that records the entries of an argument and the addresses of PyTorch tensors among
        them.
        """
        entries = list(_as_list("GroupedPlan", name, value))
        tensors = [a for a in entries if hasattr(a, "data_ptr")]
        return cls(value, entries, tensors, [a.data_ptr() for a in tensors])

    def changed(self, value: Any) -> str | None:
        """Return None if the argument is unchanged since the plan was made, otherwise the end of an error message."""
        now = _as_list("GroupedPlan", "xs", self.value if value is None else value)
        if len(now) != len(self.entries):
            return f" has {len(now)} entries, but the plan was made for {len(self.entries)}"
        if not all(map(operator.is_, now, self.entries)):
            index = [a is b for a, b in zip(now, self.entries, strict=True)].index(False)
            return f"[{index}] was replaced after the plan was made"
        if [a.data_ptr() for a in self.tensors] != self.addresses:
            return " holds a tensor whose memory was replaced after the plan was made"
        return None


def _as_list(op: str, name: str, value: Any) -> Any:
    """Return the entries of an argument as a list or tuple."""
    return [value] if is_array(value) else as_entries(op, name, value)


def per_tensor(op: str, name: str, value: Any, count: int) -> list[Any]:
    """Return a list with one entry per tensor of a group, from an argument such as tensor_amax."""
    if value is None:
        return [None] * count
    if not isinstance(value, Sequence) and getattr(value, "ndim", 0) == 0:
        raise ValueError(
            f"{op}: {name} is {type(value).__name__}; needs a sequence with one entry for each of {count} arrays"
        )
    if len(value) != count:
        raise ValueError(f"{op}: {name} has {len(value)} entries and xs {count} arrays; needs one entry for each array")
    entries = [value[i, ...] for i in range(count)] if is_array(value) else list(value)
    missing = [i for i, entry in enumerate(entries) if entry is None]
    if missing:
        raise ValueError(f"{op}: {name}[{missing[0]}] is None; needs an entry for each array, or {name}=None")
    return entries


def arrays_of(op: str, xs: Any) -> tuple[list[Any], Any]:
    """Import the argument xs of a grouped call, and return the pair (list of NumPy or CuPy arrays, stack)."""
    if not is_array(xs):
        entries = as_entries(op, "xs", xs)
        arrays = list(import_arrays(op, **{f"xs[{i}]": x for i, x in enumerate(entries)}))
        libraries = [*map(library_of, entries)]
        for i, library in enumerate(libraries):
            if library != libraries[0]:
                kinds = [type(entries[k]).__module__.partition(".")[0] for k in (0, i)]
                raise ValueError(
                    f"{op}: xs[0] is an array of {kinds[0]} and xs[{i}] of {kinds[1]}; needs arrays of one library"
                )
        return arrays, None
    (stack,) = import_arrays(op, xs=xs)
    check_stack(op, stack)
    return list(stack), stack


def check_stack(op: str, stack: Any, kind: str = "array") -> None:
    """Raise ValueError unless `stack`, an array or a tensor, has at least two dimensions, as a stack of arrays must."""
    if stack.ndim < 2:
        raise ValueError(
            f"{op}: xs is one {stack.ndim}-d {kind}; needs a sequence of arrays, or one array of at least 2 dimensions"
        )


def _gradients_of(op: str, grads: Any, count: int) -> Any:
    """Return the argument grads as a sequence with one entry per tensor of a group."""
    grads = as_entries(op, "grads", grads)
    if len(grads) != count:
        raise ValueError(f"{op}: grads has {len(grads)} arrays and xs {count}; needs equally many")
    return grads


def _backward_calls(
    op: str, grads: Any, xs: Any, amaxes: Any, recipe: Any, axis: int
) -> tuple[list[Call], list[Any], list[Any]]:
    """Check the arguments of a backward pass. Return its calls, their clip limits, and the unclipped gradients."""
    imported = import_arrays(op, **{f"grads[{i}]": g for i, g in enumerate(grads)})
    pairs = each(op, lambda g, x, a: backward_call(op, g, x, recipe, axis, a), imported, xs, amaxes)
    limits = each(op, lambda pair: clip_amax(*pair), pairs)
    passed = [g if library_of(g) else call.grad for g, (call, _) in zip(grads, pairs, strict=True)]
    return [call for call, _ in pairs], limits, passed


@explains_class
class GroupedPlan:
    """A plan that quantizes N tensors again and again, such as the weights of a model in every training step.

    Arguments are parsed once, when the plan is made. A method's first call allocates its outputs and, on a GPU, a table
    of pointers to the tensors. Later calls reuse them.

        plan = GroupedPlan(weights, "nvfp4-te")
        for step in range(steps):
            values = plan.fake_quantize()        # of the current weights: one launch for the amaxes, one for the values
            ...                                  # update the weights in place

    Every call of a method returns the plan's own arrays, and overwrites the values of the previous call in them. For a
    stacked array on a GPU, they are views of stacked arrays. If the tensors are JAX arrays, every call returns copies.

    A plan keeps its tensors alive, and every call reads their current values. If an entry of the sequence or the memory
    of a PyTorch tensor has been replaced, the methods raise ValueError and compute nothing. In this case call
    refresh(), which makes the plan again. If you keep the same tensors in a new sequence object, pass this object to
    the methods as xs.

    On a GPU, a call takes one kernel launch per dtype, or two if amaxes are computed. It uses the current stream and
    does not synchronize. From a method's second call on there is no work per tensor, and the call can be captured in a
    CUDA graph. Tensors that are not contiguous after `axis` is moved last are first copied, one by one.

    Args:
        xs: a sequence of arrays of any shapes (zero rows included), or one stacked array whose first axis counts the
            arrays (experts).
        recipe: as in quantize, for all tensors.
        axis: as in quantize, for all tensors.
        tensor_amax: None to compute it from xs in every call; or a sequence or array with one entry per tensor. Numbers
            are read when the plan is made. Arrays are used in place, so every call reads their current values.
        scale_layout: as in quantize, for all tensors.
        rounding: as in quantize, for all tensors.
        seed: as in quantize, for all tensors.
        hadamard: as in quantize, for all tensors.
        block_amax: None, or a sequence with one entry per tensor, as in quantize.
        op: the name that error messages begin with.

    Raises:
        TypeError, ValueError, NotImplementedError: as for quantize, when the plan is made or a method is called for the
            first time.

    Exact:
        Equals single calls of quantize and fake_quantize bit for bit.

    Examples:
        >>> import fp4kit, numpy as np
        >>> w = np.ones((16, 32), np.float32)
        >>> plan = fp4kit.GroupedPlan([w], "nvfp4")
        >>> w *= 3
        >>> plan.fake_quantize()[0][0, 0]
        np.float32(3.0)
    """

    def __init__(
        self,
        xs: Any,
        recipe: RecipeId | Recipe,
        *,
        axis: int = -1,
        tensor_amax: Any = None,
        scale_layout: ScaleLayout = "linear",
        rounding: RoundingMode = "nearest",
        seed: Any = None,
        hadamard: Hadamard = False,
        block_amax: Any = None,
        op: str = "GroupedPlan",
    ) -> None:
        self.recipe, self._op, self._axis, self._hadamard = recipe_of(op, recipe), op, axis, hadamard
        self._options = QuantizeOptions(scale_layout, rounding, seed, hadamard)
        self._inputs: dict[str, PlanInput] = {}
        self.refresh(xs, tensor_amax=tensor_amax, block_amax=block_amax)

    def __repr__(self) -> str:
        """Return the number of arrays and the recipe."""
        return f"GroupedPlan({len(self._inputs['xs'].entries)} arrays, {self.recipe.title})"

    def refresh(self, xs: Any = None, *, tensor_amax: Any = None, block_amax: Any = None) -> None:
        """Make the plan again for the current entries of its sequences, for example after a tensor was replaced.

        The plan gets new outputs, so results of earlier calls are no longer overwritten. amax_vector, if there is one,
        is a new vector of zeros.

        Args:
            xs: a new sequence or stacked array; None keeps the current one.
            tensor_amax: new tensor amaxes; None keeps the current ones, or computes them if there are none.
            block_amax: new block amaxes; None keeps the current ones, if there are any.

        Raises:
            TypeError, ValueError, NotImplementedError: as for GroupedPlan.
        """
        new = {"xs": xs, "tensor_amax": tensor_amax, "block_amax": block_amax}
        values = {name: argument.value for name, argument in self._inputs.items()}
        values.setdefault("xs", None)
        values |= {name: list(v) if isinstance(v, Iterator) else v for name, v in new.items() if v is not None}
        home = PlanLibrary(values["xs"])
        with home.context():
            self._make(values)
        self._home = home

    def _make(self, values: dict[str, Any]) -> None:
        """Make or remake the plan: parse the calls, record the arguments, and make the object that runs the calls."""
        arrays, stack = arrays_of(self._op, values["xs"])
        amaxes = [per_tensor(self._op, n, values.get(n), len(arrays)) for n in ("tensor_amax", "block_amax")]

        def parse_one(x: Any, tensor_amax: Any, block_amax: Any) -> Call:
            given = {"tensor_amax": tensor_amax, "block_amax": block_amax, "seed": self._options.seed}
            call, given = array_call(self._op, x, self.recipe, self._axis, **given)
            call = with_options(call, self._options, given["seed"])
            return call._replace(tensor_amax=given["tensor_amax"], block_amax=given["block_amax"])

        self._calls = each(self._op, parse_one, arrays, *amaxes)
        self._inputs = {name: PlanInput.of(name, value) for name, value in values.items()}
        self._clip: tuple[PlanInput, Any] | None = None
        self._on_device = bool(self._calls) and self._calls[0].on_device
        calls, moved = self._calls, None
        if self._on_device:
            # Only block amaxes are checked here. The group checks tensor amaxes, and reads them in every call.
            checked = each(self._op, lambda c: with_amaxes(c, None, c.block_amax), calls)
            calls = [c._replace(tensor_amax=call.tensor_amax) for c, call in zip(checked, calls, strict=True)]
            moved = None if stack is None else np.moveaxis(stack, calls[0].axis + 1, -1)
        self._group = new_group(self._op, calls, self.recipe, moved)

    @property
    @returns_in_plan_library
    def amax_vector(self) -> Any:
        """The amaxes of all tensors in one float32 vector: one entry per tensor scale, tensor after tensor.

        A tensor has one entry, or one per row or block if the recipe has one tensor scale per row or block. The vector
        holds zeros until amax, quantize or fake_quantize first computes the amaxes, and every later computation
        overwrites it. Only fake_quantize on a GPU, for recipes with a fake_rule and one tensor scale per block, leaves
        it unchanged.

        The attribute is None if the caller passed the amaxes, or if the recipe has no tensor scale.

        A method called with keep_amax=True computes no amaxes, and uses the content of this vector. So you can write to
        the vector, for example to reduce it over several processes, or keep the amaxes of an earlier step. For JAX
        arrays, the attribute is a copy, which the methods do not read.
        """
        return self._group.vector if self._group.computes_amaxes else None

    @returns_in_plan_library
    def amax(self, xs: Any = None) -> list[Any]:
        """Return, per tensor, the amax from which its scale is made: the caller's tensor_amax, or one computed now.

        Args:
            xs: the current sequence or stacked array; None if it is the object that the plan was made with.

        Returns:
            A list with one entry per tensor: float32 of shape (), or with one amax per row or block; None for recipes
                without a tensor scale. Computed amaxes are views of amax_vector, so the next computation overwrites
                them. On a GPU, one kernel launch per dtype computes them.

        Raises:
            ValueError: an entry or its memory was replaced after the plan was made.
        """
        self._check_unchanged("amax", xs)
        return list(self._group.amax())

    @returns_in_plan_library
    def quantize(self, xs: Any = None, *, keep_amax: bool = False) -> list[Quantized]:
        """Quantize the current values of each tensor into the plan's own arrays.

        Args:
            xs: the current sequence or stacked array; None if it is the object that the plan was made with.
            keep_amax: True uses the amaxes in amax_vector. False computes them first. It has no effect if amax_vector
                is None.

        Returns:
            A list with one Quantized per tensor. Their arrays belong to the plan, and the next call overwrites them.

        Raises:
            TypeError: keep_amax is not a bool.
            ValueError: an entry or its memory was replaced after the plan was made; or as for fp4kit.quantize.
        """
        keep_amax = as_flag(self._op, "keep_amax", keep_amax)
        self._check_unchanged("quantize", xs)
        return list(self._group.quantize(not keep_amax))

    @returns_in_plan_library
    def fake_quantize(self, xs: Any = None, *, keep_amax: bool = False) -> list[Any]:
        """Fake-quantize the current values of each tensor into the plan's own arrays.

        Args:
            xs: the current sequence or stacked array; None if it is the object that the plan was made with.
            keep_amax: True uses the amaxes in amax_vector. False computes them first, and stores them there (see
                amax_vector for an exception). It has no effect if amax_vector is None.

        Returns:
            A list with one array per tensor, in its shape and dtype. The arrays belong to the plan, and the next call
                overwrites them.

        Raises:
            TypeError: keep_amax is not a bool.
            ValueError: the plan has a hadamard option; an entry or its memory was replaced after the plan was made; or
                as for fp4kit.fake_quantize.
        """
        keep_amax = as_flag(self._op, "keep_amax", keep_amax)
        self._check_unchanged("fake_quantize", xs)
        if self._hadamard is not False:
            raise ValueError(
                f"{self._op}: hadamard is {self._hadamard!r}, which fake_quantize does not support; make a plan without"
                " it"
            )
        check_fake_rule(self._op, self.recipe, self._options.rounding)
        return list(self._group.fake_quantize(not keep_amax))

    @returns_in_plan_library
    def fake_quantize_backward(self, grads: Sequence[Any], xs: Any = None, *, pass_through: bool = True) -> list[Any]:
        """Return the straight-through gradient of each tensor, as fp4kit.fake_quantize_backward does.

        Args:
            grads: N arrays in the shapes of xs. On a GPU, passing the same arrays as in the previous call avoids any
                work per array.
            xs: the current sequence or stacked array; None if it is the object that the plan was made with.
            pass_through: True returns grads unclipped. False sets them to 0 where |x| exceeds the amax of the tensor,
                which is the plan's tensor_amax or is computed from x.

        Returns:
            A list with one gradient per tensor. If pass_through is True, these are the arrays of grads themselves.
                Otherwise they are new arrays or, on a GPU, the plan's own arrays, which the next call may overwrite.
                In host memory, an array of grads without elements is returned itself.

        Raises:
            TypeError: pass_through is not a bool, or as for fp4kit.fake_quantize_backward.
            ValueError: grads does not have one entry per tensor; an entry or its memory was replaced after the plan was
                made; or as for fp4kit.fake_quantize_backward.
        """
        self._check_unchanged("fake_quantize_backward", xs)
        pass_through = as_flag(self._op, "pass_through", pass_through)
        grads = _gradients_of(self._op, grads, len(self._calls))
        xs, amaxes = [call.x for call in self._calls], [call.tensor_amax for call in self._calls]
        if pass_through or not self._on_device or self._clip is None or self._clip[0].changed(grads):
            *arguments, passed = _backward_calls(self._op, grads, xs, amaxes, self.recipe, self._axis)
            if pass_through:
                return passed
            self._clip = PlanInput.of("grads", grads), new_clip_group(*arguments)
        clipped: list[Any] = self._clip[1].clip()
        return clipped

    def _check_unchanged(self, method: str, xs: Any) -> None:
        """Raise ValueError if an argument of the plan was replaced: an entry of it, or the memory of a PyTorch
        tensor.
        """
        for name, argument in self._inputs.items():
            changed = argument.changed(xs if name == "xs" else None)
            if changed is not None:
                raise ValueError(
                    f"{self._op}.{method}: {name}{changed}; call refresh() first, which makes the plan again"
                )


@with_threads
@returns_in_library
def amax_grouped(
    xs: Any, recipe: RecipeId | Recipe | None = None, *, axis: Any = None, threads: int | None = None
) -> list[Any]:
    """Return the amax of each array of a group: [amax(x, recipe, axis=axis) for x in xs].

    On a GPU, one kernel launch per dtype computes all amaxes, and the results are views of one vector. Recipes with
    blocks of several rows or with amax_nan="lanes" take one launch per array instead, because one thread must read a
    whole block.

    Args:
        xs: a sequence of arrays of any shapes, or one stacked array whose first axis counts the arrays (experts).
        recipe: as in amax.
        axis: as in amax.
        threads: the largest number of CPU threads, at least 1; None means fp4kit.num_threads(). Ignored on a GPU.

    Returns:
        A list of float32 arrays, one per array of xs. It is empty if xs is an empty sequence.

    Raises:
        TypeError, ValueError: as for amax.

    Examples:
        >>> import fp4kit, numpy as np
        >>> fp4kit.amax_grouped([np.float32([1, -2]), np.float32([3])])
        [array(2., dtype=float32), array(3., dtype=float32)]
    """
    arrays, _ = arrays_of("amax_grouped", xs)
    calls = each("amax_grouped", lambda x: amax_call("amax_grouped", x, recipe, axis), arrays)
    return run_group("amax_grouped", "amax" if recipe is not None else "plain_amax", calls)


@with_threads
def quantize_grouped(
    xs: Any,
    recipe: RecipeId | Recipe,
    *,
    axis: int = -1,
    tensor_amax: Any = None,
    scale_layout: ScaleLayout = "linear",
    rounding: RoundingMode = "nearest",
    seed: Any = None,
    hadamard: Hadamard = False,
    block_amax: Any = None,
    threads: int | None = None,
) -> list[Quantized]:
    """Quantize each array of a group, such as the weights of all experts of a layer.

    On a GPU, this takes one kernel launch per dtype, plus one per dtype for the amaxes if they are computed. A stacked
    array is not copied, and its results are views of stacked arrays. If you quantize the same arrays in every step, use
    GroupedPlan, which repeats the call without work per array.

    Args:
        xs: a sequence of arrays of any shapes (zero rows included) and dtypes, or one stacked array whose first axis
            counts the arrays (experts).
        recipe: as in quantize, for all arrays.
        axis: as in quantize, for all arrays.
        tensor_amax: None to compute it from each array; or one entry per array: a sequence of N entries, or an array
            whose first axis has length N. Each entry is as in quantize: a scalar; or amaxes per row, of shape (rows, 1)
            or (rows,), or per block, if the recipe has one tensor scale per row or block.
        scale_layout: as in quantize, for all arrays.
        rounding: as in quantize, for all arrays.
        seed: as in quantize, for all arrays.
        hadamard: as in quantize, for all arrays.
        block_amax: None, or one per array, as in quantize.
        threads: the largest number of CPU threads, at least 1; None means fp4kit.num_threads(). Ignored on a GPU.

    Returns:
        A list of Quantized, one per array of xs.

    Raises:
        TypeError, ValueError, NotImplementedError: as for quantize.
        ValueError: tensor_amax or block_amax does not have one entry per array, or an entry is None.

    Exact:
        Equals [quantize(x, recipe, tensor_amax=a, ...) for x, a in zip(xs, tensor_amax)] bit for bit.

    Examples:
        >>> import fp4kit, numpy as np
        >>> experts = [np.ones((16, 32), np.float32), np.zeros((0, 32), np.float32)]
        >>> [q.shape for q in fp4kit.quantize_grouped(experts, "nvfp4")]
        [(16, 32), (0, 32)]
    """
    op = "quantize_grouped"
    options = QuantizeOptions(scale_layout, rounding, seed, hadamard)
    if block_amax is None:  # single calls take block amaxes for more recipes than groups do
        if (found := _one_by_one(op, quantize, xs, recipe, axis, tensor_amax, options)) is not None:
            return found
    amaxes = {"tensor_amax": tensor_amax, "block_amax": block_amax}
    return GroupedPlan(xs, recipe, op=op, axis=axis, **options._asdict(), **amaxes).quantize()


def _one_by_one(op: str, single: Any, xs: Any, recipe: Any, axis: int, amaxes: Any, options: QuantizeOptions) -> Any:
    """Return the results of single calls, which are cached, for arrays in host memory; None for other arrays."""
    if (arrays := _host_arrays(op, xs)) is None:
        return None
    amaxes = per_tensor(op, "tensor_amax", amaxes, len(arrays))
    others: tuple[Any, ...] = (recipe, axis, *options[:2])
    parse, named, rest = quantize_call, options._asdict(), [None]
    if single is fake_quantize:
        parse, named, rest = fake_call, {"rounding": options.rounding, "seed": options.seed}, []
        others = (recipe, axis, options.rounding)
    operation = single.__name__
    kinds: dict[Any, Any] = {}  # facts of arrays whose call is checked -> the cached call; None if `single` finds it
    is_cached = options.seed is None and options.hadamard is False

    def check(x: Any, amax: Any) -> Any:
        """Raise the errors of a call. Return the function that computes it; None for `single`."""
        kind = facts_of((x, amax)) if is_cached else None
        is_known, key, cached = kind in kinds, None, kinds.get(kind)
        if is_cached and not is_known:
            key, cached = find(operation, (x, amax, *rest), *others)
        if (cached or is_known) and _is_valid(amax):
            kinds[kind] = cached
            return cached
        call = parse(op, x, recipe, axis, options, tensor_amax=amax)._replace(op=operation)
        if key is not None:
            kinds[kind] = None
        return lambda *arguments: convert_and_call(_run_parsed, x, call, operation, key, arguments)

    def compute(x: Any, amax: Any, found: Any) -> Any:
        result = None if found is None else found(x, amax, *rest)
        return single(x, recipe, axis=axis, tensor_amax=amax, **named) if result is None else result

    return each(op, compute, arrays, amaxes, each(op, check, arrays, amaxes))


def _is_valid(amax: Any) -> bool:
    """Return whether no element of a caller's amax is NaN or negative."""
    is_valid: Any = amax is None or amax >= 0
    return bool(is_valid.all() if getattr(is_valid, "ndim", 0) else is_valid)


def _host_arrays(op: str, xs: Any) -> Any:
    """Return the arrays of a group if all are in host memory and of one library; otherwise None."""
    if type(xs) is np.ndarray:
        return list(xs) if xs.ndim > 1 else None
    tensor = tensor_type()
    if isinstance(xs, tensor) and xs.is_cpu and xs.ndim > 1:
        import_arrays(op, xs=xs)
        return list(xs.detach())
    if not isinstance(xs, (list, tuple)) or not xs:
        return None
    kinds = {*map(type, xs)}
    if kinds == {np.ndarray} or all(isinstance(x, tensor) and x.is_cpu for x in xs):
        return xs
    is_jax = [kind.__name__ for kind in kinds] == ["ArrayImpl"]
    return xs if is_jax and all(not x.is_deleted() and getattr(x.device, "platform", "") == "cpu" for x in xs) else None


@returns_in_library
def _run_parsed(x: Any, call: Call, operation: str, key: Any, arguments: tuple[Any, ...]) -> Any:
    """Return the result of a parsed call in the library of x."""
    return run_call(call, operation, key, arguments)


@with_threads
def fake_quantize_grouped(
    xs: Any,
    recipe: RecipeId | Recipe,
    *,
    axis: int = -1,
    tensor_amax: Any = None,
    block_amax: Any = None,
    rounding: RoundingMode = "nearest",
    seed: Any = None,
    threads: int | None = None,
) -> list[Any]:
    """Fake-quantize each array of a group, such as the weights of all experts of a layer.

    Args:
        xs: a sequence of arrays of any shapes and dtypes, or one stacked array whose first axis counts the arrays
            (experts).
        recipe: as in fake_quantize, for all arrays.
        axis: as in fake_quantize, for all arrays.
        tensor_amax: None, or one per array, as in quantize_grouped.
        block_amax: None, or one per array, as in quantize_grouped.
        rounding: as in fake_quantize, for all arrays.
        seed: as in fake_quantize, for all arrays.
        threads: the largest number of CPU threads, at least 1; None means fp4kit.num_threads(). Ignored on a GPU.

    Returns:
        A list of new arrays, one per array of xs.

    Raises:
        TypeError, ValueError, NotImplementedError: as for fake_quantize and quantize_grouped.

    Exact:
        Equals [fake_quantize(x, recipe, tensor_amax=a, ...) for x, a in zip(xs, tensor_amax)] bit for bit.

    Examples:
        >>> import fp4kit, numpy as np
        >>> xs = [np.full((1, 32), 5, np.float32), np.ones((2, 32), np.float32)]
        >>> [y[0, 0] for y in fp4kit.fake_quantize_grouped(xs, "mxfp4")]
        [np.float32(4.0), np.float32(1.0)]
    """
    op, options = "fake_quantize_grouped", QuantizeOptions(rounding=rounding, seed=seed)
    if block_amax is None:
        if (found := _one_by_one(op, fake_quantize, xs, recipe, axis, tensor_amax, options)) is not None:
            return found
    amaxes = {"tensor_amax": tensor_amax, "block_amax": block_amax}
    return GroupedPlan(xs, recipe, op=op, axis=axis, rounding=rounding, seed=seed, **amaxes).fake_quantize()


@explains_calls
@returns_in_library
def fake_quantize_grouped_backward(
    grads: Any, xs: Any, recipe: RecipeId | Recipe, *, axis: int = -1, amax: Any = None, pass_through: bool = True
) -> list[Any]:
    """Return the straight-through gradient of fake_quantize_grouped for each array of a group.

        gradient = grad                                       if pass_through
        gradient = grad where |x| <= amax, and 0 elsewhere    otherwise

    Args:
        grads: a sequence of arrays in the shapes of xs, or one stacked array.
        xs: the arrays that were fake-quantized: a sequence, or one stacked array.
        recipe: as in fake_quantize_backward, for all arrays.
        axis: as in fake_quantize_backward, for all arrays.
        amax: None, or one clip limit per array, each as in fake_quantize_backward.
        pass_through: True returns grads unclipped. False sets them to 0 where |x| > amax.

    Returns:
        A list of gradients. If pass_through is True, it holds the arrays of grads themselves. Otherwise the arrays are
        new, but an array of grads without elements may be returned itself.

    Raises:
        TypeError, ValueError: as for fake_quantize_backward.
        ValueError: grads or amax does not have one entry per array, or an entry of amax is None.

    Exact:
        Equals [fake_quantize_backward(g, x, recipe, amax=a, ...) for g, x, a in zip(grads, xs, amax)] bit for bit.

    Examples:
        >>> import fp4kit, numpy as np
        >>> x = np.float32([[0.5, -3] * 16])
        >>> fp4kit.fake_quantize_grouped_backward([x, x], [x, x], "mxfp4", amax=[1, 4], pass_through=False)[0][0, :2]
        array([0.5, 0. ], dtype=float32)
    """
    op = "fake_quantize_grouped_backward"
    pass_through = as_flag(op, "pass_through", pass_through)
    arrays, _ = arrays_of(op, xs)
    amaxes = per_tensor(op, "amax", amax, len(arrays))
    grads = _gradients_of(op, grads, len(arrays))
    *arguments, passed = _backward_calls(op, grads, arrays, amaxes, recipe, axis)
    return passed if pass_through else list(new_clip_group(*arguments).clip())
