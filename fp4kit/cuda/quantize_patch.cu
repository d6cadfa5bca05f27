// quantize a matrix along its columns, or both ways from one read; and blocks of several rows (16x16, 32x32) any way.
//
// A thread takes a patch of 8 rows x 16 columns and keeps it in registers; the threads of a warp lie so that a block's patches are
// in one warp, which finds amaxes by shuffles. Codes along columns are gathered in shared memory, where a tile's columns are long
// enough to be written in whole sectors. Square blocks have the same codes both ways: the columns get them transposed.
#include "quantize.cuh"

struct PatchArguments {
  const void* x;                   // rows x columns elements, contiguous
  u8 *packed, *scales;             // along rows (null: not wanted)
  u8 *column_packed, *column_scales;  // along columns: columns x rows (null: not wanted)
  void* values;                    // fake_quantize of square blocks: elements of x's type (null otherwise)
  const float* tensor_amax;        // one (null without)
  float *tensor_scale, *column_tensor_scale;
  i64 rows, columns;
};

template <class R>
struct Patches {
  static constexpr int kSide = 8;                                 // rows of a patch
  static constexpr int kTall = R::kBlock / kSide;                 // patches above each other in a warp: the rows of a block
  static constexpr int kWide = 32 / kTall;                        // patches beside each other
  static constexpr int kWarps = kThreads / 32;                    // above each other
  static constexpr int kRows = kWarps * kTall * kSide, kColumns = kWide * 16;  // of a tile
  static constexpr int kBits = R::Element::kStoredBits;
  static constexpr int kPatchWords = kSide * kBits / 32;          // of the codes of a patch's column
  static constexpr int kColumnWords = kRows * kBits / 32;         // of a tile's column
  static constexpr int kPitch = kColumns + kColumns / 16;         // of a row of words in shared memory
  static constexpr int kBlocks = kRows / R::kBlock;               // of a tile's column
  static constexpr bool kSquare = R::kBlockRows > 1;
};

template <class R>
struct Staging {
  u32 words[Patches<R>::kColumnWords][Patches<R>::kPitch];
  u8 scales[Patches<R>::kColumns][Patches<R>::kBlocks];
};

// Where a thread is.
template <class R>
struct Spot {
  int tall, wide, warp;  // patch in the warp; warp in the block
  i64 row, column;       // of the patch's first element
};

// Where column j (0 ... 15) of patches beside each other lies in a row of the staging: no two lanes meet in a bank.
FP4KIT_DEVICE int staged_column(int wide, int j) { return wide * 16 + (j ^ (wide & 15)); }

// Rows 2 i and 2 i + 1 of columns j and j + 1 of a patch (j even) -> the columns as runs.
template <class In>
FP4KIT_DEVICE void column_runs(const Run<In, 16> (&rows)[8], int j, Run<In, 8> (&columns)[2]) {
  if constexpr (sizeof(typename In::Bits) == 4) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      columns[0].w[i] = rows[i].w[j];
      columns[1].w[i] = rows[i].w[j + 1];
    }
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      columns[0].w[i] = prmt(rows[2 * i].w[j / 2], rows[2 * i + 1].w[j / 2], 0x5410u);
      columns[1].w[i] = prmt(rows[2 * i].w[j / 2], rows[2 * i + 1].w[j / 2], 0x7632u);
    }
  }
}

// Largest over the lanes whose numbers differ in the bits from `first` up to `end`.
FP4KIT_DEVICE u32 largest_of_lanes(u32 largest, int first, int end) {
#pragma unroll
  for (int lane = first; lane < end; lane *= 2) largest = maximum(largest, __shfl_xor_sync(0xFFFFFFFFu, largest, lane));
  return largest;
}

// amax of a block by the recipe's own rule: element (i, j) is x[i * row_step + j * step], rows x R::kBlock of them.
template <class R, class In>
FP4KIT_DEVICE float amax_of_block(const typename In::Bits* x, int rows, i64 row_step, i64 step) {
  constexpr AmaxNan kOver = R::kAmaxNan == AmaxNan::propagate ? AmaxNan::propagate : AmaxNan::ignore;  // rows
  float largest = 0.0f;
#pragma unroll 1
  for (int i = 0; i < rows; ++i) {
    BlockAmax<R::kAmaxNan> amax;
#pragma unroll 1
    for (int j = 0; j < R::kBlock; j += 2) {
      const typename In::Bits* pair = x + i * row_step + j * step;
      const float values[2] = {In::widen(pair[0]), In::widen(pair[step])};
      amax.add(values);
    }
    largest = rows == 1 ? amax.result() : larger<kOver>(largest, amax.result());
  }
  return largest;
}

// Codes of elements that lie `step` apart, of any values: small code for a rare case.
template <class R, class In, int kWords>
FP4KIT_DEVICE void encode_any(const typename In::Bits* x, i64 step, Factor f, u32 (&words)[kWords]) {
  constexpr int kPerWord = 32 / R::Element::kStoredBits;
#pragma unroll
  for (int w = 0; w < kWords; ++w) {
    words[w] = 0u;
#pragma unroll 1
    for (int i = 0; i < kPerWord; ++i)
      words[w] |= encode_element<R>(scaled_element<R, In>(In::widen(x[(w * kPerWord + i) * step]), f.by)) << (R::Element::kStoredBits * i);
  }
}

