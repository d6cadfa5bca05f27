// Functions that encode a matrix tile by tile: they compute the amaxes, scale codes and element codes of its blocks.
//   tile      the rows and columns that one thread takes at a time
//   panel     one row of blocks of a tile
//   factor    the number by which the elements of a block are multiplied or divided before they are rounded
//   fallback  the specification, which computes the tiles that these loops cannot
//   View      contiguous rows of elements (data), which begin `step` elements apart
//   In        the type of the elements
//   Bits      the unsigned integer type of an element's bits
#pragma once

#include "dispatch.h"
#include "tiles.h"

// The arguments of a call that encodes a matrix. cpu/library.py mirrors this struct. Steps are counted in elements of
// their array.
//   x                            the matrix
//   encode, decode, amax         the tensor scale, or one tensor scale per row if tensor_step is 1
//   block_amax, factors          block amaxes and factors that come with the call, in rows that are block_step apart;
//                                nullptr to compute them. With a block rule, elements are first divided by `factors`
//   min_factor, max_factor       blocks with factors outside of this range need the fallback; if min_factor is
//                                negative, the minimum is -min_factor, and a factor of 0 is allowed too
//   random                       one random byte per element, rows random_step apart; nullptr if not given
//   seed                         seed of the stream of random bytes, used if `random` is nullptr; if `seed` is nullptr
//                                too, rounding is to nearest
//   stream_first, stream_stride  index of element (0, 0) in that stream, and distance of two rows in it
//   packed                       output: the packed codes, in rows that are packed_step apart
//   scales                       output: the scale codes, in rows that are scales_step apart; nullptr if they are not
//                                wanted
//   needs_fallback               output, one byte per tile: 1 if the specification has to compute the tile
//   tile_rows, tile_columns      rows and columns of a tile, which consists of whole blocks
//   input                        type of the elements, as an InputKind
//   block_rule, element          indices in kBlockRules (-1 for a recipe without block scales) and in kElements
//   block, block_rows            columns and rows of a block
//   threads                      largest number of threads to use
//
// For a block rule with `whole` (dispatch.h), `element` is not used.
struct EncodeCall {
  Source x;
  const float *encode, *decode, *amax;
  i64 tensor_step;
  const float *block_amax, *factors;
  i64 block_step;
  float min_factor, max_factor;
  const u8* random;
  i64 random_step;
  const u64* seed;
  i64 stream_first, stream_stride;
  u8 *packed, *scales;
  i64 packed_step, scales_step;
  u8* needs_fallback;
  i64 tile_rows, tile_columns;
  i32 input, block_rule, element, block, block_rows, threads;
};

