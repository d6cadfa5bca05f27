// dequantize: decode codes and scales to values. A run is the neighboring elements whose decoded values fill 16 bytes.
// Each thread processes whole runs, so that a warp stores whole lines. R is the recipe, and Out is the type of the
// values. `a` holds the kernel's arguments: the arrays and their sizes. A Scale holds the numbers by which R's decode
// rule scales the values of a block's codes; they come from the block scale and the tensor scale. t is a tensor scale.
//
// A run never crosses the border of a block. Rows without blocks may have any length; the elements after the last whole
// run are decoded one at a time.
//
// The order of memory accesses limits the speed. Relative to a copy, decoding 16384 x 16384 mxfp8 to bfloat16 (H200,
// 2026-11-21) has these speeds:
//   0.945  with four runs per thread
//   0.969  with two runs per thread, adjacent within the warp
//   0.982  if codes and scales are also prefetched
#include "block.cuh"
#include "hif4.cuh"
#include "implied_amax.cuh"
#include "scale_layout.cuh"
#include "pack.cuh"

// The arguments of dequantize_kernel. "null" means that the pointer is nullptr in that case.
struct DequantizeArguments {
  const u8* packed;           // codes
  const u8* scales;           // block scales in scale_layout (null without them)
  void* values;               // rows x columns elements of the output type
  const float* tensor_scale;  // one per tensor, row or block (Recipe.tensor_scaling); null without tensor scale
  const float* tensor_amax;   // one amax per tensor scale, if known (null otherwise); needed if per row or block
  i64 rows, columns;          // of the values; 1 row of all values if scales are linear and none belongs to a row
  i64 ahead;                  // how many runs ahead codes are prefetched into the L2 cache
  i64 share;                  // neighboring runs per thread block: whole steps; more if the grid has too few blocks
};

// Either<kFirst, First, Second>::Type is First if kFirst, and otherwise Second.
template <bool kFirst, class First, class Second>
struct Either {
  using Type = First;
};
template <class First, class Second>
struct Either<false, First, Second> {
  using Type = Second;
};

// Compile-time constants for a recipe R and an output type Out: the elements and bytes of a run (16 bytes of values),
// the runs per thread and step, and which shortcuts apply. kFlat: the matrix is treated as one long row. kOneScale: the
// tensor has one tensor scale or none. kTable: each thread block makes a table of the Entries of all scale codes. An
// Entry is what decode_run needs of a block: the values of its codes 0 to 7 if kMagnitudes, and otherwise its Scale.
template <class R, class Out>
struct DequantizeTraits {
  static constexpr int kRun = 16 / sizeof(typename Out::Bits);
  static constexpr int kPerByte = 8 / R::Element::kStoredBits, kBytes = kRun / kPerByte;
  static constexpr bool kOneScale =
      R::kTensorScaling == TensorScaling::none || R::kTensorScaling == TensorScaling::tensor;
  static constexpr bool kFlat = R::kLayout == ScaleLayout::linear && kOneScale;
  static constexpr bool kMagnitudes = R::kHasScales && kOneScale && R::Element::kIsE2m1 && kRun == 8;
  static constexpr bool kTable = kMagnitudes || (R::kHasScales && R::Scale::kMantissaBits > 0 && kOneScale);
  using Entry = typename Either<kMagnitudes, E2m1Table, typename R::DecodeRule::Scale>::Type;
  // The number of runs per thread and step: two, or four if finding scales is a large part of the work. With four, each
  // table and each row number serves more runs.
  static constexpr int kUnroll = kTable && !kFlat && sizeof(typename Out::Bits) == 2 ? 4 : 2;
};

// The position of a run: its row, its block in the row, and its first column. If the scales of R do not depend on the
// row, the matrix is treated as one long row.
struct DequantizePosition {
  u32 row, block;
  i64 column;
};

// Return the Entry of the blocks with the Scale `scale`.
template <class R, class Out>
FP4KIT_DEVICE typename DequantizeTraits<R, Out>::Entry entry_of(typename R::DecodeRule::Scale scale) {
  if constexpr (DequantizeTraits<R, Out>::kMagnitudes) {
    float values[8];
#pragma unroll
    for (u32 i = 0; i < 8; ++i) values[i] = R::DecodeRule::apply(decode<DecodedElement<R>>(i), scale);
    return table_of(narrow_run<Out>(values));
  } else {
    return scale;
  }
}

