// quantize a matrix along its columns, or both ways from one read; and blocks of several rows (16x16, 32x32) any way.
//
// A thread takes a patch of 8 x 8 elements and keeps it in registers; the threads of a warp lie so that a block's patches are
// in one warp, which finds amaxes by shuffles. Codes along columns are gathered in shared memory, where a tile's columns are long
// enough to be written in whole sectors. Square blocks have the same codes both ways: the columns get them transposed.
#include "quantize_patch.cuh"

// Write a row of a patch, at `out`, and its scale.
template <class R>
FP4KIT_DEVICE void store_row(const PatchArguments& a, u8* out, i32 row, i32 column, const u32 (&words)[Patches<R>::kWords], u32 code) {
  store_words(out, words);
  if (column % R::kBlock) return;
  a.scales[scale_offset<R::kLayout, u32>(row, column / R::kBlock, static_cast<u32>(a.columns) / R::kBlock)] = code;
}

// Where the codes of a patch's first row go, and how far apart rows are.
template <class R>
FP4KIT_DEVICE u8* first_codes(const PatchArguments& a, const Spot<R>& s) {
  return a.packed + (static_cast<i64>(s.row) * a.columns + s.column) * Patches<R>::kBits / 8;
}
template <class R>
FP4KIT_DEVICE i64 row_bytes(const PatchArguments& a) { return a.columns * Patches<R>::kBits / 8; }

// A row of a patch rounded to the values of its codes.
template <class R, class In, bool kAligned>
FP4KIT_DEVICE void round_row(const PatchArguments& a, i64 first, const Run<In, kSide>& x, bool is_short, Factor f, u32 code, TensorScale t) {
  const float scale = R::DecodeRule::template scale<R>(code, t);
  typename In::Bits* y = static_cast<typename In::Bits*>(a.values) + first;
  if (is_short) {
    float values[kSide];
    round_finite<R, In>(x, f, scale, values);
    return store_run<In, kSide, kAligned>(y, values);
  }
#pragma unroll 1
  for (int i = 0; i < kSide; ++i) {
    const float element = In::widen(static_cast<const typename In::Bits*>(a.x)[first + i]);
    const u32 element_code = encode_element<R>(scaled_element<R, In>(element, f.by));
    y[i] = In::narrow(R::DecodeRule::apply(decode<typename R::Element>(element_code), scale));
  }
}

// Square blocks: one scale and the same codes both ways.
template <class R, class In, bool kAligned>
FP4KIT_DEVICE void quantize_square(const PatchArguments& a, const Spot<R>& s, const Run<In, kSide> (&x)[kSide], TensorScale t,
                                   Staging<R>& staging) {
  using P = Patches<R>;
  u32 largest = 0u;
#pragma unroll
  for (int i = 0; i < kSide; ++i) largest = maximum(largest, largest_bits_of(x[i]));
  largest = largest_of_lanes(largest_of_lanes(largest, 1, Patches<R>::kAcross), P::kWide, 32);
  const i64 top = s.row / R::kBlockRows * R::kBlockRows, left = s.column / R::kBlock * R::kBlock;
  const int rows = static_cast<int>(minimum<i64>(R::kBlockRows, a.rows - top));
  Factor f;
  float amax = float_of(largest);
  if (largest >= kInfinityBits)
    amax = amax_of_block<R, In>(static_cast<const typename In::Bits*>(a.x) + top * a.columns + left, rows, a.columns, 1);
  const u32 code = scale_block<R, In>(amax, t, nullptr, f);
  const bool is_short = ShortWay<R, In>::kExists && takes_short_way<R, In>(largest, f);
  const typename In::Bits* patch = static_cast<const typename In::Bits*>(a.x) + static_cast<i64>(s.row) * a.columns + s.column;
  u32 words[kSide][P::kWords] = {};
  u8* out = first_codes<R>(a, s);
#pragma unroll
  for (int i = 0; i < kSide; ++i, out += row_bytes<R>(a)) {
    const bool inside = s.row + i < a.rows && s.column < a.columns;
    if constexpr (R::kFake) {
      if (inside) round_row<R, In, kAligned>(a, static_cast<i64>(s.row + i) * a.columns + s.column, x[i], is_short, f, code, t);
      continue;
    }
    if (is_short) {
      encode_finite<R, In>(x[i], f, words[i]);
    } else if (inside) {
      encode_any<R, In>(patch + i * a.columns, 1, f, words[i]);
    }
    if (a.packed && inside) store_row<R>(a, out, s.row + i, s.column, words[i], code);
  }
  if (!a.column_packed) return;
  stage_transposed<R>(staging, s, words);
  if (s.tall == 0) {
#pragma unroll
    for (int j = 0; j < kSide; ++j) staging.scales[s.wide * kSide + j][s.warp] = code;
  }
}