namespace {

// Call work(in, tile, index) for every tile of a call, on at most call.threads threads. `in` has the type of the
// elements.
template <class Call, class Work>
void for_each_tile(const Call& call, Work work) {
  const Tiles tiles{call.x.rows, call.x.columns, call.tile_rows, call.tile_columns};
  with_input_type(call.input, [&](auto in) {
    auto run = [&](i64 index) { work(in, tiles.tile(index), index); };
    run_tiles(tiles.count(), call.threads, run);
  });
}

// Return a pointer to the random bytes start ... start + count - 1 of the stream with this seed. The bytes are in
// `out`, at an offset below 16, because the stream is generated in groups of 16. So `out` needs room for count + 31
// bytes.
const u8* stream_bytes(u64 seed, i64 start, i64 count, u8* out) {
  const i64 first = start / 16, last = (start + count + 15) / 16;
  for (i64 counter = first; counter < last; ++counter) {
    const Words words = stream_words(seed, static_cast<u64>(counter));
    std::memcpy(out + (counter - first) * 16, words.w, 16);
  }
  return out + (start - first * 16);
}

// Block amaxes of a matrix that an earlier pass has found, or data = nullptr if there was no such pass. All of them are
// finite. The amaxes of the next row of blocks begin `step` numbers later.
struct KnownAmaxes {
  const float* data = nullptr;
  i64 step = 0;
};

// Store in `memory` the multipliers that replace the divisors of a call (exact_division.h), and return its address.
// Return nullptr in these cases, in which multipliers are not used. `memory` is changed only in the last one.
//   - Multipliers must not replace the divisors of the element arithmetic (unused_bits is 0), or rounding is
//     stochastic.
//   - There is no block rule, or a divisor depends on more than its scale code: the factors come with the call, there
//     is one tensor scale per row, or the block rule needs the amax.
//   - Blocks do not have 16 columns, or the matrix has fewer than 2^14 elements.
//   - A divisor has no exact multiplier.
const Multipliers* multipliers_of_call(const EncodeCall& call, Multipliers& memory) {
  constexpr i64 kMinElements = 1 << 14;
  const u32 unused_bits = kElements[call.element].unused_bits[call.input];
  if (!unused_bits || call.block_rule < 0 || !kBlockRules[call.block_rule].factors_by_code || call.tensor_step ||
      call.factors || call.random || call.seed)
    return nullptr;
  if (call.block != kRun || call.x.rows * call.x.columns < kMinElements) return nullptr;
  u8 codes[256];
  float amax[256], divisors[256];
  for (int code = 0; code < 256; ++code) codes[code] = static_cast<u8>(code), amax[code] = 1.0f;
  kBlockRules[call.block_rule].scales[call.input].factors(codes, amax, 256, {*call.encode, *call.decode, *call.amax},
                                                          divisors);
  find_multipliers(divisors, unused_bits, memory);
  return memory.all_exact ? &memory : nullptr;
}

// Encoder of the tiles of a call whose elements have type In. Member functions that return bool return true on success.
// They return false if the elements need the fallback; what they have stored is then not valid.
template <class In>
struct Encoder {
  using Bits = typename Input<In>::Bits;
  const EncodeCall& call;
  const KnownAmaxes known = {};
  const Multipliers* multipliers = nullptr;
  const ElementEntry& element = kElements[call.element];
  const EncodeFunction encode = element.encodes[call.random || call.seed][call.input];
  const WholeRule* whole = call.block_rule < 0 ? nullptr : kBlockRules[call.block_rule].whole;
  const bool is_nibble = whole ? whole->is_nibble : element.is_nibble;
  const i64 scale_bytes = whole ? whole->scale_bytes : 1;

  // True if rows follow each other without gaps in all arrays, so that the rows of a tile can be encoded as one long
  // row.
  const bool is_flat = [](const EncodeCall& c, bool is_nibble, i64 scale_bytes) {
    const i64 columns = c.x.columns, blocks = columns / c.block;
    return (is_gathered(c.x) || c.x.row_step == columns) && c.block_rows == 1 && columns % c.block == 0 &&
           c.tensor_step == 0 && c.packed_step == (is_nibble ? columns / 2 : columns) &&
           (!c.scales || c.scales_step == blocks * scale_bytes) &&
           ((!c.block_amax && !c.factors) || c.block_step == blocks) && (!c.random || c.random_step == columns) &&
           (!c.seed || c.stream_stride == columns);
  }(call, is_nibble, scale_bytes);

  // Return the tensor scale of row `row` of the matrix. All rows share one tensor scale if tensor_step is 0.
  TensorScale tensor(i64 row) const {
    const i64 at = row * call.tensor_step;
    return {call.encode[at], call.decode[at], call.amax[at]};
  }

  // Store in `amax` the amax of each of `blocks` neighboring blocks, which have `rows` rows. x begins with the first
  // element of the first block. Return false if an element is NaN or infinite, otherwise true.
  bool find_block_amaxes(View<Bits> x, i64 rows, i64 blocks, float* amax) const {
    u32 bits[kMaxPanelBlocks], largest = 0;
    block_amax_bits<In>(x, rows, blocks, call.block, bits);
    for (i64 b = 0; b < blocks; ++b) largest = bits[b] > largest ? bits[b] : largest;
    for (i64 b = 0; b < blocks; ++b) amax[b] = Input<In>::value(static_cast<Bits>(bits[b]));
    return largest < Input<In>::kInfinity;
  }