// Return the values to which the codes of a run decode, each rounded to Out. `codes` holds the packed codes, with the
// first code in the lowest bits. `entry` is the Entry of the block that contains the run.
template <class R, class Out>
FP4KIT_DEVICE Run<Out, DequantizeTraits<R, Out>::kRun> decode_run(u64 codes,
                                                                  typename DequantizeTraits<R, Out>::Entry entry) {
  constexpr int kRun = DequantizeTraits<R, Out>::kRun;
  if constexpr (DequantizeTraits<R, Out>::kMagnitudes) {
    // Rules multiply magnitudes and signs alike, except that some drop the sign of -0.
    u32 word = static_cast<u32>(codes);
    if constexpr (R::DecodeRule::kDropsZeroSign) word = without_zero_signs<typename R::Element>(word);
    Run<Out, kRun> run;
    decode_pairs_e2m1<kRun>(word, entry, run.w);
    return run;
  } else {
    float values[kRun];
    decode_values<DecodedElement<R>>(codes, values);
#pragma unroll
    for (int i = 0; i < kRun; ++i) values[i] = R::DecodeRule::apply(values[i], entry);
    return narrow_run<Out>(values);
  }
}

// Return the code of the element with number `index` in the flattened matrix. It is one byte of a.packed, or half a
// byte if codes have 4 bits; an even index is in the low half.
template <class R, class Out>
FP4KIT_DEVICE u32 code_at(const DequantizeArguments& a, i64 index) {
  const u32 byte = a.packed[index / DequantizeTraits<R, Out>::kPerByte];
  return DequantizeTraits<R, Out>::kPerByte == 1 ? byte : byte >> (4 * (index % 2)) & 15u;
}

// Decode elements `first` ... `first` + `count` - 1 one at a time, all with the Scale `scale`, and store them in
// a.values, rounded to Out. The function is used where a whole run cannot be loaded or stored: for the last elements of
// a row, and for misaligned arrays.
template <class R, class Out>
FP4KIT_DEVICE void decode_end(const DequantizeArguments& a, i64 first, int count, typename R::DecodeRule::Scale scale) {
  for (int i = 0; i < count; ++i) {
    const u32 code = code_at<R, Out>(a, first + i);
    static_cast<typename Out::Bits*>(a.values)[first + i] =
        Out::narrow(R::DecodeRule::apply(decode<DecodedElement<R>>(code), scale));
  }
}

// Return kBytes bytes of codes (2, 4 or 8) at address `in` as one integer, with the first byte in the lowest bits. The
// address must be a multiple of kBytes.
template <int kBytes>
FP4KIT_DEVICE u64 load_bytes(const u8* in) {
  if constexpr (kBytes == 8) return load_streaming(reinterpret_cast<const u64*>(in));
  if constexpr (kBytes == 4) return load_streaming(reinterpret_cast<const u32*>(in));
  return load_streaming(reinterpret_cast<const u16*>(in));
}

// Prefetch the codes of the step that is a.ahead runs later into the L2 cache: those of kStep runs. If scales
// are in the linear layout and fill whole 16-byte chunks per step, prefetch them too. `start` is the number of the
// first run of the current step, and the matrix has `runs` runs. If the later step is the last one or is beyond the
// matrix, do nothing. One thread calls this function for its thread block.
template <class R, class Out, u32 kStep>
FP4KIT_DEVICE void fetch_ahead(const DequantizeArguments& a, u32 start, u32 runs) {
  using Traits = DequantizeTraits<R, Out>;
  const u32 next = start + static_cast<u32>(a.ahead);
  if (next + kStep >= runs) return;
  prefetch_l2<kStep * Traits::kBytes>(a.packed + static_cast<u64>(next) * Traits::kBytes);
  constexpr u32 kScales = kStep * Traits::kRun / R::kBlock;
  if constexpr (R::kHasScales && R::kLayout == ScaleLayout::linear && kScales % 16 == 0)
    prefetch_l2<kScales>(a.scales + next / (R::kBlock / Traits::kRun));
}

