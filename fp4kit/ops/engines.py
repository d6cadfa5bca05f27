"""Choose the engine for a call, and cache calls, so that a repeated call skips the checks.

CuPy arrays are for the CUDA engine, NumPy arrays for one of two host engines: the compiled one (fp4kit.cpu) and the
specification in NumPy (fp4kit.host). An engine that does not support a call raises Declined; the next one is tried.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, nullcontext
from functools import wraps
from sys import modules
from typing import Any, ParamSpec, TypeVar

import numpy as np

from fp4kit.arguments import check_call
from fp4kit.arithmetic import default_environment, is_ieee
from fp4kit.arrays import imports, returns
from fp4kit.call.parse import Call, Declined, each
from fp4kit.cpu import cached_calls as cpu_cached
from fp4kit.cpu import engine as cpu
from fp4kit.cpu.library import library, limited_threads, specification_only
from fp4kit.host import engine as reference
from fp4kit.quantized.container import Quantized
from fp4kit.recipes import Recipe

P = ParamSpec("P")
T = TypeVar("T")

MAX_CALLS = 256  # the largest number of entries; adding another one first clears the cache
Key = tuple[Hashable, ...]
_UNKNOWN: Any = object()
# The cached call of each key. None records that the engine cannot make one, so that it does not try again.
_CALLS: dict[Key, Callable[..., Any] | None] = {}


def find(op: str, arrays: tuple[Any, ...], *others: Hashable) -> tuple[Key | None, Callable[..., Any] | None]:
    """Look up a call of op."""
    x = arrays[0]
    kind = type(x)
    try:
        facts_of, on_host = _facts_function(x.packed if kind is Quantized else x)
        if on_host and specification_only.get():
            return None, None
        current_device = None if on_host else imports.cupy().cuda.runtime.getDevice()
        facts = [None if a is None else _facts(a, facts_of) if type(a) is Quantized else facts_of(a) for a in arrays]
        key = (op, current_device, others, *facts, *map(type, others))
        cached = _CALLS.get(key, _UNKNOWN)
        return (key, None) if cached is _UNKNOWN else (key if cached else None, cached)
    except (AttributeError, TypeError, RuntimeError):
        return None, None  # an array of another library, an array without memory, or an argument that is not hashable


def facts_of(arrays: tuple[Any, ...]) -> Hashable:
    """Return the facts of arrays, or None entries, that are part of a key; None if the arrays have no key."""
    try:
        of, _ = _facts_function(arrays[0])
        return tuple(None if a is None else of(a) for a in arrays)
    except (AttributeError, TypeError, RuntimeError):
        return None


def run_first(
    key: Key | None, call: Callable[..., Any] | None, arguments: tuple[Any, ...], driver: Callable[[], Any]
) -> Any:
    """Compute the first call with a key, store its cached call for later calls, and return the result."""
    result = None if call is None else call(*arguments)
    if result is None:
        result = driver()
    if key is not None:
        if len(_CALLS) >= MAX_CALLS:
            _CALLS.clear()
        _CALLS[key] = call
    return result


def _facts(q: Quantized, facts_of: Callable[[Any], Hashable]) -> Hashable:
    """Return the facts of a Quantized that are part of a key."""
    scales, tensor_scale, amax = q.block_scale, q.tensor_scale, q.tensor_amax
    parts = facts_of(q.packed), scales is None or facts_of(scales), tensor_scale is None or facts_of(tensor_scale)
    return q.shape, q.dtype, q.axis, q.recipe, q.scale_layout, parts, amax is None or facts_of(amax)


def _facts_function(a: Any) -> tuple[Callable[[Any], Hashable], bool]:
    """Return the pair (function, is_host) for the library of the array `a`."""
    kind = type(a)
    if kind is np.ndarray:
        return _numpy_facts, True
    if kind.__module__ == "cupy":
        return _cupy_facts, False
    if a is None:
        raise TypeError(kind)
    if getattr(a, "is_cuda", False):
        return returns.torch_facts(), False
    return (_torch_host_facts if getattr(a, "is_cpu", False) else returns.jax_facts), True


def _torch_host_facts(a: Any) -> Hashable:
    """Return the facts of a PyTorch tensor in host memory."""
    kind = type(a)
    return kind.__name__ if kind is float or kind is np.float32 else returns.torch_facts(True)(a)


def _cupy_facts(a: Any) -> Hashable:
    """Return the facts of a CuPy array: type, shape, dtype, strides, alignment to 16 bytes, and device."""
    kind = type(a)
    if kind.__module__ != "cupy":
        raise TypeError(kind)
    memory = a.data
    return kind, a.shape, a.dtype, a.strides, memory.ptr % 16, memory.device_id


def _numpy_facts(a: Any) -> Hashable:
    """Return the facts of a NumPy array."""
    if type(a) in (float, np.float32):  # an amax, whose value neither the checks nor the cached call depend on
        return type(a).__name__
    if type(a) is not np.ndarray:
        raise TypeError(type(a))
    return np.ndarray, a.shape, a.dtype, a.strides, a.flags.num  # flags: alignment and writability


def _cuda() -> Any:
    """Return the module fp4kit.cuda.engine, imported at its first use, so that importing fp4kit takes less time."""
    from fp4kit.cuda import engine

    return engine


def new_cached_call(key: Key | None, operation: str, on_device: bool, *arguments: Any) -> Callable[..., Any] | None:
    """Return a cached call, which repeats an operation on arrays of equal shapes and dtypes without parsing them.

    Return None if key is None, or if the engine cannot make one.
    """
    if key is None:
        return None
    engine: Any = cpu_cached
    if on_device:
        from fp4kit.cuda import cached_calls as engine
    try:
        call: Callable[..., Any] | None = getattr(engine, operation)(*arguments)
        return call
    except Declined:
        return None


def convert_and_call(function: Callable[..., T], x: Any, *args: Any, **kwargs: Any) -> T:
    """Return function(x, *args, **kwargs), where `function` is decorated by returns_in_library."""
    kind = type(getattr(x, "packed", x))
    is_native = kind is np.ndarray or kind.__module__ == "cupy"
    called: Callable[..., T] = getattr(function, "__wrapped__", function) if is_native else function
    return called(x, *args, **kwargs)


def with_threads(function: Callable[P, T]) -> Callable[P, T]:
    """Decorate a public function so that its keyword argument `threads` limits the CPU threads of the call."""

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        if "torch._dynamo" in modules and imports.is_traced():
            return imports.untraced(call, *args, **kwargs)
        count: Any = kwargs.get("threads")
        try:
            if count is None:
                return function(*args, **kwargs)
            with limited_threads(function.__name__, count):
                return function(*args, **kwargs)
        except TypeError:
            check_call(function, args, kwargs)
            raise

    return call


class Engine(str):
    """The name of an engine, a str such as "cpu-avx2", with the reason why no faster engine is used.

    The reason is the attribute `why`. It is "" if this is the fastest engine for the processor.
    """

    why: str

    def __new__(cls, name: str, why: str = "") -> Engine:
        self = super().__new__(cls, name)
        self.why = why
        return self

    def __repr__(self) -> str:
        return f"{str(self)!r} ({self.why})" if self.why else repr(str(self))


def engine() -> Engine:
    """Return the name of the engine that computes on NumPy arrays in the current thread or task.

    Use it to find out why calls are slow. All engines give equal bytes. A call that the compiled engine does not
    support is computed by the specification, whatever this function returns.

    Returns:
        An Engine, which is a str. "cpu-avx512", "cpu-avx2" and "cpu-base" are the compiled engine, by the processor
        level that it was compiled for. "reference" is the specification in NumPy. If a faster engine could run on this
        processor, the attribute `why` says why it is not used; otherwise `why` is "".

    Examples:
        >>> import fp4kit
        >>> fp4kit.engine().partition("-")[0] in ("cpu", "reference")
        True
        >>> with fp4kit.specification():
        ...     fp4kit.engine()
        'reference' (within fp4kit.specification())
    """
    if specification_only.get():
        return Engine("reference", "within fp4kit.specification()")
    compiled = library()
    if compiled.functions is None:
        return Engine("reference", compiled.level)
    return Engine(f"cpu-{compiled.level}", compiled.why)


@contextmanager
def specification() -> Iterator[None]:
    """Make a with block compute on NumPy arrays by the specification alone, not by the compiled engine.

    Use it to check the compiled engine, whose results are bit-identical. The block affects only the current thread or
    task. Arrays on a GPU are not affected.

    Examples:
        >>> import fp4kit, numpy as np
        >>> x = np.ones((4, 32), np.float32)
        >>> with fp4kit.specification():
        ...     slow = fp4kit.quantize(x, "mxfp4")
        >>> slow.equals(fp4kit.quantize(x, "mxfp4"))
        True
    """
    token = specification_only.set(True)
    try:
        yield
    finally:
        specification_only.reset(token)


def run(op: str, operation: str, on_device: bool, *arguments: Any) -> Any:
    """Return the result of an operation from the first engine that supports the call."""
    reason = ""
    on_cpu = (reference,) if specification_only.get() or not hasattr(cpu, operation) else (cpu, reference)
    engines = (_cuda(),) if on_device else on_cpu
    with nullcontext() if on_device or is_ieee() else default_environment(op):
        for engine in engines:
            try:
                return getattr(engine, operation)(*arguments)
            except Declined as declined:
                # Keep only the text: the error and this frame would refer to each other, and keep the arrays alive
                # until the next garbage collection.
                reason = str(declined)
    raise NotImplementedError(f"{op}: {reason}")


def run_group(op: str, operation: str, calls: list[tuple[bool, tuple[Any, ...]]]) -> list[Any]:
    """Return the results of an operation on N arrays, one per array."""
    if calls and calls[0][0]:
        try:
            results: list[Any] = getattr(_cuda(), f"{operation}_group")([arguments for _, arguments in calls])
            return results
        except Declined:
            pass
    return each(op, lambda call: run(op, operation, call[0], *call[1]), calls)


def new_group(op: str, calls: list[Call], r: Recipe, stack: Any) -> Any:
    """Return the object that runs N parsed calls: a CudaGroup on a GPU, or a HostGroup in host memory."""
    if calls and calls[0].on_device:
        return _cuda().CudaGroup(calls, stack)
    return reference.HostGroup(op, calls, r, run, cpu_cached.together)


def new_clip_group(calls: list[Call], amaxes: list[Any]) -> Any:
    """Return the object that clips N gradients: a CudaClipGroup on a GPU, or a HostClipGroup in host memory."""
    if calls and calls[0].on_device:
        return _cuda().CudaClipGroup(calls, amaxes)
    return reference.HostClipGroup(calls, amaxes, run)


def check_master_weights(values: list[Any], shapes: list[tuple[int, int]], r: Recipe) -> bool:
    """Return True if the shards of cast_master_weights are in host memory, and False if they are on a GPU."""
    if not values or not imports.on_device(values[0]):
        return True
    _cuda().DeviceStages.check(values, shapes, r)
    return False


def new_master_weights(values: list[Any], *facts: Any, in_place: bool) -> Any:
    """Return the object whose methods compute the steps of cast_master_weights for the shards `values`."""
    # The first shard decides, so `values` must not be empty.
    make: Any = reference.HostStages
    if imports.on_device(values[0]):
        return _cuda().DeviceStages(values, *facts, in_place)
    return make(values, *facts, run=run)


def run_call(call: Call, operation: str, key: Key | None, arguments: tuple[Any, ...]) -> Any:
    """Return the result of a parsed call of quantize or fake_quantize, and cache the call under `key`.

    arguments: x, tensor_amax and for quantize out, as the caller passed them.
    """
    x, amax, *_ = arguments
    cached = new_cached_call(key, operation, call.on_device, call, x, amax)
    if cached is None and key is not None and type(x) is np.ndarray and call.tensor_amax is None:
        # Repeat the call on another array of this shape without parsing, by an engine's usual function.
        template = call._replace(x=None, moved=None, out=None)

        def cached(x: Any, amax: Any, out: Any = None) -> Any:
            return run(call.op, operation, False, template.with_array(x, out))

    return run_first(key, cached, arguments, lambda: run(call.op, operation, call.on_device, call))
