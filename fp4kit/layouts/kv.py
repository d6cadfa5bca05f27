"""Describe the pages of NVFP4 KV caches, and write, read and convert them.

A KV cache stores a key and a value per token and head, which are vectors of head_dim elements. Each vector is stored as
head_dim/2 code bytes and head_dim/16 block scales, one per 16 elements. A page holds block_size tokens. Slot s is token
s % block_size of page s // block_size.

Notation: t is a token of a page, h a head, B the block size, H the number of heads, D the head dimension, S = D/16.

- order "nhd": the vector of (t, h) has index t * H + h in a page. Order "hnd": it has index h * B + t.
- container "vllm": a page is a contiguous range of bytes, [K codes | K scales | V codes | V scales]. Its array has the
  shape (pages, 2, B, H, D/2 + D/16) for nhd and (pages, 2, H, B, D/2 + D/16) for hnd. The last axis is only a size: the
  codes of all vectors of K come first, then the scales of all vectors of K.
- container "flashinfer": K codes, V codes, K scales and V scales are four arrays (pages, B, H, n) for nhd and
  (pages, H, B, n) for hnd, where n is D/2 or D/16. They may have any strides.
- swizzled: scale s of token t of V lies where a linear layout has scale s' = 4 (s % (S/4)) + t % 4 of token
  t' = 4 (t // 4) + s // (S/4). Each head of a page is rearranged by itself. The scales of K are always linear.

vLLM swizzles on GPUs before sm_120, for the attention kernels of TensorRT-LLM. FlashInfer's
nvfp4_quantize_paged_kv_cache swizzles too. vLLM on sm_120 and FlashInfer's append functions write linear scales.
Sources: vLLM 0cd789b csrc/libtorch_stable/nvfp4_kv_cache_kernels.cu; FlashInfer fb28d72 include/flashinfer/page.cuh.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any, Literal, NamedTuple, TypeAlias

import ml_dtypes
import numpy as np

from fp4kit.arguments import as_flag, as_index, is_one_of
from fp4kit.arrays.imports import check_unmasked, on_device, overlaps_itself, to_device, to_host
from fp4kit.formats import NVFP4
from fp4kit.layouts import check_array, check_bytes

KVLayoutName: TypeAlias = Literal[
    "vllm-nhd",
    "vllm-hnd",
    "vllm-nhd-swizzled",
    "vllm-hnd-swizzled",
    "flashinfer-nhd",
    "flashinfer-hnd",
    "flashinfer-nhd-swizzled",
    "flashinfer-hnd-swizzled",
]
"""The name of a KVLayout: container, order, and whether the scales of V are swizzled."""

_ARRAYS = {"vllm": ("pages",), "flashinfer": ("k_codes", "v_codes", "k_scales", "v_scales")}
_ORDERS = ("nhd", "hnd")
_GROUP = 4  # tokens whose V scales a swizzled layout interleaves
_BLOCK = NVFP4.block_size
_FLOAT8 = np.dtype(ml_dtypes.float8_e4m3fn)


class PageShape(NamedTuple):
    """The size of a KV cache, in any layout.

    Attributes:
        pages: the number of pages.
        block_size: the number of tokens per page.
        heads: the number of heads that have keys and values (KV heads).
        head_dim: the number of elements per key, and per value.
    """

    pages: int
    block_size: int
    heads: int
    head_dim: int


class KVParts(NamedTuple):
    """The bytes of quantized keys and values: codes (..., head_dim/2) and block scales (..., head_dim/16), all uint8.

    Attributes:
        k_codes: the codes of keys, two per byte, the even element in the low nibble.
        k_scales: the E4M3 bit patterns of the block scales of keys.
        v_codes: the codes of values.
        v_scales: the E4M3 bit patterns of the block scales of values, in linear order.
    """

    k_codes: Any
    k_scales: Any
    v_codes: Any
    v_scales: Any


@dataclass(frozen=True)
class KVLayout:
    """The order in which a KV cache stores codes and scales. The docstring of this module states the offsets.

    V are the values, as opposed to the keys.

    Attributes:
        container: "vllm" (one array of pages) or "flashinfer" (four arrays).
        order: "nhd" (the heads of a token are adjacent) or "hnd" (the tokens of a head are adjacent).
        swizzled: True if the block scales of the values V are swizzled; those of the keys never are.

    Raises:
        TypeError: swizzled is not a bool.
        ValueError: container or order is unknown.
    """

    container: Literal["vllm", "flashinfer"]
    order: Literal["nhd", "hnd"]
    swizzled: bool

    def __post_init__(self) -> None:
        for name, value, known in (("container", self.container, _ARRAYS), ("order", self.order, _ORDERS)):
            if not is_one_of(value, known):
                raise ValueError(f"KVLayout: {name} is {value!r:.60}; needs one of {', '.join(map(repr, known))}")
        object.__setattr__(self, "swizzled", as_flag("KVLayout", "swizzled", self.swizzled))

    @property
    def name(self) -> str:
        """The name of the layout, such as "vllm-hnd-swizzled", which is its key in KV_LAYOUTS."""
        return f"{self.container}-{self.order}" + "-swizzled" * self.swizzled

    def array_shapes(self, shape: PageShape) -> dict[str, tuple[int, ...]]:
        """Return {name of an array: its shape} for a cache of the given size, in the order that KVCache expects.

        Args:
            shape: the size of the cache, four positive ints.

        Returns:
            {"pages": shape}, or {"k_codes": shape, "v_codes": shape, "k_scales": shape, "v_scales": shape}.

        Raises:
            TypeError: an entry of shape is not an int.
            ValueError: an entry of shape is below 1, or the layout does not support the size. head_dim must be a
                multiple of 16, or of 64 if swizzled. block_size must be a multiple of 4 if swizzled.

        Examples:
            >>> from fp4kit.layouts import kv
            >>> kv.KV_LAYOUTS["vllm-hnd"].array_shapes(kv.PageShape(8, block_size=16, heads=2, head_dim=128))
            {'pages': (8, 2, 2, 16, 72)}
        """
        P, B, H, D = self._checked("KVLayout.array_shapes", PageShape(*shape))
        inner = (B, H) if self.order == "nhd" else (H, B)
        if self.container == "vllm":
            return {"pages": (P, 2, *inner, D // 2 + D // _BLOCK)}
        lengths = (D // 2, D // 2, D // _BLOCK, D // _BLOCK)
        return {name: (P, *inner, n) for name, n in zip(_ARRAYS["flashinfer"], lengths, strict=True)}

    def zeros(self, shape: PageShape) -> KVCache:
        """Return a KVCache of new NumPy arrays of zeros.

        Args:
            shape: the size of the cache.

        Returns:
            The KVCache.

        Raises:
            TypeError: an entry of shape is not an int.
            ValueError: the layout does not support the size; see array_shapes.

        Examples:
            >>> from fp4kit.layouts import kv
            >>> kv.KV_LAYOUTS["vllm-hnd"].zeros(kv.PageShape(8, block_size=16, heads=2, head_dim=128)).shape
            PageShape(pages=8, block_size=16, heads=2, head_dim=128)
        """
        return KVCache(self, tuple(np.zeros(each, np.uint8) for each in self.array_shapes(shape).values()))

    def _checked(self, op: str, shape: PageShape) -> PageShape:
        """Return shape with its entries as ints."""
        shape = PageShape(*(as_index(op, name, n) for name, n in zip(PageShape._fields, shape, strict=True)))
        for name, n in shape._asdict().items():
            if n < 1:
                raise ValueError(f"{op}: {name} is {n}; needs at least 1")
        multiple = _GROUP * _BLOCK if self.swizzled else _BLOCK
        if shape.head_dim % multiple:
            why = "whose V scales are interleaved in quarters" if self.swizzled else "with one scale per 16 elements"
            raise ValueError(f"{op}: head_dim is {shape.head_dim}; {self.name}, {why}, needs a multiple of {multiple}")
        if self.swizzled and shape.block_size % _GROUP:
            raise ValueError(
                f"{op}: block_size is {shape.block_size}; {self.name}, which interleaves the V scales of {_GROUP}"
                f" tokens, needs a multiple of {_GROUP}"
            )
        return shape


KV_LAYOUTS: dict[str, KVLayout] = {
    layout.name: layout
    for container in ("vllm", "flashinfer")
    for swizzled in (False, True)
    for order in ("nhd", "hnd")
    for layout in (KVLayout(container, order, swizzled),)
}


def as_layout(op: str, layout: KVLayoutName | KVLayout) -> KVLayout:
    """Return the argument `layout` of a public function, a KVLayout or the name of one, as a KVLayout."""
    if isinstance(layout, KVLayout):
        return layout
    if not is_one_of(layout, KV_LAYOUTS):
        raise ValueError(f"{op}: layout is {layout!r:.60}; needs one of {', '.join(KV_LAYOUTS)}")
    return KV_LAYOUTS[layout]


def v_scale_position(token: Any, scale: Any, scales: int) -> tuple[Any, Any]:
    """Return the position, (token, scale index) in a page, at which a swizzled layout stores a block scale of V.

        token' = 4 (token // 4) + scale // (scales / 4),   scale' = 4 (scale % (scales / 4)) + token % 4

    Args:
        token: the index of the token in its page: an int or an integer array.
        scale: the index of the block along head_dim: an int or an integer array.
        scales: the number of block scales per vector, head_dim/16, a multiple of 4.

    Returns:
        The pair (token', scale'), of ints or broadcast arrays.

    Raises:
        ValueError: scales is not a positive multiple of 4.

    Source:
        vLLM 0cd789b swizzle_scale_offset.

    Examples:
        >>> from fp4kit.layouts import kv
        >>> kv.v_scale_position(5, 3, 8)
        (5, 5)
    """
    if scales < 1 or scales % _GROUP:
        raise ValueError(f"v_scale_position: scales is {scales}; needs a positive multiple of {_GROUP}")
    quarter = scales // _GROUP
    return token // _GROUP * _GROUP + scale // quarter, scale % quarter * _GROUP + token % _GROUP


@dataclass(frozen=True, eq=False)
class KVCache:
    """A KV cache whose keys and values can be written and read by token slot. The arrays are not copied.

    Slot s is token s % block_size of page s // block_size.

    Attributes:
        layout: the KVLayout. Its name may be passed instead.
        arrays: a tuple of uint8 arrays of NumPy or CuPy, in the order of KVLayout.array_shapes. Scale arrays may be
            passed as float8_e4m3fn, and are then viewed as uint8. A single array may be passed without a tuple. Pass a
            PyTorch tensor on the CPU as tensor.numpy().

    Raises:
        TypeError: an array is not of NumPy or CuPy, or has an unsupported dtype.
        ValueError: the layout is unknown, the number or the shapes of arrays do not fit, or a page of a vllm container
            is not contiguous.

    Examples:
        >>> import numpy as np
        >>> from fp4kit.layouts import kv
        >>> pages = np.zeros((4, 2, 8, 16, 72), np.uint8)
        >>> cache = kv.KVCache("vllm-hnd", pages)
        >>> cache.shape
        PageShape(pages=4, block_size=16, heads=8, head_dim=128)
    """

    layout: KVLayout
    arrays: tuple[Any, ...] = field(repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "layout", as_layout("KVCache", self.layout))
        arrays = self.arrays if isinstance(self.arrays, (tuple, list)) else (self.arrays,)
        object.__setattr__(self, "arrays", _checked_arrays(self.layout, arrays))
        expected = tuple(self.layout.array_shapes(self.shape).values())
        for name, array, each in zip(_ARRAYS[self.layout.container], self.arrays, expected, strict=True):
            if array.shape != each:
                raise ValueError(f"KVCache: {name} has shape {array.shape}; {self.layout.name} needs {each}")

    @property
    def shape(self) -> PageShape:
        """The size of the cache, which follows from the shape of its first array."""
        lead, n = self.arrays[0].shape[:-1], self.arrays[0].shape[-1]
        B, H = lead[-2:] if self.layout.order == "nhd" else lead[:-3:-1]
        return PageShape(lead[0], B, H, n * _BLOCK // 9 if self.layout.container == "vllm" else n * 2)

    def views(self) -> KVParts:
        """Return views of the cache's arrays with the axes (page, token, head, byte), whether the order is nhd or
        hnd.
        """
        if self.layout.container == "vllm":
            parts = _regions(self.arrays[0], self.shape)
        else:
            k_codes, v_codes, k_scales, v_scales = self.arrays
            parts = (k_codes, k_scales, v_codes, v_scales)
        return KVParts(*(part if self.layout.order == "nhd" else part.swapaxes(1, 2) for part in parts))

    def write(self, slots: Any, parts: KVParts) -> None:
        """Store the codes and scales of keys and values at token slots, in place. Other slots do not change.

        Args:
            slots: integers (tokens,). A token with a negative slot is skipped, as in vLLM, whose padding has slot -1.
            parts: KVParts of uint8 arrays (tokens, heads, n), with n = head_dim/2 for codes and head_dim/16 for scales,
                in the library of the cache. v_scales are in linear order.

        Raises:
            TypeError: slots are not integers, or parts are not uint8 arrays in the library of the cache.
            ValueError: a slot is out of range or occurs twice, the shapes do not fit, the cache is read-only, or two of
                its bytes share memory.

        Examples:
            >>> import numpy as np
            >>> from fp4kit.layouts import kv
            >>> cache = kv.KV_LAYOUTS["flashinfer-nhd"].zeros(kv.PageShape(2, block_size=4, heads=1, head_dim=16))
            >>> codes, scales = np.full((2, 1, 8), 0x21, np.uint8), np.full((2, 1, 1), 0x38, np.uint8)
            >>> cache.write([5, -1], kv.KVParts(codes, scales, codes, scales))
            >>> cache.arrays[0][1, :, 0, :4].tolist()
            [[0, 0, 0, 0], [33, 33, 33, 33], [0, 0, 0, 0], [0, 0, 0, 0]]
        """
        op = "KVCache.write"
        if not all(array.flags.writeable for array in self.arrays if isinstance(array, np.ndarray)):
            raise ValueError(f"{op}: an array of the cache is read-only; needs arrays that can be written to")
        if any(overlaps_itself(a.shape, a.strides, a.dtype.itemsize) for a in self.arrays) or any(
            np.shares_memory(*pair) for pair in combinations(map(_on_host, self.arrays), 2)
        ):
            raise ValueError(f"{op}: two bytes of the cache share memory; needs arrays with memory of their own")
        given = check_slots(op, slots, self.shape, writes=True)
        self._check_parts(op, parts, len(given))
        kept = given >= 0
        where = self._indices(given[kept])
        kept = self._own(np.flatnonzero(kept))
        for i, (view, part) in enumerate(zip(self.views(), parts, strict=True)):
            view[where(i == 3)] = part[kept]

    def read(self, slots: Any = None) -> KVParts:
        """Return the codes and scales of keys and values at token slots: the inverse of write.

        Args:
            slots: integers (tokens,), none of them negative, in any order; a slot may occur more than once. None
                returns all slots in order.

        Returns:
            KVParts of new uint8 arrays (tokens, heads, n), with v_scales in linear order.

        Raises:
            TypeError: slots are not integers.
            ValueError: a slot is out of range or negative.

        Examples:
            >>> from fp4kit.layouts import kv
            >>> cache = kv.KV_LAYOUTS["vllm-hnd"].zeros(kv.PageShape(2, block_size=4, heads=3, head_dim=64))
            >>> cache.read([7, 0]).v_scales.shape
            (2, 3, 4)
        """
        if slots is None:
            slots = np.arange(self.shape.pages * self.shape.block_size)
        where = self._indices(check_slots("KVCache.read", slots, self.shape, writes=False))
        return KVParts(*(view[where(i == 3)] for i, view in enumerate(self.views())))

    def converted(self, layout: KVLayoutName | KVLayout, out: KVCache | None = None) -> KVCache:
        """Copy the cache to another layout. Codes and scales keep their values.

        Args:
            layout: the layout, or its name.
            out: a KVCache of this layout and of the size of the cache, whose arrays are overwritten. None allocates new
                arrays in the library of the cache.

        Returns:
            ``out`` if given, otherwise a new KVCache.

        Raises:
            TypeError: out is on another device than the cache.
            ValueError: the layout is unknown or does not support the size, or out has another layout or size, is
                read-only, or shares memory with the cache.

        Exact:
            Converting back gives the bytes of the cache.

        Examples:
            >>> from fp4kit.layouts import kv
            >>> cache = kv.KV_LAYOUTS["vllm-hnd"].zeros(kv.PageShape(2, block_size=4, heads=3, head_dim=64))
            >>> [array.shape for array in cache.converted("flashinfer-nhd-swizzled").arrays][1:3]
            [(2, 4, 3, 32), (2, 4, 3, 4)]
        """
        target = as_layout("KVCache.converted", layout)
        if out is None:
            shapes = target.array_shapes(self.shape).values()
            out = KVCache(target, tuple(np.empty_like(self.arrays[0], shape=each) for each in shapes))
        elif (out.layout, out.shape) != (target, self.shape):
            raise ValueError(
                f"KVCache.converted: out is {out.layout.name} {tuple(out.shape)}; needs {target.name}"
                f" {tuple(self.shape)} (pages, block_size, heads, head_dim)"
            )
        elif any(np.shares_memory(a, b) for a in map(_on_host, self.arrays) for b in map(_on_host, out.arrays)):
            raise ValueError("KVCache.converted: out shares memory with the cache; needs memory of its own")
        out.write(np.arange(self.shape.pages * self.shape.block_size), self.read())
        return out

    def _own(self, index: np.ndarray) -> Any:
        """Return a NumPy array of indices in the library of the cache."""
        # If the cache is on a GPU, the result is a copy as a CuPy array; otherwise it is `index` itself.
        return to_device(index) if on_device(self.arrays[0]) else index

    def _indices(self, slots: np.ndarray) -> Callable[[bool], tuple[Any, ...]]:
        """Return a function that gives the index for reading or writing the arrays of views() at the given slots."""
        page, token = self._own(slots // self.shape.block_size), self._own(slots % self.shape.block_size)
        head = self._own(np.arange(self.shape.heads))
        plain = (page[:, None], token[:, None], head[None])
        if not self.layout.swizzled:
            return lambda v_scales: plain
        count = self.shape.head_dim // _BLOCK
        token, scale = v_scale_position(token[:, None, None], self._own(np.arange(count)), count)
        swizzled = (page[:, None, None], token, head[None, :, None], scale)
        return lambda v_scales: swizzled if v_scales else plain

    def _check_parts(self, op: str, parts: KVParts, tokens: int) -> None:
        """Raise an error unless `parts`, the argument of write, fit this cache and this number of tokens."""
        _, _, heads, head_dim = self.shape
        for (name, part), n in zip(KVParts(*parts)._asdict().items(), (2, _BLOCK, 2, _BLOCK), strict=True):
            check_bytes(op, part, name)
            if on_device(part) != on_device(self.arrays[0]):
                raise TypeError(f"{op}: {name} are on another device than the cache; needs arrays on one device")
            if part.shape != (tokens, heads, head_dim // n):
                raise ValueError(
                    f"{op}: {name} have shape {part.shape}; needs {(tokens, heads, head_dim // n)}, one row per slot"
                    " and head"
                )


def _on_host(array: Any) -> Any:
    """Return a NumPy array unchanged."""
    return np.empty(0, np.uint8) if on_device(array) else array


def _checked_arrays(layout: KVLayout, arrays: Any) -> tuple[Any, ...]:
    """Return the arrays of a cache as a tuple of uint8 arrays."""
    # The caller must check all other lengths.
    names = _ARRAYS[layout.container]
    if len(arrays) != len(names):
        raise ValueError(f"KVCache: got {len(arrays)} arrays; {layout.name} needs {len(names)}: {', '.join(names)}")
    found = []
    for name, array in zip(names, arrays, strict=True):
        check_array("KVCache", name, array)
        is_scales = name.endswith("_scales") and array.dtype == _FLOAT8
        check_bytes("KVCache", array.view(np.uint8) if is_scales else array, name)
        if array.ndim != (5 if layout.container == "vllm" else 4):
            raise ValueError(f"KVCache: {name} has shape {array.shape}; {layout.name} needs {_axes(layout)}")
        found.append(array.view(np.uint8) if is_scales else array)
    if len({on_device(array) for array in found}) > 1:
        raise TypeError("KVCache: the arrays are on different devices; needs arrays on one device")
    if layout.container == "vllm":
        _check_pages(layout, found[0])
    return tuple(found)


def _axes(layout: KVLayout) -> str:
    """Return the axes of a layout's arrays as text for error messages."""
    inner = "block_size, heads" if layout.order == "nhd" else "heads, block_size"
    return f"(pages, 2, {inner}, 9 head_dim/16)" if layout.container == "vllm" else f"(pages, {inner}, n)"


