// Code that the quantize kernels share: their arguments, random bytes, and functions that encode and store a run. A run
// is kRun neighboring elements of one row that one thread handles together. R is the recipe, and In is the type of the
// elements of x. f is the factor of a block, by which its elements are multiplied or divided before rounding. t is the
// tensor scale. kAligned is true if all rows of x begin at multiples of 16 bytes, and also all rows of `values` if
// values are stored.
#pragma once

#include "fast_path_stochastic.cuh"
#include "hadamard.cuh"
#include "scale_layout.cuh"

// The arguments of the quantize kernels. fake_quantize uses them too, and stores values instead of codes and scales.
// "null" means that the pointer is nullptr in that case.
struct QuantizeArguments {
  const void* x;             // rows x columns elements, contiguous
  u8* packed;                // codes, in the order of the elements (null for fake_quantize)
  u8* scales;                // block scales in scale_layout; zeros before if swizzled (null without them)
  void* values;              // fake_quantize: elements of x's type (null otherwise)
  const float* tensor_amax;  // one, one per row or one per block, as tensor scales; written if the kernel computes it
                             // (null without tensor scale)
  float* tensor_scale;       // the decode scales; read if scales are given (null for fake_quantize, or without them)
  const float* block_amax;   // calibrated amaxes of all blocks (null: computed from x)
  const u8* random;          // a random byte per element, or a float32 for ComfyUI (null: generated from the seed)
  float* amax_out;           // receives a copy of tensor_amax (null: no copy)
  u64 seed;                  // the seed of stochastic rounding
  u64 counter;               // index of x's first group of 16 elements in the seed's stream
  i64 rows;                  // the rows of x; 1 if all elements are one row, without blocks and scales of rows
  i64 columns;               // elements per row
};

// Store the decode scale of t in a.tensor_scale[i]. If a.amax_out is not nullptr, also store in a.amax_out[i] the
// tensor amax from which t was computed. The calling thread stores both.
FP4KIT_DEVICE void store_tensor_scale(const QuantizeArguments& a, i64 i, TensorScale t) {
  a.tensor_scale[i] = t.decode;
  if (a.amax_out) a.amax_out[i] = amax_at(a.tensor_amax, i);
}

// Fill a table of factors in shared memory with the entries of all scale codes (table_entry). If kHasMultipliers, and
// the divisor of a code has no multiplier, fill it with factor_of_code instead, and return false: elements must be
// divided. All threads of the thread block must call this function.
template <class R, class In>
FP4KIT_DEVICE bool fill_table(Factor* table, TensorScale t) {
  const bool is_entry = threadIdx.x < kTableSize;
  Factor f = {};
  if (is_entry) table[threadIdx.x] = f = table_entry<R, In>(threadIdx.x, t);
  const bool is_missing = is_entry && is_nan(f.reciprocal) && f.value > 0x1p-90f && f.value < 0x1p90f;
  if (!kHasMultipliers<R, In> || !__syncthreads_or(is_missing)) {
    __syncthreads();
    return true;
  }
  if (is_entry) table[threadIdx.x] = factor_of_code<R, In>(threadIdx.x, t);
  __syncthreads();
  return false;
}

// Store the random byte, 0 to 255, of each of the kRun elements of a run in `bytes`: from a.random if it is given,
// otherwise generated from a.seed. The run begins at element `first` of the array, which must be a multiple of kRun.
template <class R, int kRun>
FP4KIT_DEVICE void random_bytes(const QuantizeArguments& a, i64 first, u32 (&bytes)[kRun]) {
  if (a.random) {
#pragma unroll
    for (int i = 0; i < kRun; ++i) bytes[i] = a.random[first + i];
    return;
  }
  constexpr int kWhole = kRun < 16 ? kRun : 16;
#pragma unroll
  for (int i = 0; i < kRun; i += kWhole) {
    const Words words = stream_words(a.seed, a.counter + static_cast<u64>(first + i) / 16);
    u32 w[4] = {words.w[0], words.w[1], words.w[2], words.w[3]};
    if constexpr (kRun < 16) {  // move the words at which the run begins to the front
      if (first & 8) w[0] = w[2], w[1] = w[3];
      if (kRun < 8 && first & 4) w[0] = w[1];
    }
#pragma unroll
    for (int j = 0; j < kWhole; ++j) bytes[i + j] = w[j / 4] >> (8 * (j % 4)) & 0xFFu;
  }
}