  // Return the fastest method (enum Method) that is valid for all of `count` blocks, given their amaxes and factors.
  // For stochastic rounding, and for arithmetics without a fast method, this is Method::general.
  Method method_of(const float* amax, const float* factors, i64 count) const {
    const float below = call.random || call.seed ? 0.0f : element.fast_below[call.input];
    if (below == 0.0f) return Method::general;
    u32 is_slow = 0;
    if (element.divides)
      for (i64 b = 0; b < count; ++b)
        is_slow |= !(amax[b] < kFastScaledBelow * factors[b]) | !(factors[b] > kFastDivisorAbove) |
                   !(factors[b] < below) | is_last_significand(factors[b]);
    else
      for (i64 b = 0; b < count; ++b) is_slow |= !(amax[b] * factors[b] < kFastScaledBelow) | !(factors[b] < below);
    if (is_slow) return Method::general;
    if (multipliers) return Method::multiplier;
    return element.divides && !kHasSlowDivision ? Method::general : Method::fast;
  }

  // Return an array with one factor per run (16 elements) of `count` blocks: block_factors itself if a block is one
  // run, otherwise run_factors, which this function fills. Return nullptr if the fallback is needed, because a factor
  // is not usable (is_usable) or is outside of min_factor ... max_factor (see EncodeCall). If the recipe flushes,
  // subnormal numbers in block_factors are set to zero after this check.
  const float* spread_factors(float* block_factors, i64 count, float* run_factors) const {
    u32 is_bad = 0;
    for (i64 b = 0; b < count; ++b)
      is_bad |= static_cast<u32>(!is_usable(block_factors[b], element.allows_zero_factor));
    const float min_factor = fabsf(call.min_factor);
    const bool is_zero_bad = call.min_factor > 0.0f;
    for (i64 b = 0; b < count; ++b)
      is_bad |= static_cast<u32>((block_factors[b] < min_factor) & (is_zero_bad | (block_factors[b] != 0.0f))) |
                static_cast<u32>(block_factors[b] > call.max_factor);
    if (element.flushes)
      for (i64 b = 0; b < count; ++b) block_factors[b] = flush(block_factors[b]);
    const i64 runs = call.block / kRun;
    if (is_bad || runs == 1) return is_bad ? nullptr : block_factors;
    if (runs == 2)
      for (i64 b = 0; b < count; ++b) run_factors[2 * b] = run_factors[2 * b + 1] = block_factors[b];
    else
      for (i64 i = 0; i < count * runs; ++i) run_factors[i] = block_factors[i / runs];
    return run_factors;
  }

  // Return false if codes wrap (element.wraps) and the largest element of one of `count` blocks becomes infinite when
  // it is scaled, because it would then get the code of NaN. Otherwise return true. The amax of block b is amax[b *
  // step], and its factor is factors[b].
  bool keeps_finite(const float* amax, i64 step, const float* factors, i64 count) const {
    u32 is_bad = 0;
    for (i64 b = 0; element.wraps && b < count; ++b) {
      const float largest = amax[b * step];
      is_bad |= static_cast<u32>(!is_finite(element.divides ? largest / factors[b] : largest * factors[b]));
    }
    return !is_bad;
  }

  // Store in call.packed the codes of row `row` of the matrix, for the columns of a panel. `x` points to the first of
  // these elements, and `factors` holds their factors. If the call has random bytes or a seed, rounding is stochastic.
  void encode_row(const Bits* x, const Rectangle& panel, i64 row, Factors factors) const {
    u8 stream[kPanelColumns + 32];
    const u8* random = call.random ? call.random + row * call.random_step + panel.column : nullptr;
    if (call.seed)
      random =
          stream_bytes(*call.seed, call.stream_first + row * call.stream_stride + panel.column, panel.columns, stream);
    u8* out = call.packed + row * call.packed_step + (element.is_nibble ? panel.column / 2 : panel.column);
    encode(x, factors, tensor(row).encode, panel.columns, random, out);
  }

  // Store the factors of `count` blocks of a panel in `factors`, for calls without a block rule. They are the factors
  // that come with the call, starting at index `first`. If the call has none, they all are the tensor's decode scale if
  // elements are divided by factors, and otherwise its encode scale.
  void fill_factors(const Rectangle& panel, i64 first, i64 count, float* factors) const {
    const TensorScale t = tensor(panel.row);
    const float tensor_factor = element.divides ? t.decode : t.encode;
    for (i64 b = 0; b < count; ++b) factors[b] = call.factors ? call.factors[first + b] : tensor_factor;
  }

