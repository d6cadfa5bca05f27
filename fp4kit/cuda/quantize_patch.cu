// quantize a matrix along its columns, or both ways from one read; and blocks of several rows (16x16, 32x32) any way.
//
// A thread takes a patch of 8 rows of 32 bytes and keeps it in registers; the threads of a warp lie so that a block's patches are
// in one warp, which finds amaxes by shuffles. Codes along columns are gathered in shared memory, where a tile's columns are long
// enough to be written in whole sectors. Square blocks have the same codes both ways: the columns get them transposed.
#include "quantize_patch.cuh"

// Write a row of a patch, at `out`, and its scale.
template <class R, class P>
FP4KIT_DEVICE void store_row(const PatchArguments& a, u8* out, i32 row, i32 column, const u32 (&words)[P::kRowWords], u32 code) {
  store_words(out, words);
  if (column % R::kBlock) return;
  a.scales[scale_offset<R::kLayout, u32>(row, column / R::kBlock, static_cast<u32>(a.columns) / R::kBlock)] = code;
}

// Where the codes of a patch's first row go, and how far apart rows are.
template <class P>
FP4KIT_DEVICE u8* first_codes(const PatchArguments& a, const Spot& s) {
  return a.packed + (static_cast<i64>(s.row) * a.columns + s.column) * P::kBits / 8;
}
template <class P>
FP4KIT_DEVICE i64 row_bytes(const PatchArguments& a) { return a.columns * P::kBits / 8; }

// A patch's first element.
template <class In>
FP4KIT_DEVICE const typename In::Bits* first_element(const PatchArguments& a, const Spot& s) {
  return static_cast<const typename In::Bits*>(a.x) + static_cast<i64>(s.row) * a.columns + s.column;
}

// A patch of a square block rounded to the values of its codes.
template <class R, class In, bool kAligned, class P>
FP4KIT_DEVICE void round_patch(const PatchArguments& a, const Spot& s, const Run<In, P::kSpan> (&x)[kSide], bool is_short, Factor f,
                               float scale) {
  const typename In::Bits* from = first_element<In>(a, s);
  typename In::Bits* y = static_cast<typename In::Bits*>(a.values) + (from - static_cast<const typename In::Bits*>(a.x));
  if (is_short) {
#pragma unroll
    for (int i = 0; i < kSide; ++i, y += a.columns) {
      float values[P::kSpan];
      round_finite<R, In>(x[i], f, scale, values);
      if (s.row + i < a.rows) store_run<In, P::kSpan, kAligned>(y, values);
    }
    return;
  }
#pragma unroll 1
  for (int i = 0; i < kSide * P::kSpan && s.row + i / P::kSpan < a.rows; ++i) {
    const i64 offset = i / P::kSpan * a.columns + i % P::kSpan;
    const u32 code = encode_element<R>(scaled_element<R, In>(In::widen(from[offset]), f.by));
    y[offset] = In::narrow(R::DecodeRule::apply(decode<typename R::Element>(code), scale));
  }
}

// A patch of a square block that does not go the short way: rows, then columns, read again.
template <class R, class In, class P>
FP4KIT_DEVICE void encode_patch(const PatchArguments& a, const Spot& s, Factor f, u32 code, Staging<P>& staging) {
  const typename In::Bits* x = first_element<In>(a, s);
#pragma unroll 1
  for (int i = 0; a.packed && i < kSide && s.row + i < a.rows; ++i) {
    u32 words[P::kRowWords];
    encode_any<R, In>(x + i * a.columns, 1, f, words);
    store_row<R, P>(a, first_codes<P>(a, s) + i * row_bytes<P>(a), s.row + i, s.column, words, code);
  }
#pragma unroll 1
  for (int j = 0; a.column_packed && j < P::kSpan; ++j) {
    u32 words[P::kWords];
    encode_any<R, In>(x + j, a.columns, f, words);
    stage_column<P>(staging, s, j, words);
  }
}