// Return the tensor scale of a tensor that has only one. If the tensor has none, all fields of the result are 1. If the
// decode rule needs the tensor's amax, and a.tensor_amax is null or does not give the stored scale, thread 0 finds an
// amax that does, for all threads (implied_tensor_scale). If there is no such amax, the field `amax` is kUnknownAmax.
// All threads of the thread block must call this function, and each gets the result.
template <class R, class Original>
FP4KIT_DEVICE TensorScale tensor_scale_of_all(const DequantizeArguments& a) {
  bool is_known;
  TensorScale t = known_tensor_scale<R, Original>(a.tensor_scale, a.tensor_amax, 0, is_known);
  if constexpr (R::DecodeRule::kNeedsAmax) {
    if (!is_known) {
      __shared__ TensorScale found;
      if (threadIdx.x == 0) found = implied_tensor_scale<R, Original>(t.decode);
      __syncthreads();
      t = found;
    }
  }
  return t;
}

// Return the tensor scale of block `block` of row `row`, for tensors with one scale per row or per block. A row has
// `blocks` blocks. If the decode rule needs amaxes, the result is computed from the amax that implied_amax_kernel
// stored in a.tensor_amax. If this amax is negative (kUnknownAmax), no amax gives the stored scale, and the caller must
// use decode_product_run. For other decode rules, `decode` is the stored scale, and the other fields are 1.
template <class R, class Original>
FP4KIT_DEVICE TensorScale tensor_scale_at(const DequantizeArguments& a, u32 row, u32 block, u32 blocks) {
  constexpr u32 kCount = R::kTensorColumns / R::kBlock;  // blocks per outer block
  const i64 index = R::kTensorScaling == TensorScaling::row
                        ? row
                        : static_cast<i64>(row) * ((blocks + kCount - 1) / kCount) + block / kCount;
  if constexpr (R::DecodeRule::kNeedsAmax) return R::TensorRule::template scale<R, Original>(a.tensor_amax[index]);
  return {1.0f, a.tensor_scale[index], 1.0f};
}

// Decode elements `first` ... `first` + `count` - 1 one at a time, and store them in a.values, rounded to Out. The
// function is used if the decode rule needs the amax of the tensor scale, but no amax gives this scale. A decoded value
// is then the value of the code times the product of the block scale and the tensor scale. scale_code is the code of
// the block scale, and `index` is the number of the tensor scale in a.tensor_scale.
template <class R, class Out>
FP4KIT_DEVICE void decode_product_run(const DequantizeArguments& a, i64 first, int count, u32 scale_code, i64 index) {
  const TensorScale t = {1.0f, a.tensor_scale[index], kUnknownAmax};
#pragma unroll 1
  for (int i = 0; i < count; ++i) {
    const float value = decode<DecodedElement<R>>(code_at<R, Out>(a, first + i));
    static_cast<typename Out::Bits*>(a.values)[first + i] = Out::narrow(stored_value<R>(value, scale_code, t));
  }
}

// Decode kUnroll whole runs, 32 runs apart from run number `run` on, of a matrix that is one long row, and store the
// values in a.values. Addresses must be aligned to whole runs. `entry(code)` returns the Entry of a scale code.
template <class R, class Out, class EntryOf>
FP4KIT_DEVICE void decode_whole_runs(const DequantizeArguments& a, u32 run, EntryOf entry) {
  using Traits = DequantizeTraits<R, Out>;
  constexpr u32 kPerBlock = R::kBlock / Traits::kRun;  // runs
  const u8* packed = a.packed + static_cast<u64>(run) * Traits::kBytes;
  const u8* scales = a.scales + run / kPerBlock;
  typename Out::Bits* values = static_cast<typename Out::Bits*>(a.values) + static_cast<u64>(run) * Traits::kRun;
  u64 codes[Traits::kUnroll];
  u32 scale_codes[Traits::kUnroll];
#pragma unroll
  for (int k = 0; k < Traits::kUnroll; ++k) {
    codes[k] = load_bytes<Traits::kBytes>(packed + 32 * k * Traits::kBytes);
    if constexpr (!R::kHasScales)
      scale_codes[k] = 0u;
    else if constexpr (32 % kPerBlock == 0)
      scale_codes[k] = scales[32 * k / kPerBlock];
    else
      scale_codes[k] = a.scales[(run + 32 * k) / kPerBlock];
  }
#pragma unroll
  for (int k = 0; k < Traits::kUnroll; ++k) {
    const Run<Out, Traits::kRun> y = decode_run<R, Out>(codes[k], entry(scale_codes[k]));
    store_streaming(values + 32 * k * Traits::kRun, y.w[0], y.w[1], y.w[2], y.w[3]);
  }
}