// Return the random bytes of elements first ... first + 15 of the array, four per word, the first one in the lowest
// bits: from a.random if it is given, otherwise generated from a.seed. `first` must be a multiple of 16.
FP4KIT_DEVICE Words random_words(const QuantizeArguments& a, i64 first) {
  if (!a.random) return stream_words(a.seed, a.counter + static_cast<u64>(first) / 16);
  Words words = {};
  if (reinterpret_cast<u64>(a.random) % 16 == 0) {
    const Chunk chunk = *reinterpret_cast<const Chunk*>(a.random + first);
#pragma unroll
    for (int i = 0; i < 4; ++i) words.w[i] = chunk.w[i];
  } else {
#pragma unroll
    for (int i = 0; i < 16; ++i) words.w[i / 4] |= static_cast<u32>(a.random[first + i]) << (8 * (i % 4));
  }
  return words;
}

// Return the random byte, 0 to 255, of element `index` of the array: from a.random if it is given, otherwise generated
// from a.seed. It equals the byte that random_bytes and random_words give for this element.
FP4KIT_DEVICE u32 random_byte(const QuantizeArguments& a, i64 index) {
  if (a.random) return a.random[index];
  const Words words = stream_words(a.seed, a.counter + static_cast<u64>(index) / 16);
  return words.w[index % 16 / 4] >> (8 * (index % 4)) & 0xFFu;
}

// Store a run that begins at element `first` of the array. `words` holds its packed codes. If R::kFake, decode them
// with the scale code of the block and the tensor scale t, and store the values in a.values. Otherwise, store the codes
// in a.packed.
template <class R, class In, int kRun, bool kAligned>
FP4KIT_DEVICE void store_packed(const QuantizeArguments& a, i64 first, const u32 (&words)[kCodeWords<R, kRun>],
                                u32 scale_code, TensorScale t) {
  if constexpr (R::kFake) {
    const auto scale = R::DecodeRule::template scale<R>(scale_code, t);
    float values[kRun];
#pragma unroll
    for (int i = 0; i < kRun; ++i) values[i] = exact_value<R>(code_in<R>(words, i), scale);
    store_run<In, kRun, kAligned>(static_cast<typename In::Bits*>(a.values) + first, values);
  } else {
    store_words(a.packed + first / (8 / R::Element::kStoredBits), words);
  }
}

// Encode a run of any elements, NaN and infinity included, by the exact path. Store its codes in a.packed or, if
// R::kFake, the decoded values in a.values. If R::kStochastic, this function loads or generates the random bytes of the
// run (random_bytes).
//   first          the index of the run's first element in the array
//   f              the factor of the block
//   scale_code, t  the scale code of the block and the tensor scale; read only if R::kFake
template <class R, class In, bool kAligned, int kRun>
FP4KIT_DEVICE void store_exact(const QuantizeArguments& a, i64 first, const float (&x)[kRun], Factor f, u32 scale_code,
                               TensorScale t) {
  u32 bytes[kRun] = {}, words[kCodeWords<R, kRun>];
  if constexpr (R::kStochastic) random_bytes<R>(a, first, bytes);
  exact_codes<R, In>(x, bytes, f, words);
  store_packed<R, In, kRun, kAligned>(a, first, words, scale_code, t);
}