// Square blocks: one scale and the same codes both ways.
template <class R, class In, bool kAligned, class P>
FP4KIT_DEVICE void quantize_square(const PatchArguments& a, const Spot& s, const Run<In, P::kSpan> (&x)[kSide], TensorScale t,
                                   Staging<P>& staging) {
  u32 largest = 0u;
#pragma unroll
  for (int i = 0; i < kSide; ++i) largest = maximum(largest, largest_bits_of(x[i]));
  largest = largest_of_lanes(largest_of_lanes(largest, 1, P::kAcross), P::kWide, 32);
  if (s.row >= a.rows || s.column >= a.columns) return;
  const i64 top = s.row / R::kBlockRows * R::kBlockRows, left = s.column / R::kBlock * R::kBlock;
  const int rows = static_cast<int>(minimum<i64>(R::kBlockRows, a.rows - top));
  Factor f;
  float amax = float_of(largest);
  if (largest >= kInfinityBits)
    amax = amax_of_block<R, In>(static_cast<const typename In::Bits*>(a.x) + top * a.columns + left, rows, a.columns, 1);
  const u32 code = scale_block<R, In>(amax, t, nullptr, f);
  const bool is_short = ShortWay<R, In>::kExists && takes_short_way<R, In>(largest, f);
  if constexpr (R::kFake) {
    return round_patch<R, In, kAligned, P>(a, s, x, is_short, f, R::DecodeRule::template scale<R>(code, t));
  } else {
    if (a.column_packed) {
#pragma unroll
      for (int j = 0; j < P::kSpan; ++j) stage_scale<P>(staging, s, j, code);
    }
    if (!is_short) return encode_patch<R, In, P>(a, s, f, code, staging);
    u32 words[kSide][P::kRowWords];
    u8* out = first_codes<P>(a, s);
#pragma unroll
    for (int i = 0; i < kSide; ++i, out += row_bytes<P>(a)) {
      encode_finite<R, In>(x[i], f, words[i]);
      if (a.packed && s.row + i < a.rows) store_row<R, P>(a, out, s.row + i, s.column, words[i], code);
    }
    if (a.column_packed) stage_transposed<P>(staging, s, words);
  }
}

// Blocks in a row: the patch's rows; those that are not finite afterwards, read again.
template <class R, class In, class P>
FP4KIT_DEVICE void quantize_rows(const PatchArguments& a, const Spot& s, const Run<In, P::kSpan> (&x)[kSide], TensorScale t,
                                 const Factor* table) {
  u32 left = 0u, words[P::kRowWords];
  Factor f;
  u8* out = first_codes<P>(a, s);
#pragma unroll
  for (int i = 0; i < kSide; ++i, out += row_bytes<P>(a)) {
    const u32 own = largest_bits_of(x[i]), largest = largest_of_lanes(own, 1, P::kAcross);
    const u32 code = scale_block<R, In>(float_of(largest), t, table, f);
    if (s.row + i >= a.rows || s.column >= a.columns) continue;
    if (!ShortWay<R, In>::kExists || largest >= kInfinityBits || !takes_short_way<R, In>(own, f)) {
      left |= 1u << i;
      continue;
    }
    encode_finite<R, In>(x[i], f, words);
    store_row<R, P>(a, out, s.row + i, s.column, words, code);
  }
#pragma unroll 1
  for (int i = 0; left >> i; ++i) {
    if (!(left >> i & 1u)) continue;
    const typename In::Bits* row = first_element<In>(a, s) + i * a.columns;
    const float amax = amax_of_block<R, In>(row - s.column % R::kBlock, 1, 0, 1);
    const u32 code = scale_block<R, In>(amax, t, table, f);
    encode_any<R, In>(row, 1, f, words);
    store_row<R, P>(a, first_codes<P>(a, s) + i * row_bytes<P>(a), s.row + i, s.column, words, code);
  }
}

// Blocks in a column: the patch's columns, into the staging; those that are not finite afterwards, read again.
template <class R, class In, class P>
FP4KIT_DEVICE void quantize_columns(const PatchArguments& a, const Spot& s, const Run<In, P::kSpan> (&x)[kSide], TensorScale t,
                                    const Factor* table, Staging<P>& staging) {
  u32 left = 0u, words[P::kWords];
  Factor f;
#pragma unroll
  for (int j = 0; j < P::kSpan; ++j) {
    const Run<In, kSide> run = column_run<In>(x, j);
    const u32 own = largest_bits_of(run), largest = largest_of_lanes(own, P::kWide, 32);
    const u32 code = scale_block<R, In>(float_of(largest), t, table, f);
    if (!ShortWay<R, In>::kExists || largest >= kInfinityBits || !takes_short_way<R, In>(own, f)) {
      left |= 1u << j;
      continue;
    }
    encode_finite<R, In>(run, f, words);
    stage_column<P>(staging, s, j, words);
    stage_scale<P>(staging, s, j, code);
  }
  if (s.row >= a.rows || s.column >= a.columns) return;
#pragma unroll 1
  for (int j = 0; left >> j; ++j) {
    if (!(left >> j & 1u)) continue;
    const typename In::Bits* column = first_element<In>(a, s) + j;
    const float amax = amax_of_block<R, In>(column - s.row % R::kBlock * a.columns, 1, 0, a.columns);
    const u32 code = scale_block<R, In>(amax, t, table, f);
    encode_any<R, In>(column, a.columns, f, words);
    stage_column<P>(staging, s, j, words);
    stage_scale<P>(staging, s, j, code);
  }
}