// Nibbles or bytes (i, j) of a patch's codes, 8 rows of 16, to word (j, i): transposed within each 8x8 or 4x4.
FP4KIT_DEVICE void transpose_nibbles(u32 (&w)[8]) {
#pragma unroll
  for (int distance = 4; distance > 0; distance /= 2) {
    const u32 low = distance == 4 ? 0x0000FFFFu : distance == 2 ? 0x00FF00FFu : 0x0F0F0F0Fu;
    const int shift = 4 * distance;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (i & distance) continue;
      const u32 a = w[i], b = w[i + distance];
      w[i] = (a & low) | (b & low) << shift;
      w[i + distance] = (a >> shift & low) | (b & ~low);
    }
  }
}
FP4KIT_DEVICE void transpose_bytes(u32 (&w)[4]) {
  const u32 a = prmt(w[0], w[1], 0x5140u), b = prmt(w[2], w[3], 0x5140u), c = prmt(w[0], w[1], 0x7362u), d = prmt(w[2], w[3], 0x7362u);
  w[0] = prmt(a, b, 0x5410u);
  w[1] = prmt(a, b, 0x7632u);
  w[2] = prmt(c, d, 0x5410u);
  w[3] = prmt(c, d, 0x7632u);
}

// The codes of a patch, along rows, into the staging, along columns.
template <class R>
FP4KIT_DEVICE void stage_transposed(Staging<R>& staging, const Spot<R>& s, const u32 (&codes)[8][Patches<R>::kBits / 2]) {
  using P = Patches<R>;
  const int first = (s.warp * P::kTall + s.tall) * P::kPatchWords;
  if constexpr (P::kBits == 4) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      u32 w[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) w[i] = codes[i][half];
      transpose_nibbles(w);
#pragma unroll
      for (int i = 0; i < 8; ++i) staging.words[first][staged_column(s.wide, 8 * half + i)] = w[i];
    }
  } else {
#pragma unroll
    for (int part = 0; part < 8; ++part) {  // 4x4 bytes
      u32 w[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) w[i] = codes[part / 4 * 4 + i][part % 4];
      transpose_bytes(w);
#pragma unroll
      for (int i = 0; i < 4; ++i) staging.words[first + part / 4][staged_column(s.wide, part % 4 * 4 + i)] = w[i];
    }
  }
}

// Write a row of a patch and its scale.
template <class R>
FP4KIT_DEVICE void store_row(const PatchArguments& a, i64 row, i64 column, const u32 (&words)[Patches<R>::kBits / 2], u32 code) {
  store_words(a.packed + (row * a.columns + column) * Patches<R>::kBits / 8, words);
  if (column % R::kBlock == 0) a.scales[scale_offset<R::kLayout>(row, column / R::kBlock, a.columns / R::kBlock)] = code;
}

// A row of a patch rounded to the values of its codes.
template <class R, class In, bool kAligned>
FP4KIT_DEVICE void round_row(const PatchArguments& a, i64 first, const Run<In, 16>& x, bool is_short, Factor f, u32 code, TensorScale t) {
  const float scale = R::DecodeRule::template scale<R>(code, t);
  typename In::Bits* y = static_cast<typename In::Bits*>(a.values) + first;
  if (is_short) {
    float values[16];
    round_finite<R, In>(x, f, scale, values);
    return store_run<In, 16, kAligned>(y, values);
  }
#pragma unroll 1
  for (int i = 0; i < 16; ++i) {
    const float element = In::widen(static_cast<const typename In::Bits*>(a.x)[first + i]);
    const u32 element_code = encode_element<R>(scaled_element<R, In>(element, f.by));
    y[i] = In::narrow(R::DecodeRule::apply(decode<typename R::Element>(element_code), scale));
  }
}

// Square blocks: one scale and the same codes both ways.
template <class R, class In, bool kAligned>
FP4KIT_DEVICE void quantize_square(const PatchArguments& a, const Spot<R>& s, const Run<In, 16> (&x)[8], TensorScale t,
                                   Staging<R>& staging) {
  using P = Patches<R>;
  u32 largest = 0u;
#pragma unroll
  for (int i = 0; i < 8; ++i) largest = maximum(largest, largest_bits_of(x[i]));
  largest = largest_of_lanes(largest_of_lanes(largest, 1, R::kBlock / 16), P::kWide, 32);
  const i64 top = s.row / R::kBlockRows * R::kBlockRows, left = s.column / R::kBlock * R::kBlock;
  const int rows = static_cast<int>(minimum<i64>(R::kBlockRows, a.rows - top));
  Factor f;
  float amax = float_of(largest);
  if (largest >= kInfinityBits)
    amax = amax_of_block<R, In>(static_cast<const typename In::Bits*>(a.x) + top * a.columns + left, rows, a.columns, 1);
  const u32 code = scale_block<R, In>(amax, t, nullptr, f);
  const bool is_short = ShortWay<R, In>::kExists && takes_short_way<R, In>(largest, f);
  const typename In::Bits* patch = static_cast<const typename In::Bits*>(a.x) + s.row * a.columns + s.column;
  u32 words[8][P::kBits / 2] = {};
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const bool inside = s.row + i < a.rows && s.column < a.columns;
    if constexpr (R::kFake) {
      if (inside) round_row<R, In, kAligned>(a, (s.row + i) * a.columns + s.column, x[i], is_short, f, code, t);
      continue;
    }
    if (is_short) {
      encode_finite<R, In>(x[i], f, words[i]);
    } else if (inside) {
      encode_any<R, In>(patch + i * a.columns, 1, f, words[i]);
    }
    if (a.packed && inside) store_row<R>(a, s.row + i, s.column, words[i], code);
  }
  if (!a.column_packed) return;
  stage_transposed<R>(staging, s, words);
  if (s.tall == 0) {
#pragma unroll
    for (int j = 0; j < 16; ++j) staging.scales[s.wide * 16 + j][s.warp] = code;
  }
}