// Blocks in a row: the patch's rows; those that are not finite afterwards, read again.
template <class R, class In>
FP4KIT_DEVICE void quantize_rows(const PatchArguments& a, const Spot<R>& s, const Run<In, kSide> (&x)[kSide], TensorScale t, const Factor* table) {
  u32 left = 0u, words[Patches<R>::kWords];
  Factor f;
  u8* out = first_codes<R>(a, s);
#pragma unroll
  for (int i = 0; i < kSide; ++i, out += row_bytes<R>(a)) {
    const u32 own = largest_bits_of(x[i]), largest = largest_of_lanes(own, 1, Patches<R>::kAcross);
    const u32 code = scale_block<R, In>(float_of(largest), t, table, f);
    const bool inside = s.row + i < a.rows && s.column < a.columns;
    if (!inside) continue;
    if (!ShortWay<R, In>::kExists || largest >= kInfinityBits || !takes_short_way<R, In>(own, f)) {
      left |= 1u << i;
      continue;
    }
    encode_finite<R, In>(x[i], f, words);
    store_row<R>(a, out, s.row + i, s.column, words, code);
  }
#pragma unroll 1
  for (int i = 0; left >> i; ++i) {
    if (!(left >> i & 1u)) continue;
    const typename In::Bits* row = static_cast<const typename In::Bits*>(a.x) + static_cast<i64>(s.row + i) * a.columns;
    const float amax = amax_of_block<R, In>(row + s.column / R::kBlock * R::kBlock, 1, 0, 1);
    const u32 code = scale_block<R, In>(amax, t, table, f);
    encode_any<R, In>(row + s.column, 1, f, words);
    store_row<R>(a, first_codes<R>(a, s) + i * row_bytes<R>(a), s.row + i, s.column, words, code);
  }
}

// Blocks in a column: the patch's columns; those that are not finite afterwards, read again.
template <class R, class In>
FP4KIT_DEVICE void quantize_columns(const PatchArguments& a, const Spot<R>& s, const Run<In, kSide> (&x)[kSide], TensorScale t,
                                    const Factor* table, Staging<R>& staging) {
  u32 left = 0u, words[Patches<R>::kWords];
  Factor f;
#pragma unroll
  for (int j = 0; j < kSide; ++j) {
    const Run<In, kSide> run = column_run<In>(x, j);
    const u32 own = largest_bits_of(run), largest = largest_of_lanes(own, Patches<R>::kWide, 32);
    const u32 code = scale_block<R, In>(float_of(largest), t, table, f);
    if (!ShortWay<R, In>::kExists || largest >= kInfinityBits || !takes_short_way<R, In>(own, f)) {
      left |= 1u << j;
      continue;
    }
    encode_finite<R, In>(run, f, words);
    stage_column<R>(staging, s, j, words, code);
  }
  if (s.row >= a.rows || s.column >= a.columns) return;
#pragma unroll 1
  for (int j = 0; left >> j; ++j) {
    if (!(left >> j & 1u)) continue;
    const typename In::Bits* column = static_cast<const typename In::Bits*>(a.x) + s.column + j;
    const float amax = amax_of_block<R, In>(column + static_cast<i64>(s.row / R::kBlock * R::kBlock) * a.columns, 1, 0, a.columns);
    const u32 code = scale_block<R, In>(amax, t, table, f);
    encode_any<R, In>(column + static_cast<i64>(s.row) * a.columns, a.columns, f, words);
    stage_column<R>(staging, s, j, words, code);
  }
}

// A tile's columns from the staging to memory, 16 bytes a thread where columns begin at multiples of that.
template <class R>
FP4KIT_DEVICE void write_columns(const PatchArguments& a, const Staging<R>& staging, i64 first_row, i64 first_column) {
  using P = Patches<R>;
  constexpr int kPerWord = 32 / P::kBits;
  const i64 bytes = a.rows * P::kBits / 8;  // of a column
  for (int i = threadIdx.x; i < P::kColumns * P::kColumnWords / 4; i += kThreads) {
    const int k = i / 2 % P::kColumns, quad = i % 2 + i / (2 * P::kColumns) * 2;
    const i64 row = first_row + quad * 4 * kPerWord, column = first_column + k;
    if (column >= a.columns || row >= a.rows) continue;
    u32 words[4];
#pragma unroll
    for (int w = 0; w < 4; ++w) words[w] = staging.words[4 * quad + w][staged_column<R>(4 * quad + w, k / kSide, k % kSide)];
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
  using P = Patches<R>;
  __shared__ Staging<R> staging;
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
    Spot<R> s = {lane / P::kWide, lane % P::kWide, static_cast<int>(threadIdx.x) / 32, 0, 0};
    s.row = first_row + (s.warp * P::kTall + s.tall) * kSide;
    s.column = first_column + s.wide * kSide;
    Run<In, kSide> x[kSide];
    const typename In::Bits* run = static_cast<const typename In::Bits*>(a.x) + static_cast<i64>(s.row) * a.columns + s.column;
#pragma unroll
    for (int i = 0; i < kSide; ++i, run += a.columns)
      x[i] = s.row + i < a.rows && s.column < a.columns ? read_run<In, kSide, kAligned>(run) : Run<In, kSide>{};
    if constexpr (P::kSquare) {
      quantize_square<R, In, kAligned>(a, s, x, t, staging);
    } else {
      if (a.packed) quantize_rows<R, In>(a, s, x, t, table);
      if (a.column_packed) quantize_columns<R, In>(a, s, x, t, table, staging);
    }
    if (!a.column_packed) continue;
    __syncthreads();
    write_columns<R>(a, staging, first_row, first_column);
    __syncthreads();
  }
  if (grid.block == 0 && threadIdx.x == 0 && R::kTensorScaling != TensorScaling::none) {
    if (a.tensor_scale) *a.tensor_scale = t.decode;
    if (a.column_tensor_scale) *a.column_tensor_scale = t.decode;
  }
}

constexpr bool kManyRegisters = sizeof(Input::Bits) == 4 || (R::kBlockRows > 1 && R::Element::kStoredBits == 8);

extern "C" __global__ void __launch_bounds__(kThreads, kManyRegisters ? 2 : 3) quantize_patch_kernel(PatchArguments a) {
  quantize_patch<R, Input, kAligned>(a, whole_grid());
}
