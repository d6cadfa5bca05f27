// quantize_stochastic: compute codes and block scales of E2M1 recipes that round stochastically by noise (noise.cuh),
// for blocks in a row (1 x kBlock). If R::kFake, it stores the values to which these codes decode instead. R is the
// recipe, In is the type of the elements of x, and kAligned is true if all rows of x begin at multiples of 16 bytes.
// `a` holds the kernel's arguments: the arrays, their sizes and the seed. t is a tensor scale: its encode and decode
// factors. A Factor is what the elements of a block are multiplied or divided by.
//
// A thread quantizes a whole block by the exact path, which is valid for all elements. Few callers round in this way,
// so the kernel is not tuned.
#include "amax.cuh"
#include "noise.cuh"
#include "quantize.cuh"

constexpr int kNoiseRun = 16;  // elements that a thread loads at a time

// Load kNoiseRun neighboring elements of a.x, starting at element `first`, and store them in x as float32. If
// R::kHadamard, they are transformed; a.x itself does not change.
template <class R, class In, bool kAligned>
FP4KIT_DEVICE void load_elements(const QuantizeArguments& a, i64 first, float (&x)[kNoiseRun]) {
  auto run = read_run<In, kNoiseRun, kAligned>(static_cast<const typename In::Bits*>(a.x) + first);
  if constexpr (R::kHadamard) hadamard_run<R::kSignMask>(run);
  widen_run(run, x);
}

// Return the code of element x in a block with the Factor f, rounded stochastically. `index` is the number of the
// element in the array. If R::kMslkNoise, the noise is generated from a.seed and `index`. Otherwise it is ComfyUI's
// rounding: the random number is read from a.random, an array of float32, and the code may be above 15 (see
// store_pair).
template <class R, class In>
FP4KIT_DEVICE u32 noisy_code(const QuantizeArguments& a, float x, i64 index, Factor f) {
  const float y = scaled_element<R, In>(x, f);
  if constexpr (R::kMslkNoise) {
    return mslk_code<R>(y, triton_word<7>(a.seed ^ 0x5A5A5A5Au, static_cast<u32>(a.counter * 16 + index)));
  } else {
    return comfyui_code<R, In>(y, reinterpret_cast<const float*>(a.random)[index]);
  }
}

// Store the codes `low` and `high` of two neighboring elements in one byte of a.packed. `index` is the number of the
// first element, which is even. As in ComfyUI, the bits of `high` above its lowest four are combined with `low` by a
// bitwise or, and those of `low` are dropped. If R::kFake, the values of the resulting codes are stored in a.values
// instead.
template <class R, class In>
FP4KIT_DEVICE void store_pair(const QuantizeArguments& a, i64 index, u32 low, u32 high,
                              typename R::DecodeRule::Scale scale) {
  low = (low | high >> 4) & 15u;
  high &= 15u;
  if constexpr (R::kFake) {
    typename In::Bits* values = static_cast<typename In::Bits*>(a.values) + index;
    values[0] = In::narrow(exact_value<R>(low, scale));
    values[1] = In::narrow(exact_value<R>(high, scale));
  } else {
    a.packed[index / 2] = static_cast<u8>(low | high << 4);
  }
}

// Store the scale code `code` of block `block` of row `row` in a.scales, if the recipe has block scales. If it has
// tensor scales, also store the tensor scale t in a.tensor_scale, but only for the first block of the tensor, row or
// block to which t belongs. A row has `blocks` blocks.
template <class R>
FP4KIT_DEVICE void store_block_scale(const QuantizeArguments& a, i64 row, i64 block, i64 blocks, u32 code,
                                     TensorScale t) {
  if constexpr (R::kHasScales) a.scales[scale_offset<R::kLayout, i64>(row, block, blocks)] = static_cast<u8>(code);
  if constexpr (R::kTensorScaling == TensorScaling::block) store_tensor_scale(a, row * blocks + block, t);
  if constexpr (R::kTensorScaling == TensorScaling::row) {
    if (block == 0) store_tensor_scale(a, row, t);
  }
  if constexpr (R::kTensorScaling == TensorScaling::tensor) {
    if (row == 0 && block == 0) store_tensor_scale(a, 0, t);
  }
}

// Quantize block number i of the matrix a.x, and store its codes and its scales (store_block_scale), or only its values
// if R::kFake. A row has `blocks` blocks. The amax of the block is read from a.block_amax if that is given, and
// otherwise computed.
template <class R, class In, bool kAligned>
FP4KIT_DEVICE void quantize_block(const QuantizeArguments& a, i64 i, i64 blocks) {
  const i64 row = i / blocks, block = i % blocks, first = i * R::kBlock;
  const TensorScale t = tensor_scale_of<R, In>(a.tensor_amax, row, block, blocks);
  float x[kNoiseRun];
  float amax = a.block_amax ? amax_at(a.block_amax, i)
                            : exact_amax<R, kNoiseRun>(1, [&](int, int j, float (&elements)[kNoiseRun]) {
                                load_elements<R, In, kAligned>(a, first + j, elements);
                              });
  if constexpr (R::kMslkNoise)
    amax = mslk_amax(amax, triton_word<7>(a.seed, static_cast<u32>((a.counter * 16 + first) / R::kBlock)));
  const u32 code = R::BlockRule::template code<R, In>(amax, t);
  const Factor f = factor_of<R, In>(code, amax, t);
  const auto scale = R::DecodeRule::template scale<R>(code, t);
#pragma unroll 1
  for (int j = 0; j < R::kBlock; j += kNoiseRun) {
    load_elements<R, In, kAligned>(a, first + j, x);
#pragma unroll
    for (int k = 0; k < kNoiseRun; k += 2) {
      const i64 index = first + j + k;
      const u32 low = noisy_code<R, In>(a, x[k], index, f), high = noisy_code<R, In>(a, x[k + 1], index + 1, f);
      store_pair<R, In>(a, index, low, high, scale);
    }
  }
  if constexpr (!R::kFake) store_block_scale<R>(a, row, block, blocks, code, t);
}

// Quantize a.x, and store its codes in a.packed, its block scales in a.scales and its tensor scales in a.tensor_scale;
// or store only its values in a.values if R::kFake. The kernel is launched for the recipes of NOISE_STOCHASTICS
// (recipes/rules.py). A thread processes one block at a time.
//
// If R::kFinders is 0, a.tensor_amax is an input, and any number of thread blocks may be launched. Otherwise launch a
// multiple of R::kFinders thread blocks, which first find the tensor's amax and store it at a.tensor_amax (amax.cuh).
extern "C" __global__ void FP4KIT_CLUSTER __launch_bounds__(kThreads) quantize_stochastic_kernel(QuantizeArguments a) {
  find_amax<R, Input, kAligned>(a);
  const Grid grid = whole_grid();
  const i64 blocks = a.columns / R::kBlock;
  for (i64 i = first_item(grid); i < a.rows * blocks; i += item_stride(grid))
    quantize_block<R, Input, kAligned>(a, i, blocks);
}