// Decode the part of the matrix that `grid` assigns to this thread block, and store the values in a.values, rounded to
// Out. Original is the type of the array that was quantized, because some tensor rules round to this type. All threads
// of the thread block must call this function.
template <class R, class Original, class Out>
FP4KIT_DEVICE void dequantize(const DequantizeArguments& a, Grid grid) {
  using Traits = DequantizeTraits<R, Out>;
  constexpr int kRun = Traits::kRun;
  __shared__ typename Traits::Entry table[Traits::kTable ? 256 : 1];
  const i64 columns = a.columns;
  const u32 row_runs = static_cast<u32>((static_cast<u64>(columns) + kRun - 1) / kRun),
            runs = Traits::kFlat ? row_runs : static_cast<u32>(a.rows) * row_runs;
  const u32 blocks = R::kHasBlocks ? static_cast<u32>(columns / R::kBlock) : 1u;
  const bool whole_stores =
      reinterpret_cast<u64>(a.values) % 16 == 0 && reinterpret_cast<u64>(a.packed) % Traits::kBytes == 0;
  const bool even = whole_stores && (R::kHasBlocks || columns % kRun == 0 || Traits::kFlat || a.rows == 1);
  TensorScale whole_scale = {};
  if constexpr (Traits::kOneScale) whole_scale = tensor_scale_of_all<R, Original>(a);
  if constexpr (Traits::kTable) {
    table[threadIdx.x] = entry_of<R, Out>(stored_scale<R>(threadIdx.x, whole_scale));
    __syncthreads();
  }
  const bool fetches = threadIdx.x == 0 && even && reinterpret_cast<u64>(a.packed) % 16 == 0 &&
                       reinterpret_cast<u64>(a.scales) % 16 == 0;
  constexpr u32 kStep = kThreads * Traits::kUnroll;
  const auto entry = [&](u32 code, TensorScale t) {
    if constexpr (Traits::kTable)
      return table[code];
    else
      return entry_of<R, Out>(R::DecodeRule::template scale<R>(code, t));
  };
  const u32 first_of_thread = threadIdx.x / 32 * (32 * Traits::kUnroll) + threadIdx.x % 32;
  u32 share = static_cast<u32>(a.share);
  const u32 grid_blocks = static_cast<u32>(grid.blocks);
  if (mul_wide(share, grid_blocks) < runs) share = (runs / (grid_blocks * kStep) + 1u) * kStep;
  u32 start = static_cast<u32>(grid.block) * share;
  const u32 end = minimum(start + share, runs);
  if constexpr (Traits::kFlat && (R::kHasBlocks || !R::kHasScales)) {
    if (even && (!R::DecodeRule::kNeedsAmax || Traits::kTable || whole_scale.amax >= 0.0f)) {
      const u32 whole_end = minimum(end, static_cast<u32>(static_cast<u64>(columns) / kRun));
      for (; start + kStep <= whole_end; start += kStep) {
        if (fetches) fetch_ahead<R, Out, kStep>(a, start, runs);
        decode_whole_runs<R, Out>(a, start + first_of_thread, [&](u32 code) { return entry(code, whole_scale); });
      }
    }
  }
  for (; start < end; start += kStep) {
    if (fetches) fetch_ahead<R, Out, kStep>(a, start, runs);
    const u32 first_run = start + first_of_thread;
    u64 codes[Traits::kUnroll];
    u32 scale_codes[Traits::kUnroll];
    DequantizePosition positions[Traits::kUnroll];
#pragma unroll
    for (int k = 0; k < Traits::kUnroll; ++k) {
      const u32 run = minimum(first_run + 32 * k, runs - 1);
      const u32 row = Traits::kFlat ? 0u : run / row_runs;
      const u32 block = R::kHasBlocks ? (run - row * row_runs) / (R::kBlock / kRun) : 0u;
      positions[k] = {row, block, static_cast<i64>(run - row * row_runs) * kRun};
      const i64 first = row * columns + positions[k].column;
      codes[k] = even && positions[k].column + kRun <= columns
                     ? load_bytes<Traits::kBytes>(a.packed + first / Traits::kPerByte)
                     : 0u;
      scale_codes[k] = R::kHasScales ? a.scales[scale_offset<R::kLayout>(row, block, blocks)] : 0u;
    }
#pragma unroll
    for (int k = 0; k < Traits::kUnroll; ++k) {
      if (first_run + 32 * k >= runs) break;
      const auto [row, block, column] = positions[k];
      TensorScale t = whole_scale;
      if constexpr (!Traits::kOneScale) t = tensor_scale_at<R, Original>(a, row, block, blocks);
      if (R::DecodeRule::kNeedsAmax && !Traits::kTable && t.amax < 0.0f) {
        const i64 index = Traits::kOneScale                         ? 0
                          : R::kTensorScaling == TensorScaling::row ? row
                                                                    : static_cast<i64>(row) * blocks + block;
        const int count = static_cast<int>(minimum<i64>(kRun, columns - column));
        decode_product_run<R, Out>(a, row * columns + column, count, scale_codes[k], index);
        continue;
      }
      const i64 first = row * columns + column;
      if (even && column + kRun <= columns) {
        const Run<Out, kRun> y = decode_run<R, Out>(codes[k], entry(scale_codes[k], t));
        store_streaming(static_cast<typename Out::Bits*>(a.values) + first, y.w[0], y.w[1], y.w[2], y.w[3]);
      } else {
        decode_end<R, Out>(a, first, static_cast<int>(minimum<i64>(kRun, columns - column)),
                           stored_scale<R>(scale_codes[k], t));
      }
    }
  }
}