  // Store the scale codes and the factors of one row of `blocks` blocks, by the block rule of the call. `x` holds the
  // elements of the blocks, which have `rows` rows, and `amax` the amaxes. t is the tensor scale. Return false if a
  // rule of 4over6 or IF4 finds a block that needs the fallback, otherwise true.
  bool find_scales(View<Bits> x, i64 rows, i64 blocks, const float* amax, TensorScale t, u8* codes,
                   float* factors) const {
    const BlockRuleEntry& rule = kBlockRules[call.block_rule];
    if (rule.choose)
      return rule.choose({x.data, x.step, rows, blocks, call.block_rows, kLoadMagnitudes[call.input]}, amax, t, codes,
                         factors);
    rule.scales[call.input](amax, blocks, t, codes, factors);
    return true;
  }

  // In call.packed, store the code 0 for all elements of those blocks of a panel that the rule clears, and leave
  // other blocks as they are. `amax` holds the amaxes of the `blocks` blocks. The library whose results the recipe
  // reproduces returns early for such blocks, so their codes have no signs. Codes must have 4 bits.
  void clear_zero_blocks(const Rectangle& panel, const float* amax, i64 blocks, bool (*clears)(float)) const {
    const i64 bytes = call.block / 2;
    for (i64 b = 0; b < blocks; ++b)
      for (i64 i = 0; clears(amax[b]) && i < panel.rows; ++i)
        std::memset(call.packed + (panel.row + i) * call.packed_step + panel.column / 2 + b * bytes, 0, bytes);
  }

  // For the recipe IF4: store INT4 codes for those blocks of a panel whose scale code has bit 7 set, in place of their
  // E2M1 codes. Other blocks are left as they are. `x` holds the elements of the panel, and `codes` and `factors` the
  // scale codes and factors of its `blocks` blocks.
  void encode_integer_blocks(View<Bits> x, const Rectangle& panel, const u8* codes, const float* factors,
                             i64 blocks) const {
    for (i64 b = 0; b < blocks; ++b)
      for (i64 i = 0; codes[b] & If4::kIntegerBit && i < panel.rows; ++i)
        encode_integers<In>(x.data + i * x.step + b * kBlockColumns, factors[b],
                            call.packed + (panel.row + i) * call.packed_step + (panel.column + b * kBlockColumns) / 2);
  }

  // Encode a panel of one row by the rule `whole`, as encode_panel does. `amax` holds the amaxes of its `count` blocks,
  // whose first one is number `first` of the row.
  bool encode_whole(View<Bits> x, const Rectangle& panel, const float* amax, i64 first, i64 count) const {
    u8* packed = call.packed + panel.row * call.packed_step + (is_nibble ? panel.column / 2 : panel.column);
    u8* scales = call.scales ? call.scales + panel.row * call.scales_step + first * scale_bytes : nullptr;
    return whole->encodes[call.input](x.data, amax, count, packed, scales);
  }

  // Encode a panel of one row as encode_panel does, after its elements are divided by call.factors.
  bool encode_divided(View<Bits> x, const Rectangle& panel) const {
    if (amax_bits<In>(x, 1, panel.columns) >= Input<In>::kInfinity) return false;
    u32 quotients[kPanelColumns];
    const float* outer = call.factors + panel.row * call.block_step + panel.column / call.block;
    for (i64 end = call.block, i = 0; end <= panel.columns; end += call.block, ++outer)
      for (const float divisor = *outer; i < end; i += kRun)
        for (int j = 0; j < kRun; ++j) quotients[i + j] = bits_of(Input<In>::value(x.data[i + j]) / divisor);
    EncodeCall inner = call;
    inner.input = kFloat32;
    inner.factors = nullptr;
    return Encoder<Float32>{inner}.encode_panel({quotients, 0}, panel);
  }