// Blocks in a row: the patch's rows; those that are not finite afterwards, read again.
template <class R, class In>
FP4KIT_DEVICE void quantize_rows(const PatchArguments& a, const Spot<R>& s, const Run<In, 16> (&x)[8], TensorScale t, const Factor* table) {
  u32 left = 0u, words[Patches<R>::kBits / 2];
  Factor f;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const u32 own = largest_bits_of(x[i]), largest = largest_of_lanes(own, 1, R::kBlock / 16);
    const u32 code = scale_block<R, In>(float_of(largest), t, table, f);
    const bool inside = s.row + i < a.rows && s.column < a.columns;
    if (!inside) continue;
    if (!ShortWay<R, In>::kExists || largest >= kInfinityBits || !takes_short_way<R, In>(own, f)) {
      left |= 1u << i;
      continue;
    }
    encode_finite<R, In>(x[i], f, words);
    store_row<R>(a, s.row + i, s.column, words, code);
  }
#pragma unroll 1
  for (int i = 0; left >> i; ++i) {
    if (!(left >> i & 1u)) continue;
    const typename In::Bits* row = static_cast<const typename In::Bits*>(a.x) + (s.row + i) * a.columns;
    const float amax = amax_of_block<R, In>(row + s.column / R::kBlock * R::kBlock, 1, 0, 1);
    const u32 code = scale_block<R, In>(amax, t, table, f);
    encode_any<R, In>(row + s.column, 1, f, words);
    store_row<R>(a, s.row + i, s.column, words, code);
  }
}

// Codes of column j of a patch and the scale of its block -> the staging.
template <class R>
FP4KIT_DEVICE void stage_column(Staging<R>& staging, const Spot<R>& s, int j, const u32 (&words)[Patches<R>::kPatchWords], u32 code) {
  using P = Patches<R>;
#pragma unroll
  for (int w = 0; w < P::kPatchWords; ++w)
    staging.words[(s.warp * P::kTall + s.tall) * P::kPatchWords + w][staged_column(s.wide, j)] = words[w];
  if (s.tall == 0) staging.scales[s.wide * 16 + j][s.warp] = code;
}

// Blocks in a column: the patch's columns; those that are not finite afterwards, read again.
template <class R, class In>
FP4KIT_DEVICE void quantize_columns(const PatchArguments& a, const Spot<R>& s, const Run<In, 16> (&x)[8], TensorScale t,
                                    const Factor* table, Staging<R>& staging) {
  u32 left = 0u, words[Patches<R>::kPatchWords];
  Factor f;
#pragma unroll
  for (int j = 0; j < 16; ++j) {
    Run<In, 8> columns[2];
    column_runs<In>(x, j / 2 * 2, columns);
    const Run<In, 8> run = columns[j % 2];
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
    const float amax = amax_of_block<R, In>(column + s.row / R::kBlock * R::kBlock * a.columns, 1, 0, a.columns);
    const u32 code = scale_block<R, In>(amax, t, table, f);
    encode_any<R, In>(column + s.row * a.columns, a.columns, f, words);
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
    for (int w = 0; w < 4; ++w) words[w] = staging.words[4 * quad + w][staged_column(k / 16, k % 16)];
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
    const i64 first_row = tile / wide * P::kRows, first_column = tile % wide * P::kColumns;
    Spot<R> s = {lane / P::kWide, lane % P::kWide, static_cast<int>(threadIdx.x) / 32, 0, 0};
    s.row = first_row + (s.warp * P::kTall + s.tall) * P::kSide;
    s.column = first_column + s.wide * 16;
    Run<In, 16> x[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const typename In::Bits* run = static_cast<const typename In::Bits*>(a.x) + (s.row + i) * a.columns + s.column;
      x[i] = s.row + i < a.rows && s.column < a.columns ? read_run<In, 16, kAligned>(run) : Run<In, 16>{};
    }
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

extern "C" __global__ void __launch_bounds__(kThreads, sizeof(Input::Bits) == 4 ? 1 : 2) quantize_patch_kernel(PatchArguments a) {
  quantize_patch<R, Input, kAligned>(a, whole_grid());
}