// Store the values of kCount codes of the format F, an E1M<n>, in `values`. The first code is in the lowest bits of
// `codes`. Other functions decode single codes only by multiplying subnormal numbers.
template <class F, int kCount>
FP4KIT_DEVICE void decode_hif4_elements(u64 codes, float (&values)[kCount]) {
  if constexpr (F::kStoredBits == 4 && F::kMantissaBits == 2) {
    u32 pairs[kCount / 2];
    const E2m1Table bfloat16 = {{0x40008000u, 0xE0C0A080u}, {0x3F3F3E00u, 0x3F3F3F3Fu}};  // 0, 0.25 ... 1.75
    decode_pairs_e2m1<kCount>(static_cast<u32>(codes), bfloat16, pairs);
#pragma unroll
    for (int i = 0; i < kCount; ++i) values[i] = float_of(i % 2 ? pairs[i / 2] & 0xFFFF0000u : pairs[i / 2] << 16);
  } else {
    constexpr float kOne = static_cast<float>(0x800000 >> F::kMantissaBits);  // whose ulp is a step
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const u32 code = static_cast<u32>(codes >> (F::kStoredBits * i));
      const float magnitude = float_of(bits_of(kOne) | (code & (F::kSignBit - 1u))) - kOne;
      values[i] = code & F::kSignBit ? -magnitude : magnitude;
    }
  }
}

// Store in `values` the values of the codes of a run of HiF4 blocks. `scales` holds the scale bytes of its block, and
// `first` is the number of the run's first group in the block. A group is four elements, which share the inner bit.
template <class R, int kRun>
FP4KIT_DEVICE void decode_hif4_run(u64 codes, u32 scales, u32 first, float (&values)[kRun]) {
  using Element = typename R::Element;
  const u32 outer = scales >> 8 << first / 2u, inner = ((scales >> 8 & 0xFF00u) | scales >> 24) << first;
  const float scale = hif4_scale(scales & 0xFFu);
  decode_hif4_elements<Element>(codes, values);
#pragma unroll
  for (u32 i = 0; i < kRun; ++i) {
    const u32 bits = (outer >> (7u - i / kHif4Outer) & 1u) + (inner >> (15u - i / kHif4Inner) & 1u);
    values[i] *= scale * float_of((127u + bits) << 23);
  }
}