def _check_pages(layout: KVLayout, pages: Any) -> None:
    """Raise ValueError unless `pages`, the array of a vllm container, has a valid last axis and contiguous halves."""
    # The length of the last axis is 9 head_dim/16, so it must be a multiple of 9.
    # In each page, the bytes of all keys must be contiguous, and so must the bytes of all values.
    *_, outer, n = pages.shape
    if n % 9:
        raise ValueError(
            f"KVCache: the last axis of pages has length {n}; needs head_dim/2 + head_dim/16, a multiple of 9, for"
            " a head_dim that is a multiple of 16"
        )
    contiguous = zip(pages.shape[2:], pages.strides[2:], (outer * n, n, 1), strict=True)
    if pages.size and any(length > 1 and stride != needed for length, stride, needed in contiguous):
        raise ValueError(
            f"KVCache: the bytes of a page are not adjacent (strides {pages.strides}); {layout.name} needs an array"
            f" {_axes(layout)} whose last three axes are contiguous"
        )


def _regions(pages: Any, shape: PageShape) -> tuple[Any, ...]:
    """Return a tuple of views of the four regions of vLLM's pages: K codes, K scales, V codes, V scales."""
    P, _, a, b, n = pages.shape
    flat = pages.reshape(P, 2, a * b * n)  # a view, because the last three axes are contiguous
    codes, scales = shape.head_dim // 2, shape.head_dim // _BLOCK
    end = a * b * codes
    return tuple(
        region
        for side in (0, 1)
        for region in (flat[:, side, :end].reshape(P, a, b, codes), flat[:, side, end:].reshape(P, a, b, scales))
    )