  // Encode a panel: store its codes, and its scale codes if the call wants them. x.data[0] is the first element of the
  // panel. Return false if the panel needs the fallback, otherwise true.
  bool encode_panel(View<Bits> x, const Rectangle& panel) const {
    if (call.factors && call.block_rule >= 0) return encode_divided(x, panel);
    float found[kMaxPanelBlocks], block_factors[kMaxPanelBlocks], run_factors[kMaxPanelBlocks],
        reciprocals[kMaxPanelBlocks], corrections[kMaxPanelBlocks];
    u8 codes[kMaxPanelBlocks];
    const i64 count = (panel.columns + call.block - 1) / call.block, first = panel.column / call.block;
    const i64 block_row = panel.row / call.block_rows, given = block_row * call.block_step + first;
    // `amax`: the amaxes of the elements. `scale_amax`: the amaxes from which scales are computed; these are the given
    // block amaxes, if there are any.
    const float *amax = known.data ? known.data + block_row * known.step + first : found, *scale_amax = amax;
    Factors factors{block_factors};
    if (call.block_rule < 0) {
      const Bits bits = amax_bits<In>(x, panel.rows, panel.columns);
      if (bits >= Input<In>::kInfinity) return false;
      fill_factors(panel, given, count, block_factors);
      const float panel_amax[1] = {Input<In>::value(bits)};
      if (!keeps_finite(panel_amax, 0, block_factors, count)) return false;
    } else {
      if (!known.data && !find_block_amaxes(x, panel.rows, count, found)) return false;
      if (call.block_amax) scale_amax = call.block_amax + given;
      if (whole) return encode_whole(x, panel, scale_amax, first, count);
      if (!find_scales(x, panel.rows, count, scale_amax, tensor(panel.row), codes, block_factors)) return false;
      if (!keeps_finite(amax, 1, block_factors, count)) return false;
      if (call.scales)
        for (i64 i = 0; i < panel.rows; ++i)
          std::memcpy(call.scales + (panel.row + i) * call.scales_step + first, codes, count);
      factors.method = method_of(amax, block_factors, count);
    }
    factors.values = spread_factors(block_factors, count, run_factors);
    if (!factors.values) return false;
    if (element.then_encodes && !is_usable(tensor(panel.row).encode, true)) return false;
    if (factors.method == Method::multiplier) {
      factors.codes = codes;
      factors.multipliers = multipliers->of_code;
    } else if (factors.method == Method::fast && element.divides) {
      factors.reciprocals = reciprocals;
      factors.corrections = corrections;
      for (i64 i = 0; i < (panel.columns + kRun - 1) / kRun; ++i) {
        const Divisor divisor = divisor_of(factors.values[i]);
        reciprocals[i] = divisor.reciprocal, corrections[i] = divisor.correction;
      }
    }
    if (panel.rows == 1) prefetch(x.data + panel.columns, panel.columns);
    for (i64 i = 0; i < panel.rows; ++i) encode_row(x.data + i * x.step, panel, panel.row + i, factors);
    if (call.block_rule >= 0 && kBlockRules[call.block_rule].clears)
      clear_zero_blocks(panel, scale_amax, count, kBlockRules[call.block_rule].clears);
    if (call.block_rule >= 0 && kBlockRules[call.block_rule].selects_integers)
      encode_integer_blocks(x, panel, codes, block_factors, count);
    return true;
  }

  // Encode a tile, panel by panel: store its codes and scale codes. Return true if all panels were encoded. Return
  // false at the first panel that needs the fallback; the panels after it are not encoded.
  bool encode_tile(Rectangle tile) const {
    const View<Bits> x = view<In>(call.x, tile);
    if (is_flat && tile.columns == call.x.columns) tile = {0, 1, tile.row * tile.columns, tile.rows * tile.columns};
    if (call.block_rows > 1) touch(x, tile.rows, tile.columns);
    return for_each_panel(tile, call.block, call.block_rows, [&](Rectangle panel) {
      return encode_panel({x.data + panel.row * x.step + panel.column, x.step},
                          {tile.row + panel.row, panel.rows, tile.column + panel.column, panel.columns});
    });
  }
};

}  // namespace
