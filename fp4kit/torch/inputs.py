"""Measure the inputs of the linear layers of a PyTorch model while it runs, and fake-quantize them in training. A
stack of experts is a 3-d parameter with one matrix per expert.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode

from fp4kit.arguments import a_type, as_float32, explains_calls
from fp4kit.arrays.imports import is_distributed
from fp4kit.calibration import Collector
from fp4kit.call.inputs import by_input_global_scale
from fp4kit.checkpoint.plan.scale_search import Activations
from fp4kit.qat import TrainedWeight, rule_of_inputs
from fp4kit.recipes import Recipe, recipe_of
from fp4kit.recipes.table import from_spec, to_spec
from fp4kit.storage.files import CheckpointError, counted, listed
from fp4kit.torch.functions import fake_quantize
from fp4kit.torch.parameters import Renamed, largest, renaming_of
from fp4kit.training.settings import naming

_WRAPPERS = (torch.nn.parallel.DistributedDataParallel, torch.nn.DataParallel)
_PRODUCTS = {
    torch.nn.functional.linear,
    torch.matmul,
    torch.mm,
    torch.bmm,
    torch.Tensor.matmul,
    torch.Tensor.__matmul__,
    torch.Tensor.mm,
    torch.Tensor.bmm,
}


@explains_calls
@contextmanager
def collect(model: torch.nn.Module, *, histogram: bool = True) -> Iterator[Collector]:
    """Collect the inputs of every linear layer of a model that runs in the with block. Yield the Collector.

        with fp4kit.torch.collect(model) as collector, torch.no_grad():
            for batch in calibration_set:
                model(**batch)
        collector.save("activations.safetensors")

    A forward hook on each torch.nn.Linear collects its inputs. If the experts of a mixture-of-experts layer are stacked
    in one 3-d parameter, the inputs of each expert are collected separately, when the parameter is multiplied. Layers
    get the names that the checkpoint has after model.save_pretrained. The Collector knows every torch.nn.Linear, also
    those that never run. It knows all experts of a stack once one of them runs.

    Args:
        model: the model, not compiled. Its outputs do not change. While the block runs, models of transformers compute
            experts one by one (the implementation "eager"), because faster implementations hide their inputs.
        histogram: True to count block amaxes too, which the rule "headroom" of Collector needs. False saves time.

    Yields:
        The Collector. Every row of inputs counts as a token, padding included.

    Raises:
        TypeError: if model is not a module.
        ValueError: if a part of the model is compiled, or if it has neither a torch.nn.Linear nor a stack of experts;
            in the model's forward, if an input holds NaN or infinity (on a GPU, when results are read).

    Exact:
        The amaxes equal those of Model-Optimizer's input quantizers for the same calls (see Collector.amaxes).

    Examples:
        >>> import torch, fp4kit.torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(32, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
        >>> with fp4kit.torch.collect(model) as collector:
        ...     y = model(torch.ones(3, 32))
        >>> collector.tokens(), collector.amaxes()["0"]
        ({'0': 3, '2': 3}, np.float32(1.0))
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"collect: model is {a_type(model)}; needs a torch.nn.Module")
    _check_not_compiled(model)
    root: Any = model.module if isinstance(model, _WRAPPERS) else model
    collector, renamed = Collector(histogram=histogram), renaming_of(root)
    modules = ((name, one) for name, one in root.named_modules() if isinstance(one, torch.nn.Linear))
    linears = [(name, module) for name, module in modules if module.weight.ndim == 2]
    stacks = _stacks_of(root, renamed)
    if not linears and not stacks:
        raise ValueError("collect: the model has no torch.nn.Linear and no stack of experts; nothing can be collected")
    with ExitStack() as stack:
        for name, module in linears:
            layers = _layers(renamed(f"{name}.weight" if name else "weight", module.weight), name)
            for layer in layers:
                collector.add_layer(layer, module.in_features)
            hook = module.register_forward_pre_hook(partial(_hook, collector, layers), with_kwargs=True)
            stack.callback(hook.remove)
        if stacks:
            stack.enter_context(_eager_experts(root))
            stack.enter_context(_Products(collector, stacks))
        yield collector