// A tile's columns from the staging to memory, 16 bytes a thread where columns begin at multiples of that.
template <class R, class P>
FP4KIT_DEVICE void write_columns(const PatchArguments& a, const Staging<P>& staging, i64 first_row, i64 first_column) {
  constexpr int kPerWord = 32 / P::kBits;
  const i64 bytes = a.rows * P::kBits / 8;  // of a column
  for (int i = threadIdx.x; i < P::kColumns * P::kColumnWords / 4; i += kThreads) {
    const int k = i / 2 % P::kColumns, quad = i % 2 + i / (2 * P::kColumns) * 2;
    const i64 row = first_row + quad * 4 * kPerWord, column = first_column + k;
    if (column >= a.columns || row >= a.rows) continue;
    u32 words[4];
#pragma unroll
    for (int w = 0; w < 4; ++w) words[w] = staging.words[4 * quad + w][staged_column<P>(4 * quad + w, k / P::kSpan, k % P::kSpan)];
    u8* out = a.column_packed + column * bytes + row * P::kBits / 8;
    if (bytes % 16 == 0) {
      store_words(out, words);
    } else {
#pragma unroll
      for (int w = 0; w < 4; ++w)
        if (row + w * kPerWord < a.rows) reinterpret_cast<u32*>(out)[w] = words[w];
    }
  }
  for (int i = threadIdx.x; i < P::kColumns * P::kBlocks; i += kThreads) {
    const i64 column = first_column + i / P::kBlocks, block = first_row / R::kBlock + i % P::kBlocks, blocks = a.rows / R::kBlock;
    if (column < a.columns && block < blocks)
      a.column_scales[scale_offset<R::kLayout>(column, block, blocks)] = staging.scales[i / P::kBlocks][i % P::kBlocks];
  }
}

template <class R, class In, bool kAligned>
FP4KIT_DEVICE void quantize_patch(const PatchArguments& a, Grid grid) {
  using P = Patches<R, In>;
  __shared__ Staging<P> staging;
  __shared__ Factor table[R::kHasTable ? kTableSize : 1];
  const TensorScale t = tensor_scale_of<R, In>(a.tensor_amax, 0, 0, 1);
  if constexpr (R::kHasTable) {
    if (threadIdx.x < kTableSize) table[threadIdx.x] = factor_of<R, In>(threadIdx.x, t);
    __syncthreads();
  }
  const int lane = threadIdx.x % 32;
  const i64 wide = (a.columns + P::kColumns - 1) / P::kColumns, tall = (a.rows + P::kRows - 1) / P::kRows;
  for (i64 tile = grid.block; tile < tall * wide; tile += grid.blocks) {
    const i32 first_row = static_cast<i32>(tile / wide) * P::kRows, first_column = static_cast<i32>(tile % wide) * P::kColumns;
    Spot s = {lane / P::kWide, lane % P::kWide, static_cast<int>(threadIdx.x) / 32, 0, 0};
    s.row = first_row + (s.warp * P::kTall + s.tall) * kSide;
    s.column = first_column + s.wide * P::kSpan;
    Run<In, P::kSpan> x[kSide];
    const typename In::Bits* run = first_element<In>(a, s);
#pragma unroll
    for (int i = 0; i < kSide; ++i, run += a.columns)
      x[i] = s.row + i < a.rows && s.column < a.columns ? read_run<In, P::kSpan, kAligned>(run) : Run<In, P::kSpan>{};
    if constexpr (P::kSquare) {
      quantize_square<R, In, kAligned, P>(a, s, x, t, staging);
    } else {
      if (a.packed) quantize_rows<R, In, P>(a, s, x, t, table);
      if (a.column_packed) quantize_columns<R, In, P>(a, s, x, t, table, staging);
    }
    if (!a.column_packed) continue;
    __syncthreads();
    write_columns<R, P>(a, staging, first_row, first_column);
    __syncthreads();
  }
  if (grid.block == 0 && threadIdx.x == 0 && R::kTensorScaling != TensorScaling::none) {
    if (a.tensor_scale) *a.tensor_scale = t.decode;
    if (a.column_tensor_scale) *a.column_tensor_scale = t.decode;
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, 2) quantize_patch_kernel(PatchArguments a) {
  quantize_patch<R, Input, kAligned>(a, whole_grid());
}