def check_slots(op: str, slots: Any, shape: PageShape, writes: bool) -> np.ndarray:
    """Return slots as an int64 NumPy array (tokens,)."""
    check_unmasked(slots, f"{op}: slots")
    array = np.asarray(to_host(slots) if hasattr(slots, "get") and hasattr(slots, "dtype") else slots)
    if array.size == 0 and array.ndim == 1:
        array = array.astype(np.int64)
    if array.dtype.kind not in "iu":
        raise TypeError(f"{op}: slots are {array.dtype}; needs integers")
    if array.ndim != 1:
        raise ValueError(f"{op}: slots have shape {array.shape}; needs (tokens,)")
    count = shape.pages * shape.block_size
    bad = (array >= count) | (array < 0 if not writes else False)
    if bad.any():
        raise ValueError(
            f"{op}: slot {array[bad][0]} is out of range; {shape.pages} pages of {shape.block_size} tokens have slots"
            f" 0 to {count - 1}" + ", and negative slots are skipped" * writes
        )
    array = array.astype(np.int64)
    if writes:
        once, counts = np.unique(array[array >= 0], return_counts=True)
        if (counts > 1).any():
            raise ValueError(f"{op}: slot {once[counts > 1][0]} occurs twice; needs a slot of its own for each token")
    return array