def _check_not_compiled(model: torch.nn.Module) -> None:
    """Raise ValueError if the model or one of its modules is compiled, because compiled code does not run new hooks."""
    for name, module in model.named_modules():
        if hasattr(module, "_orig_mod") or module._compiled_call_impl is not None:
            raise ValueError(
                f"collect: {f'the module {name}' if name else 'the model'} is compiled, so its inputs cannot be seen;"
                " collect before torch.compile, or pass the model that was compiled (model._orig_mod)"
            )


def _layers(names: Sequence[str], name: str) -> tuple[str, ...]:
    """Return the names that a layer has in the checkpoint, without duplicates."""
    return tuple(dict.fromkeys(n.removesuffix(".weight") for n in names)) or (name,)


def _hook(
    collector: Collector, layers: Sequence[str], module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    _collect(collector, layers, args[0] if args else kwargs["input"])


def _collect(collector: Collector, layers: Sequence[str], x: torch.Tensor) -> None:
    """Collect the inputs x of one layer or expert under each of its names."""
    for layer in layers:
        collector.collect(layer, x.detach())


class _Stack(NamedTuple):
    """A stack of experts: a 3-d parameter that holds one matrix per expert.

    parameter: the parameter, with the experts along its first axis.
    layers: for each expert, the names of its layers in the checkpoint. A fused matrix has several names.
    """

    parameter: torch.Tensor
    layers: tuple[tuple[str, ...], ...]


def _stacks_of(model: torch.nn.Module, renamed: Renamed) -> dict[int, list[_Stack]]:
    """Return the stacks of experts of a model by the address of their storage: {address: stacks in this storage}."""
    found: dict[int, list[_Stack]] = {}
    for name, parameter in model.named_parameters():
        if parameter.ndim != 3 or "experts" not in name.split(".")[:-1] or not parameter.is_floating_point():
            continue
        saved, experts = renamed(name, parameter), range(len(parameter))
        separate = [tuple(n for n in saved if f".experts.{e}." in f".{n}") for e in experts]
        parent, _, leaf = (saved[0] if len(saved) == 1 else name).removesuffix(".weight").rpartition("experts.")
        stacked = ((f"{parent}experts.{e}.{leaf}",) for e in experts)
        layers = tuple(_layers(names, name) for names in separate) if all(separate) else tuple(stacked)
        found.setdefault(parameter.untyped_storage().data_ptr(), []).append(_Stack(parameter, layers))
    return found


class _Products(TorchFunctionMode):
    """Collect the first factor of every matrix product whose second factor is an expert, or several experts of a stack.

    Use it in a ``with`` statement. PyTorch reports every matrix product inside the statement to this object.

    collector: the Collector to which inputs are added.
    stacks: the stacks of experts, as _stacks_of returns them.
    """

    def __init__(self, collector: Collector, stacks: dict[int, list[_Stack]]) -> None:
        super().__init__()
        self._collector, self._stacks = collector, stacks
        self._added: set[int] = set()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call ``func`` and return its result. If it is a matrix product, collect the inputs of experts first."""
        if func in _PRODUCTS:
            self._see(*_factors(args, kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _see(self, x: Any, weight: Any) -> None:
        """Collect x, the inputs that a matrix product multiplies, if ``weight`` is a view of a stack of experts."""
        if not isinstance(weight, torch.Tensor) or weight.ndim not in (2, 3) or not self._stacks:
            return
        for parameter, layers in self._stacks.get(weight.untyped_storage().data_ptr(), ()):
            first, rest = divmod(int(weight.storage_offset() - parameter.storage_offset()), parameter.stride(0))
            if rest or not 0 <= first < len(layers):
                continue
            if id(layers) not in self._added:
                self._added.add(id(layers))
                for layer in (layer for group in layers for layer in group):
                    self._collector.add_layer(layer, x.shape[-1])
            if weight.ndim == 2:
                _collect(self._collector, layers[first], x)
                continue
            for inputs, group in zip(x, layers[first:], strict=False):
                rows = inputs.reshape(-1, inputs.shape[-1])
                routed = (rows != 0).any(dim=-1)  # other tokens are routed elsewhere
                _collect(self._collector, group, rows[routed])


def _factors(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """Return both factors of a call to a function of _PRODUCTS, such as F.linear."""
    second = next((kwargs[name] for name in ("weight", "other", "mat2") if name in kwargs), None)
    return args[0] if args else kwargs.get("input"), args[1] if len(args) > 1 else second


@contextmanager
def _eager_experts(model: torch.nn.Module) -> Iterator[None]:
    """Make models of transformers compute experts one by one inside the with block, and restore the setting
    afterwards.
    """
    with ExitStack() as stack:
        for module in model.modules():
            config: Any = getattr(module, "config", None)
            before = getattr(config, "_experts_implementation_internal", None)
            if before not in (None, "eager"):
                config._experts_implementation_internal = "eager"
                stack.callback(setattr, config, "_experts_implementation_internal", before)
        yield


_HANDLE = "_fp4kit_input_hook"


class InputHook:
    """Fake-quantize the inputs with which a layer is called, as a forward pre-hook of PyTorch.

    The inputs are the first positional argument or, without positional arguments, the argument called `input`.

    Args:
        recipe: the recipe as the string that recipes.to_string.to_spec returns.
        amax: the calibrated amax of the inputs, from which the tensor scale follows, or the stored divisor for a recipe
            of by_divisor; None to compute the amax in each call.
        given: the recipe that the caller gave, as such a string, if `recipe` is a copy of by_divisor.
    """

    def __init__(self, recipe: str, amax: float | None, given: str | None = None) -> None:
        self.recipe, self.amax, self.given = recipe, amax, given

    def __call__(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """Return (args, kwargs) of the layer's forward, in which fake-quantized inputs replace the inputs."""
        if args:
            return (self._values(args[0]), *args[1:]), kwargs
        return args, {**kwargs, "input": self._values(kwargs["input"])}

    def _values(self, x: Any) -> torch.Tensor:
        """Return x fake-quantized."""
        if not is_distributed(x):
            return fake_quantize(x, self.recipe, tensor_amax=self.amax)
        amax: Any = self.amax
        if amax is None and from_spec(self.recipe).tensor_scaling == "tensor":
            amax = largest(x, False)
        with naming("activations", {"the input of a layer": amax} if torch.is_tensor(amax) else None):
            values = fake_quantize(x.to_local(), self.recipe, tensor_amax=amax)
        shape = {"shape": x.shape, "stride": x.stride()}
        return type(x).from_local(values, x.device_mesh, x.placements, run_check=False, **shape)


def input_hooks(
    op: str, weights: Sequence[TrainedWeight], recipe: str | Recipe | None, amaxes: Any, divisors: Any
) -> list[tuple[TrainedWeight, InputHook]]:
    """Return a hook for the layer of each weight that is a torch.nn.Linear; [] if the recipe is None."""
    if recipe is None:
        if amaxes is not None:
            raise TypeError(f"{op}: input_amaxes are given without activations; pass activations='nvfp4-te' too")
        if divisors is not None:
            raise TypeError(f"{op}: input_global_scales are given without activations; pass activations too")
        return []
    if amaxes is not None and divisors is not None:
        raise ValueError(f"{op}: input_amaxes and input_global_scales are both given; needs one of them")
    r = recipe_of(op, recipe)
    linear = [one for one in weights if one.leaf == "weight" and isinstance(one.module, torch.nn.Linear)]
    if not linear:
        raise ValueError(f"{op}: activations={r.id!r}, but no torch.nn.Linear is fake-quantized; leave it out")
    unseen = torch.nn.modules.linear.NonDynamicallyQuantizableLinear
    if names := [one.name for one in linear if isinstance(one.module, unseen)]:
        raise ValueError(
            f"{op}: {listed(names)}: torch.nn.MultiheadAttention does not call this layer, so its inputs cannot be"
            " fake-quantized; leave it out with exclude"
        )
    layers = {one.saved.removesuffix(".weight"): int(one.shape[-1]) for one in linear}
    if divisors is not None:
        return _hooks_by_divisors(op, linear, r, divisors)
    try:
        found: Mapping[str, Any] = {} if amaxes is None else _amaxes(op, r, amaxes).of_layers(layers)
    except CheckpointError as error:
        raise CheckpointError(f"{op}: {error}") from None
    spec, numbers = to_spec(r), {name: float(amax) for name, amax in found.items()}
    return [(one, InputHook(spec, numbers.get(one.saved.removesuffix(".weight")))) for one in linear]


def line_of_inputs(hooks: Sequence[tuple[TrainedWeight, InputHook]], stacks: int) -> str:
    """Return the line about inputs of layers in the table of fake_quantize_model; "" without hooks.

    stacks: the number of stacks of experts whose weights are quantized.
    """
    if not hooks:
        return ""
    hook = hooks[0][1]
    static = "input_global_scales" if hook.given else "" if hook.amax is None else "amaxes"
    rule = rule_of_inputs(from_spec(hook.given or hook.recipe), static)
    others = f"; those of {counted(stacks, 'stack')} of experts stay unquantized" if stacks else ""
    return f"inputs of {len(hooks)} torch.nn.Linear fake-quantized {rule}{others}"


def _hooks_by_divisors(
    op: str, weights: Sequence[TrainedWeight], recipe: Recipe, divisors: Any
) -> list[tuple[TrainedWeight, InputHook]]:
    """Return a hook for the layer of each weight, whose inputs are divided by the stored input_global_scale."""
    if not isinstance(divisors, Mapping):
        kind = type(divisors).__name__
        raise TypeError(f"{op}: input_global_scales is {kind}; needs a dict of layer -> input_global_scale")
    layers = [one.saved.removesuffix(".weight") for one in weights]
    if missing := [layer for layer in layers if layer not in divisors]:
        raise ValueError(
            f"{op}: input_global_scales has no entry for {len(missing)} of {len(layers)} layers: {listed(missing)}; add"
            " them, or leave the layers out with exclude"
        )
    hooks = []
    for one, layer in zip(weights, layers, strict=True):
        r, divisor = by_input_global_scale(op, recipe, divisors[layer], None, f"input_global_scales[{layer!r}]")
        hooks.append((one, InputHook(to_spec(r), float(divisor), to_spec(recipe))))
    return hooks


def _amaxes(op: str, recipe: Recipe, given: Any) -> Activations:
    """Return the amaxes of layer inputs that a caller passes as a Collector, or as a mapping from layer name to
    amax.
    """
    if recipe.tensor_scaling != "tensor":
        raise ValueError(f"{op}: input_amaxes are given, but {recipe.id} has no tensor scale; leave them out")
    if isinstance(given, Collector):
        return Activations.of(given)
    if not isinstance(given, Mapping):
        raise TypeError(f"{op}: input_amaxes is {type(given).__name__}; needs a Collector, or a dict of layer -> amax")
    need = "needs a number >= 0"
    amaxes = {name: as_float32(op, f"input_amaxes[{name!r}]", amax, need) for name, amax in given.items()}
    for name, amax in amaxes.items():
        if not amax >= 0:
            raise ValueError(f"{op}: input_amaxes[{name!r}] is {amax}; {need}")
    return Activations({str(name): amax for name, amax in amaxes.items()}, {})


def add_hook(module: torch.nn.Module, hook: InputHook) -> None:
    """Register a hook that fake-quantizes the inputs of a layer. It replaces a hook that add_hook registered before."""
    remove_hook(module)
    object.__setattr__(module, _HANDLE, module.register_forward_pre_hook(hook, with_kwargs=True))


def remove_hook(module: torch.nn.Module) -> None:
    """Undo add_hook. Does nothing if the layer does not fake-quantize its inputs."""
    handle = module.__dict__.pop(_HANDLE, None)
    if handle is not None:
        handle.remove()
