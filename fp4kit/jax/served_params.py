"""Fake-quantize the weights of a pytree of parameters, so that a JAX model trains with the values that are served.
These served values are the ones that a loader decodes from the checkpoint that `fp4kit convert` writes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextvars import copy_context
from functools import partial
from itertools import starmap
from typing import Any, Literal

import jax

from fp4kit.arguments import as_flag, explains_calls, is_one_of
from fp4kit.contract.engines import Serving
from fp4kit.contract.schema import ServedDtype
from fp4kit.jax.calls import NAMES
from fp4kit.jax.functions import fake_quantize
from fp4kit.qat import QatChoice, QatPlan, TrainedWeight, engine_of, make_plan, rule_of_inputs, table_of
from fp4kit.recipes import Recipe
from fp4kit.training.settings import naming
from fp4kit.types import RecipeId

_OP = "fake_quantize_model"


class ServedParams:
    """A function that takes a pytree of parameters and returns a new one with fake-quantized weights.

    fake_quantize_model returns a ServedParams. Call it with the parameters, also inside jax.jit, jax.grad and
    jax.checkpoint. Gradients pass straight through, or are set to 0 where |w| > amax if fake_quantize_model was called
    with pass_through=False. print() shows a table of all arrays with the reason why each is quantized or not.

    Attributes:
        names: the names of the arrays that are fake-quantized.
        plan: the plan, with one row per array.
    """

    def __init__(
        self,
        plan: QatPlan,
        pass_through: bool,
        serving: Serving | None = None,
        inputs: Mapping[str, float] | None = None,
    ) -> None:
        self.plan, self.names, self._pass_through = plan, plan.names, pass_through
        self._serving, self._inputs = serving, dict(inputs or {})
        missing = [row.layer for row in plan.selected if inputs is not None and row.layer not in inputs]
        if missing:
            raise ValueError(f"{_OP}: inputs has no layer {missing[0]!r}; give the largest input of each layer")
        self._members = {row.name: [one.name for one in plan.members(row)] for row in plan.selected}

    def __str__(self) -> str:
        """Return the table as text."""
        recipe = None if self._serving is None else self._serving.activations
        rule = "" if recipe is None else rule_of_inputs(recipe, "amaxes" if self._inputs else "")
        return table_of(self.plan, rule and f"inputs(layer, x) fake-quantizes {rule}")

    def inputs(self, layer: str, x: Any) -> Any:
        """Return the inputs of a layer, fake-quantized as the engine does; x itself if it leaves inputs unquantized.

        Args:
            layer: the name of the layer, such as "layers.0.mlp.up_proj": that of its array without the last part.
            x: float32, float16 or bfloat16 array (..., K) of JAX.

        Returns:
            An array with the shape and dtype of x. Gradients pass straight through.

        Raises:
            ValueError: no array of this layer is fake-quantized, or fake_quantize_model was called without an engine.
        """
        if self._serving is None:
            raise ValueError(f"ServedParams.inputs: no engine is known; call {_OP} with engine= and scheme=")
        if layer not in {row.layer for row in self.plan.selected}:
            raise ValueError(f"ServedParams.inputs: {layer!r:.60} is no layer whose weight is fake-quantized")
        if self._serving.activations is None:
            return x
        return fake_quantize(x, self._serving.activations, tensor_amax=self._inputs.get(layer))

    def __call__(self, params: Any) -> Any:
        """Return a new pytree like params, in which served values (fake-quantized weights) replace the weights.

        Raises:
            ValueError: params has other names or shapes than those that were planned for.
        """
        leaves, structure = jax.tree_util.tree_flatten_with_path(params)
        rows, arrays = self.plan.rows, [array for _, array in leaves]
        if len(arrays) != len(rows):
            raise ValueError(f"ServedParams: params has {len(arrays)} arrays; needs {len(rows)}, as planned")
        for row, found in zip(rows, starmap(_leaf, leaves), strict=True):
            if (found.name, found.shape) != (row.name, row.shape):
                got = f"{found.name} of shape {found.shape}, where {row.name} of shape {row.shape} was planned"
                raise ValueError(f"ServedParams: params has {got}; call fake_quantize_model with these params")
        amaxes = {}
        if self.plan.shares:
            pairs = ((row, w) for row, w in zip(rows, arrays, strict=True) if row.quantized)
            amaxes = {row.name: _largest(w, row.kind == "stack") for row, w in pairs}
        values = [self._values(row, w, amaxes) for row, w in zip(rows, arrays, strict=True)]
        return jax.tree.unflatten(structure, values)

    def _values(self, row: TrainedWeight, w: Any, amaxes: Mapping[str, Any]) -> Any:
        """Return the served values of one array, or the array itself if the plan leaves it unquantized."""
        if not row.quantized:
            return w
        amax, group = None, {name: amaxes[name] for name in self._members[row.name]} if self.plan.shares else {}
        if group:
            amax = jax.numpy.stack([*group.values()]).max(0)
            amax = jax.numpy.where(amax == 0, 1, amax)  # zeros have no usable scale; they stay zeros
        context = copy_context()
        context.run(NAMES.set, tuple(dict.fromkeys((row.name, *group))))
        with naming(row.name, group):
            values = context.run(
                lambda: fake_quantize(
                    w, self.plan.recipe_of(row), axis=row.axis, tensor_amax=amax, pass_through=self._pass_through
                )
            )
        served = self.plan.served_dtype
        return values if served in (None, str(values.dtype)) else _rounded(values, served)


@explains_calls
def fake_quantize_model(
    params: Any,
    recipe: RecipeId | Recipe | None = None,
    *,
    format: str | None = None,
    parameters: Collection[str] = ("*",),
    exclude: Collection[str] = (),
    include: Collection[str] = (),
    pass_through: bool = True,
    config: Any = None,
    adapters: Literal["base"] = "base",
    served_dtype: ServedDtype | None = None,
    engine: str | None = None,
    scheme: str | None = None,
    route: str | None = None,
    inputs: Mapping[str, float] | None = None,
) -> ServedParams:
    """Return a function that maps a model's parameters to the values that the converted checkpoint would serve.

        served = fp4kit.jax.fake_quantize_model(params, "nvfp4-te")
        loss = lambda params, x: model.apply(served(params), x)

    The name of an array consists of the keys of its path in the pytree, joined by dots. An array is transformed if
    `fp4kit convert` quantizes the weight of this name and the rows of the array consist of whole blocks. These arrays
    are candidates:

    - `kernel` of shape (K, N), as in Flax. Its checkpoint name ends in `weight`, and blocks run along axis 0.
    - `weight` of shape (N, K), as in PyTorch and Equinox
    - stacks of experts: (E, N, K), or (E, K, N) if they are called `kernel`

    Layers that engines fuse (q, k and v; gate and up; w1 and w3) share one tensor amax, as in the converter.

    Tensors of adapters, such as `lora_a` and `lora_b`, stay unquantized, so the model trains for an FP4 base with its
    adapter in 16 bits. To train for a merged model, merge before the transformation: plan with the parameters without
    adapters, and call the result with `kernel + scale * lora_a @ lora_b` in the place of each `kernel`.

    Args:
        params: a pytree of arrays, or of jax.ShapeDtypeStruct. It is not changed.
        recipe: a recipe id or a Recipe.
        format: the checkpoint format (--format of `fp4kit convert`), such as "compressed-tensors" or "modelopt". Values
            are decoded as loaders of this format decode them. None uses the format that convert chooses for the recipe
            and the model.
        parameters: wildcards (fnmatch) of array names. Other arrays stay unquantized.
        exclude: wildcards of arrays that stay unquantized.
        include: wildcards of arrays to quantize that would stay unquantized by default.
        pass_through: True to use incoming gradients unchanged; False to set them to 0 where |w| > amax.
        config: the content of the model's config.json, from which the converter takes names and the model type; None if
            the model has no config.
        adapters: "base": tensors of adapters stay unquantized and apart. For merged adapters, see above.
        served_dtype: the dtype to which loaders decode the weights, such as "bfloat16". The decoded values are rounded
            once to this dtype, and kept in the dtype of the array. None for the dtype of the array.
        engine, scheme, route: the engine that will serve the model, such as "transformers" and "nvfp4-w4a4", as in
            fp4kit.serving. They determine recipe and served_dtype, which must be None, and what `inputs` of the result
            computes. If the engine loads several formats, such as vLLM, pass the `format` to which you will convert.
        inputs: with an engine that reads stored input scales: layer -> the largest magnitude of its inputs.

    Returns:
        A ServedParams. Call it with parameters; print it for a table.

    Warns:
        UserWarning: some layers of a fused layer are quantized, and others are not.

    Raises:
        TypeError, ValueError: as for fp4kit.torch.fake_quantize_model.

    Exact:
        The values are those of fp4kit.torch.fake_quantize_model, bit for bit. XLA may flush a subnormal amax to 0.

    Examples:
        >>> params = {"Dense_0": {"kernel": jax.numpy.ones((32, 8)), "bias": jax.numpy.ones(8)}}
        >>> served = fake_quantize_model(params, "nvfp4-te")
        >>> served.names, served(params)["Dense_0"]["kernel"].shape
        (['Dense_0.kernel'], (32, 8))
    """
    pass_through = as_flag(_OP, "pass_through", pass_through)
    if not is_one_of(adapters, ("base",)):
        text = f'{_OP}: adapters is {adapters!r:.60}; needs "base"'
        if is_one_of(adapters, ("merged",)):
            text += "; to train a merged model, call the result with kernel + scale * lora_a @ lora_b for each kernel"
        raise ValueError(text)
    leaves = [_leaf(path, array) for path, array in jax.tree_util.tree_flatten_with_path(params)[0]]
    wildcards = {"parameters": parameters, "exclude": exclude, "include": include}
    if any(one is not None for one in (engine, scheme, route, inputs)):
        given = {"recipe": recipe, "format": format, "served_dtype": served_dtype}
        choice = QatChoice.of_engine(_OP, engine_of(_OP, engine, scheme, route, inputs, given), config, **wildcards)
    elif recipe is None:
        raise TypeError(f"{_OP}: recipe is None; needs a recipe id, such as 'nvfp4-te', a Recipe, or an engine")
    else:
        choice = QatChoice.of(_OP, recipe, format, config, served_dtype, **wildcards)
    served = ServedParams(make_plan(choice, leaves), pass_through, choice.serving, inputs)
    jax.eval_shape(served, params)
    return served


def _leaf(path: Sequence[Any], array: Any) -> TrainedWeight:
    """Return the description of an array of a pytree: its names, shape, dtype and kind, and the axis of its blocks."""
    parts = [str(getattr(key, "key", getattr(key, "idx", getattr(key, "name", key)))) for key in path]
    if parts[1:] and parts[-1] == "value" and isinstance(path[-1], jax.tree_util.GetAttrKey):
        del parts[-1]  # a variable of Flax NNX
    name, leaf = ".".join(parts), parts[-1] if parts else ""
    if not hasattr(array, "shape") or not hasattr(array, "dtype"):
        raise TypeError(f"{_OP}: {name or 'params'} is {type(array).__name__}; needs a pytree of arrays")
    shape, dtype = tuple(array.shape), str(array.dtype)
    stack, kernel = len(shape) == 3 and "experts" in parts[:-1], leaf == "kernel"
    saved = ".".join(part for part in parts if part != "base_module")  # nnx.LoRA calls the layer inside it so
    parent, kind = saved.rpartition(".")[0], _KIND[stack]
    if kernel and (stack or len(shape) == 2):
        turned = (*shape[:-2], shape[-1], shape[-2])
        return TrainedWeight(name, parent if stack else f"{parent}.weight", turned, dtype, kind, -2)
    if leaf == "embedding" and len(shape) == 2:
        saved, kind = f"{parent}.weight", "embedding"
    return TrainedWeight(name, saved, shape, dtype, kind)


_KIND: dict[bool, Any] = {False: "matrix", True: "stack"}


@partial(jax.custom_jvp, nondiff_argnums=(1,))
def _rounded(x: Any, dtype: str) -> Any:
    """Round x to another dtype, and keep its own dtype. Gradients pass straight through."""
    return x.astype(dtype).astype(x.dtype)


@_rounded.defjvp
def _rounded_jvp(dtype: str, primals: tuple[Any], tangents: tuple[Any]) -> tuple[Any, Any]:
    return _rounded(primals[0], dtype), tangents[0]


def _largest(w: Any, stack: bool) -> Any:
    """Return the largest |w| as float32 (), or for a stack of experts the largest |w| per expert as (E,)."""
    size = jax.numpy.abs(jax.lax.stop_gradient(w))
    return jax.numpy.max(size, axis=(1, 2) if stack else None, initial=0).astype("float32")