// Decode HiF4 blocks (rules/hif4.cuh) as dequantize does. All addresses are multiples of 16 bytes if kAligned.
template <class R, class Out, bool kAligned>
FP4KIT_DEVICE void dequantize_hif4(const DequantizeArguments& a, Grid grid) {
  using Traits = DequantizeTraits<R, Out>;
  constexpr int kRun = Traits::kRun, kBytes = Traits::kBytes, kUnroll = 2;
  constexpr u32 kLanes = kHif4Block / kRun, kStep = kThreads * kUnroll;
  const u32 runs = static_cast<u32>(a.rows * a.columns / kRun);
  for (u32 start = static_cast<u32>(grid.block) * kStep; start < runs; start += static_cast<u32>(grid.blocks) * kStep) {
    const u64 next = start + static_cast<u64>(a.ahead);
    if (kAligned && threadIdx.x == 0 && next + kStep < runs) {
      prefetch_l2<kStep * kBytes>(a.packed + next * kBytes);
      prefetch_l2<kStep / kLanes * kHif4ScaleBytes>(a.scales + next / kLanes * kHif4ScaleBytes);
    }
    u64 codes[kUnroll] = {};
    u32 scales[kUnroll] = {};
#pragma unroll
    for (int k = 0; k < kUnroll; ++k) {
      const u32 run = minimum(start + k * kThreads + threadIdx.x, runs - 1u);
      const u8 *packed = a.packed + static_cast<u64>(run) * kBytes, *bytes = a.scales + run / kLanes * 4ull;
      if constexpr (kAligned) {
        codes[k] = load_bytes<kBytes>(packed);
        scales[k] = *reinterpret_cast<const u32*>(bytes);
      } else {
        for (int i = 0; i < kBytes; ++i) codes[k] |= static_cast<u64>(packed[i]) << (8 * i);
        for (int i = 0; i < kHif4ScaleBytes; ++i) scales[k] |= static_cast<u32>(bytes[i]) << (8 * i);
      }
    }
#pragma unroll
    for (int k = 0; k < kUnroll; ++k) {
      const u32 run = start + k * kThreads + threadIdx.x;
      if (run >= runs) break;
      float values[kRun];
      decode_hif4_run<R>(codes[k], scales[k], run % kLanes * (kRun / kHif4Inner), values);
      store_run<Out, kRun, kAligned>(static_cast<typename Out::Bits*>(a.values) + static_cast<u64>(run) * kRun, values);
    }
  }
}

// Decode the part of the matrix that `grid` assigns to this thread block, by the function for the decode rule of R.
template <class R, class Original, class Out>
FP4KIT_DEVICE void dequantize_by_rule(const DequantizeArguments& a, Grid grid) {
  if constexpr (kDecodesHif4<typename R::DecodeRule>) {
    const u64 addresses =
        reinterpret_cast<u64>(a.values) | reinterpret_cast<u64>(a.packed) | reinterpret_cast<u64>(a.scales);
    addresses % 16 == 0 ? dequantize_hif4<R, Out, true>(a, grid) : dequantize_hif4<R, Out, false>(a, grid);
  } else {
    dequantize<R, Original, Out>(a, grid);
  }
}

// The number of thread blocks that a multiprocessor must hold; 0 means any number. Integer formats need a minimum.
// Without it, the compiler would give registers to their rare cases, and the usual case would be slower.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
constexpr int kIntegerBlocksPerMultiprocessor = 4;  // a multiprocessor of sm_75 holds at most 1024 threads
#else
constexpr int kIntegerBlocksPerMultiprocessor = 6;
#endif
template <class R>
constexpr int kBlocksPerMultiprocessor =
    R::DecodeRule::kNeedsAmax && !R::kHasScales ? kIntegerBlocksPerMultiprocessor : 0;

// Decode a.packed with the scales a.scales and a.tensor_scale, and store the values, rounded to Output, in a.values. If
// the decode rule of R needs amaxes, a.tensor_amax is used too. With one tensor scale per row or block, launch
// implied_amax_kernel before, which fills a.tensor_amax. With one per tensor, a.tensor_amax may be null. The kernel is
// launched for fp4kit.dequantize. A thread takes several runs per step. Launch with any number of thread blocks.
extern "C" __global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor<R>)
    dequantize_kernel(DequantizeArguments a) {
  dequantize_by_rule<R, Input, Output>(a, whole_grid());
}