// Encode a run of finite elements by the fast path, and store its codes in a.packed or, if R::kFake, the decoded values
// in a.values. takes_fast_path must have returned true for its block.
//   first          the index of the run's first element in the array
//   f              the factor of the block
//   scale_code, t  the scale code of the block and the tensor scale; read only if R::kFake
//   random         the random bytes of the run, four per word; read only if R::kStochastic
template <class R, class In, bool kAligned, int kRun>
FP4KIT_DEVICE void store_finite(const QuantizeArguments& a, i64 first, const Run<In, kRun>& run, Factor f,
                                u32 scale_code, TensorScale t, const Words& random) {
  if constexpr (R::kFake) {
    float values[kRun];
    round_finite<R, In>(run, f, R::DecodeRule::template scale<R>(scale_code, t), values);
    store_run<In, kRun, kAligned>(static_cast<typename In::Bits*>(a.values) + first, values);
  } else {
    u32 words[kRun * R::Element::kStoredBits / 32];
    if constexpr (R::kStochastic) {
      encode_finite_stochastic<R, In>(run, f, random.w, words);
    } else {
      encode_finite<R, In>(run, f, words);
    }
    store_words(a.packed + first * R::Element::kStoredBits / 8, words);
  }
}

// Encode a run of finite elements by the fast path, and store its codes in a.packed or, if R::kFake, the decoded values
// in a.values. takes_fast_path must have returned true for its block. This overload has no argument `random`: if
// R::kStochastic, it loads or generates the random bytes itself (random_words), and `first` must be a multiple of 16.
//   first          the index of the run's first element in the array
//   f              the factor of the block
//   scale_code, t  the scale code of the block and the tensor scale; read only if R::kFake
template <class R, class In, bool kAligned, int kRun>
FP4KIT_DEVICE void store_finite(const QuantizeArguments& a, i64 first, const Run<In, kRun>& run, Factor f,
                                u32 scale_code, TensorScale t) {
  Words random = {};
  if constexpr (R::kStochastic && !R::kFake) random = random_words(a, first);
  store_finite<R, In, kAligned>(a, first, run, f, scale_code, t, random);
}

// Quantize `count` elements at address x by the exact path, for recipes without block scales. Store their codes in
// a.packed or, if R::kFake, the decoded values in a.values. `first` is the index of the first element in the array. For
// 4-bit codes, `first` and `count` must be even. f is the factor of all elements, and t the tensor scale. Kernels call
// this function for runs that are not whole or whose codes are not aligned.
template <class R, class In>
FP4KIT_DEVICE void quantize_elements(const QuantizeArguments& a, i64 first, int count, const typename In::Bits* x,
                                     Factor f, TensorScale t) {
  const auto scale = R::DecodeRule::template scale<R>(0u, t);
  u32 low = 0u;
#pragma unroll 1
  for (int j = 0; j < count; ++j) {
    const u32 code = exact_code<R, In>(widen_exactly<R, In>(x[j]), f, R::kStochastic ? random_byte(a, first + j) : 0u);
    if constexpr (R::kFake) {
      static_cast<typename In::Bits*>(a.values)[first + j] = In::narrow(exact_value<R>(code, scale));
    } else if constexpr (R::Element::kStoredBits == 8) {
      a.packed[first + j] = static_cast<u8>(code);
    } else {
      if (j % 2) a.packed[(first + j) / 2] = static_cast<u8>(low | code << 4);
      low = code;
    }
  }
}

// Store the elements of a run one by one in the array `elements`, unchanged, and return the address of the array.
template <class In, int kRun>
FP4KIT_DEVICE const typename In::Bits* narrow_to(const Run<In, kRun>& run, typename In::Bits (&elements)[kRun]) {
#pragma unroll
  for (int i = 0; i < kRun; ++i) elements[i] = In::narrow(element(run, i));
  return elements;
}

// Quantize a whole run x for a recipe without block scales. Store its codes in a.packed or, if R::kFake, the decoded
// values in a.values. If R has a fast path and takes_fast_path returns true for the run, the fast path encodes it,
// otherwise the exact path. `first` is the index of the run's first element in the array, f the factor of its elements,
// and t the tensor scale.
template <class R, class In, bool kAligned, int kRun>
FP4KIT_DEVICE void quantize_run(const QuantizeArguments& a, i64 first, const Run<In, kRun>& x, Factor f,
                                TensorScale t) {
  if constexpr (FastPath<R, In>::kExists) {
    if (takes_fast_path<R, In>(largest_bits_of(x), f)) return store_finite<R, In, kAligned>(a, first, x, f, 0u, t);
  }
  float values[kRun];
  widen_run_exactly<R>(x, values);
  store_exact<R, In, kAligned>(a, first, values, f, 0u, t);
}
