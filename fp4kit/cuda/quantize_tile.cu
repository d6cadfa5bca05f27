// quantize where a decision spans threads: blocks of kBlockRows rows (16x16, 32x32), and 4over6 on any block.
//
// A thread block covers kBlockRows rows and kColumns blocks; a thread takes one row of one block (R::kBlock elements). amaxes and
// errors meet in shared memory.
#include "quantize.cuh"

constexpr int kTileThreads = 256;

template <class R>
struct Tile {
  static constexpr int kRows = R::kBlockRows, kColumns = kTileThreads / R::kBlockRows;
  float values[2][kRows][kColumns];
};

// Larger over the rows of a block; every thread gets the result.
template <class R>
FP4KIT_DEVICE float amax_of_rows(Tile<R>& tile, float amax, int row, int column) {
  if constexpr (R::kBlockRows == 1) return amax;
  tile.values[0][row][column] = amax;
  __syncthreads();
  constexpr AmaxNan kNan = R::kAmaxNan == AmaxNan::propagate ? AmaxNan::propagate : AmaxNan::ignore;
  float result = 0.0f;
  for (int r = 0; r < R::kBlockRows; ++r) result = larger<kNan>(result, tile.values[0][r][column]);
  __syncthreads();
  return result;
}

// Sum over the rows of a block as a tree: row i with i + 8, then + 4, + 2, + 1; every thread gets both sums.
template <class R>
FP4KIT_DEVICE void sum_rows(Tile<R>& tile, float (&error)[2], int row, int column) {
  if constexpr (R::kBlockRows > 1) {
    tile.values[0][row][column] = error[0];
    tile.values[1][row][column] = error[1];
    __syncthreads();
    for (int half = R::kBlockRows / 2; half > 0; half /= 2) {
      if (row < half) {
        for (int k = 0; k < 2; ++k) tile.values[k][row][column] = tile.values[k][row][column] + tile.values[k][row + half][column];
      }
      __syncthreads();
    }
    for (int k = 0; k < 2; ++k) error[k] = tile.values[k][0][column];
    __syncthreads();
  }
}

template <class R>
FP4KIT_DEVICE float multiply(float a, float b) { return R::kFlush ? mul_ftz(a, b) : a * b; }
template <class R>
FP4KIT_DEVICE float divide(float a, float b) { return R::kFlush ? div_ftz(a, b) : a / b; }

// Codes of a block with scale E4M3(base), and the sum of errors in the order of the elements. See reference/four_over_six.py.
template <class R, class In>
FP4KIT_DEVICE float candidate(const float (&x)[R::kBlock], float base, TensorScale t, u32& scale, u32 (&codes)[R::kBlock]) {
  scale = encode_scale<R>(base);
  const float scale_value = decode_scale<R>(scale);
  const float inverse = divide<R>(1.0f, multiply<R>(scale_value, t.decode));
  const float factor = is_nan(inverse) ? inverse : fminf(inverse, kFltMax);
  float error = 0.0f;
#pragma unroll
  for (int i = 0; i < R::kBlock; ++i) {
    codes[i] = encode_element<R>(multiply<R>(x[i], factor));
    const float scaled = decode<typename R::Element>(codes[i]) * scale_value;
    float difference;
    if constexpr (R::kFastError) {
      difference = widen_f16(narrow_f16(scaled)) - x[i] * t.encode;
    } else if constexpr (R::kFlush) {
      difference = flush(mul_ftz(scaled, t.decode) - x[i]);
    } else {
      difference = scaled * t.amax / full_range<R>() - x[i];
    }
    const float term = R::kSquaredError ? difference * difference : magnitude_of(difference);
    error = i == 0 ? term : error + term;
  }
  return error;
}

template <class R, class In>
FP4KIT_DEVICE void four_over_six(const float (&x)[R::kBlock], float amax, TensorScale t, Tile<R>& tile, int row, int column,
                                 u32& scale, u32 (&codes)[R::kBlock]) {
  const float base = multiply<R>(divide<R>(amax, max_of<typename R::Element>()), t.encode);
  u32 other[R::kBlock], other_scale;
  float error[2];
  error[0] = candidate<R, In>(x, base, t, scale, codes);
  error[1] = candidate<R, In>(x, multiply<R>(base, 1.5f), t, other_scale, other);
  sum_rows<R>(tile, error, row, column);
  const bool four = error[1] < error[0];
  const bool zero = R::kFlush && magnitude_of(amax) < kFltMin;  // FlashInfer leaves a zero block early
  scale = four ? other_scale : scale;
#pragma unroll
  for (int i = 0; i < R::kBlock; ++i) codes[i] = zero ? 0u : four ? other[i] : codes[i];
}

template <class R, class In, bool kAligned>
FP4KIT_DEVICE void quantize_tile(const Arguments& a, Grid grid) {
  __shared__ Tile<R> tile;
  constexpr int kColumns = Tile<R>::kColumns;
  const int column = threadIdx.x % kColumns, tile_row = threadIdx.x / kColumns;
  const i64 blocks = a.columns / R::kBlock, wide = (blocks + kColumns - 1) / kColumns;
  const i64 tall = (a.rows + R::kBlockRows - 1) / R::kBlockRows;
  for (i64 t_index = grid.block; t_index < tall * wide; t_index += grid.blocks) {
    const i64 row = t_index / wide * R::kBlockRows + tile_row, block = t_index % wide * kColumns + column;
    const bool inside = row < a.rows && block < blocks;
    const TensorScale t = tensor_scale_of<R, In>(a.tensor_amax, inside ? row : 0, inside ? block : 0, blocks);
    const i64 first = row * a.columns + block * R::kBlock;
    float x[R::kBlock] = {};
    if (inside) load_elements<R, In, R::kBlock, kAligned>(a, first, x);
    float amax = amax_of_rows<R>(tile, amax_of<R::kAmaxNan>(x), tile_row, column);
    u32 codes[R::kBlock], scale;
    if constexpr (R::kFourOverSix) four_over_six<R, In>(x, amax, t, tile, tile_row, column, scale, codes);
    if (!inside) continue;
    if constexpr (!R::kFourOverSix) {
      scale = R::BlockRule::template code<R, In>(amax, t);
      encode_run<R, In>(a, first, x, R::BlockRule::template factor<R, In>(scale, t), codes);
    }
    write_run<R, In, R::kBlock, kAligned>(a, first, codes, scale, t);
    if constexpr (!R::kFake) a.scales[scale_offset<R::kLayout>(row, block, blocks)] = scale;
    const bool owner = block == 0 && (R::kTensorScaling == TensorScaling::row || row == 0);
    if (R::kTensorScaling != TensorScaling::none && a.tensor_scale && owner)
      a.tensor_scale[R::kTensorScaling == TensorScaling::row ? row : 0] = t.decode;
  }
}

extern "C" __global__ void __launch_bounds__(kTileThreads) quantize_tile_kernel(Arguments a) {
  quantize_tile<R, Input, kAligned>(a, whole_grid());
}
