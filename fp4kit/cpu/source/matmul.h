// Matrix products D = C + A B^T with the additions of GPU matrix units, or in other orders.
//   K        the axis along which products are added
//   step     the elements along K whose products a matrix unit adds at once
//   term     one summand of a step, which is a product or the exact sum of a group of products
//   power    2^exponent of a number, as a double; decoded elements of zero have the power 0
//   panel    kProductLanes neighboring columns of D, which are computed at once, one per vector lane
//   chain    the steps whose products are added to one sum before that sum is added to the total in float32
//            ("promotion")
//   task     a tile of D that one thread computes
//   a        the decoded elements of a row of A
//   b        the decoded elements of a panel of columns
//   c        the sums of the row of `a` in the panel of b, one per lane
//   i        the index of a decoded element
//   k        an index along K
//
// The specification is fp4kit/reference/matmul.py. The arithmetic of terms is that of the CUDA kernels
// (cuda/kernels/rules/matmul_terms.cuh).
#pragma once

#include <algorithm>
#include <memory>
#include <vector>

#include "tiles.h"

// One operand of a product (A or B): rows of codes along K, and tables that say what the codes mean.
struct ProductOperand {
  const void* codes;           // the codes of the first row; 4-bit codes are stored two per byte, the first one low
  const u8* scales;            // the codes of the block scales of the first row; nullptr without block scales
  const float* factors;        // the tensor scale of each row; nullptr if all tensor scales are 1
  const float* chains;         // the scale of every chain (ProductCall::promote) of each row; nullptr without
  const double* values;        // the value of every element code
  const double* powers;        // 2^exponent of every element code
  const double* scale_values;  // the magnitude of every scale code; nullptr without block scales
  const double* scale_powers;  // 2^exponent of every scale code; nullptr without block scales
  i64 codes_step;              // the number of bytes from one row of codes to the next
  i64 scales_step;             // the number of bytes from one row of scales to the next
  i64 factors_step;            // 1 if every row has a factor of its own; 0 if all rows share one
  i64 chains_step;             // the number of chain scales from one row to the next
  i32 code_bits;               // the number of bits per code: 4, 8, 16 or, for float32, 32 (without tables)
  i32 block;                   // the number of elements per block scale
};

// The arguments of a product D (rows, columns) = C + A B^T. A row of the operand `a` is a row of A, and a row of `b` is
// a column of B^T. cpu/library.py mirrors this struct. The fields from fraction_bits to c_vanishes matter for the
// adders truncate, truncate_to_half, truncate_groups and floor only.
struct ProductCall {
  ProductOperand a, b;
  const float* c;             // C, contiguous; nullptr for zeros
  void* out;                  // D, contiguous
  i64 rows, columns, length;  // the sizes of D, and K; elements beyond K count as zeros
  Adder adder;
  i32 step;     // the number of elements along K per step
  i32 promote;  // the number of elements along K per chain; 0 for one chain over all of K
  // fraction_bits: the number of fraction bits kept for each term after alignment to the largest exponent. output_bits:
  // the number of fraction bits to which a sum is truncated; for floor, FloorDotAdd.sum_bits.
  i32 fraction_bits, output_bits;
  // zero_exponent: the exponent of a term that is zero. sums and c_vanishes are for floor only. sums: the number of
  // partial sums to which the products of a step are dealt in turn. c_vanishes: 1 if C counts as 0 when its exponent is
  // far below the largest.
  // group: the number of products per term, for truncate_groups.
  // in_turn: 1 to multiply a sum by the factor of its column and then by that of its row, 0 by their product.
  i32 zero_exponent, sums, c_vanishes, group, in_turn;
  i32 output;  // the dtype of `out`, as an index of with_input_type
  i32 input;   // the dtype of A in the same way, for the adder mlx_cpu only
};

namespace {

constexpr int kProductLanes = 16;  // number of columns of a panel
constexpr i64 kProductRows = 64;   // largest number of rows of a task
// The largest number of elements along K that are decoded at once. It is a multiple of every block size.
constexpr i64 kProductDepth = 512;

// At most kProductDepth decoded elements along K, for a panel of columns or for one row. Each lane holds one column or,
// if kLanes is 1, the row. The first index of an array is that of the decoded element.
template <int kLanes>
struct ProductPanel {
  double values[kProductDepth][kLanes];   // each element times its block scale
  double powers[kProductDepth][kLanes];   // 2^exponent of each element, times that of its scale; 0 for a value of zero
  float elements[kProductDepth][kLanes];  // each element without its block scale
  // The block scale of every 16 elements, and 2^exponent of the scale. Both are 0 for a scale of zero and beyond the
  // operand, and 1 without block scales.
  double scales[kProductDepth / 16][kLanes], scale_powers[kProductDepth / 16][kLanes];

  // Decode `depth` elements, starting at index `start` along K, of `count` rows of the operand x, starting at row
  // `first`, and store them in the arrays of this struct. Row first + lane goes to lane `lane`. `length` is K. Lanes
  // from `count` on, and elements from `length` on, count as zeros.
  void decode(const ProductOperand& x, i64 first, i64 count, i64 start, i64 depth, i64 length) {
    for (int lane = 0; lane < kLanes; ++lane) {
      const i64 row = first + (lane < count ? lane : 0), end = lane < count ? std::min(depth, length - start) : 0;
      const u8* codes = static_cast<const u8*>(x.codes) + row * x.codes_step;
      const u8* scale_codes = x.scales ? x.scales + row * x.scales_step : nullptr;
      double scale = 1, power = 1;
      for (i64 i = 0; i < depth; ++i) {
        if (i < end && scale_codes && (i == 0 || (start + i) % x.block == 0)) {
          const u8 code = scale_codes[(start + i) / x.block];
          scale = x.scale_values[code];
          power = scale == 0 ? 0 : x.scale_powers[code];
        }
        const auto [element, own_power] = i < end ? element_at(x, codes, start + i) : std::pair<double, double>();
        elements[i][lane] = static_cast<float>(element);
        values[i][lane] = element * scale;
        powers[i][lane] = element == 0 ? 0 : own_power * power;
        if (i % 16 == 0) {
          scales[i / 16][lane] = i < end ? scale : 0;
          scale_powers[i / 16][lane] = i < end ? power : 0;
        }
      }
    }
  }

  // Return element k of the row of codes that begins at `codes`, and 2^exponent of the element.
  static std::pair<double, double> element_at(const ProductOperand& x, const u8* codes, i64 k) {
    if (x.code_bits == 32) {
      const float value = reinterpret_cast<const float*>(codes)[k];
      return {value, term_power(value, 0x1p-126)};
    }
    const unsigned code = code_at(x, codes, k);
    return {x.values[code], x.powers[code]};
  }

  // Return code number k of the row of codes that begins at `codes`. Codes of x have 4, 8 or 16 bits (x.code_bits).
  static unsigned code_at(const ProductOperand& x, const u8* codes, i64 k) {
    if (x.code_bits == 4) return codes[k >> 1] >> (k & 1 ? 4 : 0) & 15;
    return x.code_bits == 8 ? codes[k] : reinterpret_cast<const u16*>(codes)[k];
  }
};

using Columns = ProductPanel<kProductLanes>;
using Row = ProductPanel<1>;

// Functions that add one step to the sums of one row of a panel. Each function adds call.step products per lane
// (add_float64 and add_float32: one product), starting at decoded element i, to the sums at c. A sum is any double for
// Adder::float64; for all other adders, it is a double that float32 can represent.
struct Adders {
  const ProductCall& call;
  // zero_power: the power of a term that is zero. unit: the last bit that a term keeps, relative to the largest power.
  const double zero_power = double_power(call.zero_exponent);
  const double unit = double_power(-call.fraction_bits);

  // Return the power of the product of two elements with the powers a and b, which is a * b. If an element is zero, its
  // power is 0; the result is then zero_power.
  double power_of_term(double a, double b) const {
    const double power = a * b;
    return power == 0 ? zero_power : power;
  }

  // Add the products of one step of a and b, starting at decoded element i, to the sums c as NVIDIA's matrix units do.
  // Every product is a term. c and the terms are aligned to the largest exponent among them, truncated toward zero to
  // call.fraction_bits and added. The sum is truncated to call.output_bits, or rounded to float16, and stored in c.
  void truncate(const Row& a, const Columns& b, i64 i, double* c) const {
    double largest[kProductLanes], inverse[kProductLanes], sum[kProductLanes];
    for (int l = 0; l < kProductLanes; ++l) largest[l] = sum_power(c[l], zero_power);
    for (i64 k = i; k < i + call.step; ++k) {
      for (int l = 0; l < kProductLanes; ++l) {
        const double power = power_of_term(a.powers[k][0], b.powers[k][l]);
        largest[l] = power > largest[l] ? power : largest[l];
      }
    }
    for (int l = 0; l < kProductLanes; ++l) {
      inverse[l] = over(call.fraction_bits, largest[l]);
      sum[l] = toward_zero(c[l] * inverse[l]);
    }
    for (i64 k = i; k < i + call.step; ++k) {
      for (int l = 0; l < kProductLanes; ++l) sum[l] += toward_zero(a.values[k][0] * b.values[k][l] * inverse[l]);
    }
    for (int l = 0; l < kProductLanes; ++l) sum[l] *= largest[l] * unit;
    if (call.adder == Adder::truncate_to_half) {
      for (int l = 0; l < kProductLanes; ++l) c[l] = rounded_to_half(sum[l]);
    } else {
      for (int l = 0; l < kProductLanes; ++l) c[l] = truncated_sum(sum[l], call.output_bits);
    }
  }

  // Add the products of one step of a and b, starting at decoded element i, to the sums c as NVIDIA's FP4 units do. A
  // term is the exact sum of call.group products of elements, times the product of both block scales. Its exponent is
  // that of this product of scales, or call.zero_exponent if all its products are zero or a scale is zero. c and the
  // terms are aligned to the largest exponent among them, truncated toward zero to call.fraction_bits and added. The
  // sum is truncated to call.output_bits and stored in c. i and call.step must be multiples of 16, and call.step at
  // most 128. call.group is 4 or 16.
  void truncate_groups(const Row& a, const Columns& b, i64 i, double* c) const {
    constexpr int kMost = 32;  // the most groups per step
    double terms[kMost][kProductLanes], largest[kProductLanes];
    for (int l = 0; l < kProductLanes; ++l) largest[l] = sum_power(c[l], zero_power);
    const int groups = call.step / call.group;
    for (int g = 0; g < groups; ++g) {
      float sum[kProductLanes] = {}, any[kProductLanes] = {};  // exact: multiples of 1/4 up to 576
      const i64 start = i + call.group * g;
      for (i64 k = start; k < start + call.group; ++k) {
        const float value = a.elements[k][0], magnitude = std::fabs(value);
        for (int l = 0; l < kProductLanes; ++l) {
          sum[l] += value * b.elements[k][l];
          any[l] += magnitude * std::fabs(b.elements[k][l]);
        }
      }
      const i64 group = start / 16;
      for (int l = 0; l < kProductLanes; ++l) {
        const double both = a.scale_powers[group][0] * b.scale_powers[group][l];
        const double power = any[l] == 0 || both == 0 ? zero_power : both;
        terms[g][l] = sum[l] * (a.scales[group][0] * b.scales[group][l]);
        largest[l] = power > largest[l] ? power : largest[l];
      }
    }
    for (int l = 0; l < kProductLanes; ++l) {
      const double inverse = over(call.fraction_bits, largest[l]);
      double sum = toward_zero(c[l] * inverse);
      for (int g = 0; g < groups; ++g) sum += toward_zero(terms[g][l] * inverse);
      c[l] = truncated_sum(sum * (largest[l] * unit), call.output_bits);
    }
  }

  // Add the products of one step of a and b, starting at decoded element i, to the sums c as the matrix units of CDNA3
  // do (FloorDotAdd of fp4kit/units.py). The products are dealt in turn to call.sums (1 or 2) partial sums. Each
  // product is truncated toward zero to call.fraction_bits below the largest power of its partial sum; floored_sum then
  // adds the partial sums to c. If call.sums is 1, products of 2^128 and more count as infinite.
  void floor(const Row& a, const Columns& b, i64 i, double* c) const {
    for (int l = 0; l < kProductLanes; ++l) {
      double largest[2] = {0, 0}, sums[2] = {0, 0};
      for (i64 k = i; k < i + call.step; ++k) {
        double& top = largest[(k - i) % call.sums];
        top = std::max(top, power_of_term(a.powers[k][0], b.powers[k][l]));
      }
      for (i64 k = i; k < i + call.step; ++k) {
        const int s = (k - i) % call.sums;
        double product = a.values[k][0] * b.values[k][l];
        if (call.sums == 1 && std::fabs(product) >= 0x1p128) product *= HUGE_VAL;
        sums[s] += toward_zero(product * over(call.fraction_bits, largest[s]));
      }
      c[l] = floored_sum(c[l], sums, largest, call.sums, call.fraction_bits, call.output_bits, call.c_vanishes != 0);
    }
  }

  // In each lane, multiply decoded element i of a by that of b, and add the product to the sum c, in float64.
  void add_float64(const Row& a, const Columns& b, i64 i, double* c) const {
    for (int l = 0; l < kProductLanes; ++l) c[l] += a.values[i][0] * b.values[i][l];
  }

  // In each lane, multiply decoded element i of a by that of b, and add the product to the sum c, in float32. Both
  // elements are rounded to float32 first.
  void add_float32(const Row& a, const Columns& b, i64 i, double* c) const {
    const float value = static_cast<float>(a.values[i][0]);
    for (int l = 0; l < kProductLanes; ++l) {
      const float product = value * static_cast<float>(b.values[i][l]);
      c[l] = static_cast<float>(c[l]) + product;
    }
  }

  // In each lane, multiply the block of a that begins at decoded element i by that of b, and add the result to the sum
  // c, in float32. The result is the float32 sum of the products of elements, times the product of both block scales. A
  // block has call.step elements.
  void add_float32_blocks(const Row& a, const Columns& b, i64 i, double* c) const {
    float sum[kProductLanes] = {};
    for (i64 k = i; k < i + call.step; ++k) {
      for (int l = 0; l < kProductLanes; ++l) sum[l] += a.elements[k][0] * b.elements[k][l];
    }
    for (int l = 0; l < kProductLanes; ++l) {
      const float scale = static_cast<float>(a.scales[i / 16][0]) * static_cast<float>(b.scales[i / 16][l]);
      const float product = scale * sum[l];
      c[l] = static_cast<float>(c[l]) + product;
    }
  }

  // Add the products of one step of a and b, starting at decoded element i, to the sums c, by the adder of the call
  // (call.adder). Do nothing for Adder::exact, whose sums ProductTask::add_exact computes, and for the adders of
  // EngineTask.
  void add(const Row& a, const Columns& b, i64 i, double* c) const {
    switch (call.adder) {
      case Adder::truncate:
      case Adder::truncate_to_half:
        return truncate(a, b, i, c);
      case Adder::truncate_groups:
        return truncate_groups(a, b, i, c);
      case Adder::floor:
        return floor(a, b, i, c);
      case Adder::float64:
        return add_float64(a, b, i, c);
      case Adder::float32:
        return add_float32(a, b, i, c);
      case Adder::float32_blocks:
        return add_float32_blocks(a, b, i, c);
      default:
        return;
    }
  }
};

// Return the total of D[row, column] after chain number `chain`, whose sum is `sum`. Scales of chains multiply it, in
// turn or by their product, and a fused multiply-add adds it. `total` is the total before.
float promoted(const ProductCall& call, i64 row, i64 column, i64 chain, float total, float sum) {
  if (!call.a.chains) return total + sum;
  const float x = call.a.chains[row * call.a.chains_step + chain];
  const float y = call.b.chains[column * call.b.chains_step + chain];
  return call.in_turn ? __builtin_fmaf(sum * x, y, total) : __builtin_fmaf(sum, x * y, total);
}

// Store x as element `index` of call.out, rounded to nearest even in the dtype of the output. Every NaN is stored as
// 0x7FFFFFFF, or as 0x7FFF if the output has 16 bits.
void store(const ProductCall& call, i64 index, float x) {
  with_input_type(call.output, [&](auto in) {
    using In = Input<decltype(in)>;
    using Bits = typename In::Bits;
    static_cast<Bits*>(call.out)[index] =
        x != x ? static_cast<Bits>(0x7FFFFFFF >> (32 - 8 * sizeof(Bits))) : In::narrow(x);
  });
}

// The tasks of a call. A task computes a tile of D: at most kProductRows rows, and at most kPanels panels of columns.
// The struct has no memory of its own, so threads may run different tasks at the same time.
struct ProductTask {
  static constexpr int kPanels = 4;  // largest number of panels of a task
  const ProductCall& call;
  Adders adders{call};

  // The memory of a task: the decoded elements of its columns and of one row, the sums of the current chains and, with
  // promotion, the totals of the completed chains.
  struct Memory {
    Columns columns[kPanels];
    Row row;
    double sums[kProductRows][kPanels][kProductLanes], totals[kProductRows][kPanels][kProductLanes];
  };

  // Return the number of tasks that lie next to each other across the columns of D.
  i64 panels() const { return (call.columns + kPanels * kProductLanes - 1) / (kPanels * kProductLanes); }
  // Return the number of all tasks.
  i64 count() const { return panels() * ((call.rows + kProductRows - 1) / kProductRows); }

  // Compute the tile of D that belongs to task `index`, and store it in call.out.
  void run(i64 index) const {
    auto memory = std::make_unique<Memory>();
    const i64 first_row = index / panels() * kProductRows, first = index % panels() * kPanels * kProductLanes;
    const i64 rows = std::min(kProductRows, call.rows - first_row),
              columns = std::min<i64>(kPanels * kProductLanes, call.columns - first);
    const int used = static_cast<int>((columns + kProductLanes - 1) / kProductLanes);
    const i64 chunk = kProductDepth / call.step * call.step;
    std::vector<ExactSum> exact(call.adder == Adder::exact ? rows * columns : 0);
    start(*memory, first_row, rows, first, columns, exact);
    for (i64 k = 0; k < call.length; k += chunk) {
      const i64 depth = std::min(chunk, (call.length - k + call.step - 1) / call.step * call.step);
      for (int p = 0; p < used; ++p) {
        const i64 column = first + p * kProductLanes;
        memory->columns[p].decode(call.b, column, std::min<i64>(kProductLanes, call.columns - column), k, depth,
                                  call.length);
      }
      for (i64 r = 0; r < rows; ++r) {
        memory->row.decode(call.a, first_row + r, 1, k, depth, call.length);
        if (call.adder == Adder::exact) {
          add_exact(*memory, depth, columns, exact.data() + r * columns);
        } else {
          for (int p = 0; p < used; ++p) add_row(*memory, r, p, first_row + r, first + p * kProductLanes, k, depth);
        }
      }
    }
    finish(*memory, first_row, rows, first, columns, exact);
  }

  // Initialize the sums of a task with C, or with zeros if the call has no C. The sums are in m and, for Adder::exact,
  // in `exact`. With promotion, C initializes the totals instead, and the sums begin with zeros. The task computes
  // `rows` rows and `columns` columns of D, starting at row first_row and column `first`.
  void start(Memory& m, i64 first_row, i64 rows, i64 first, i64 columns, std::vector<ExactSum>& exact) const {
    std::memset(m.sums, 0, sizeof m.sums);
    std::memset(m.totals, 0, sizeof m.totals);
    if (!call.c) return;
    auto& sums = call.promote ? m.totals : m.sums;
    for (i64 r = 0; r < rows; ++r) {
      for (i64 j = 0; j < columns; ++j) {
        const float c = call.c[(first_row + r) * call.columns + first + j];
        sums[r][j / kProductLanes][j % kProductLanes] = c;
        if (call.adder == Adder::exact) exact[r * columns + j].add(c);
      }
    }
  }

  // Add the products of the decoded row in m and each of its `columns` decoded columns to the exact sums of that row:
  // sums[j] for column j. `depth` elements are decoded along K.
  void add_exact(const Memory& m, i64 depth, i64 columns, ExactSum* sums) const {
    for (i64 j = 0; j < columns; ++j) {
      const Columns& b = m.columns[j / kProductLanes];
      for (i64 i = 0; i < depth; ++i) sums[j].add(m.row.values[i][0] * b.values[i][j % kProductLanes]);
    }
  }

  // Add the products of the `depth` decoded elements in m, which start at index k along K, to the sums of row r of
  // panel p, step by step. With promotion, the sums of each chain that ends are added to the totals and set to 0. `row`
  // is the row of D, and `first` the first column of the panel.
  void add_row(Memory& m, i64 r, int p, i64 row, i64 first, i64 k, i64 depth) const {
    double* c = m.sums[r][p];
    for (i64 i = 0; i < depth; i += call.step) {
      adders.add(m.row, m.columns[p], i, c);
      if (call.promote && ((k + i + call.step) % call.promote == 0 || k + i + call.step >= call.length)) {
        const int lanes = static_cast<int>(std::min<i64>(kProductLanes, call.columns - first));
        for (int l = 0; l < lanes; ++l) {
          m.totals[r][p][l] = promoted(call, row, first + l, (k + i) / call.promote,
                                       static_cast<float>(m.totals[r][p][l]), static_cast<float>(c[l]));
          if (call.adder == Adder::truncate_to_half) m.totals[r][p][l] = rounded_to_half(m.totals[r][p][l]);
          c[l] = 0;
        }
      }
    }
  }

  // Multiply a sum by the product of the tensor scales of its row and its column, and store it as D[row, column] in the
  // dtype of the output. An operand without tensor scales counts as 1.
  void put(i64 row, i64 column, float sum) const {
    const float* fa = call.a.factors;
    const float* fb = call.b.factors;
    if (fa && fb) {
      const float of_row = fa[row * call.a.factors_step], of_column = fb[column * call.b.factors_step];
      sum = call.in_turn ? sum * of_column * of_row : sum * (of_row * of_column);
    } else if (fa || fb) {
      sum *= fa ? fa[row * call.a.factors_step] : fb[column * call.b.factors_step];
    }
    store(call, row * call.columns + column, sum);
  }

  // Multiply all sums of a task by the tensor scales, and store them in D. For Adder::exact, the sums are in `exact`.
  // Otherwise they are in m: the totals with promotion, else the sums. The task has `rows` rows and `columns` columns
  // of D, starting at row first_row and column `first`.
  void finish(Memory& m, i64 first_row, i64 rows, i64 first, i64 columns, std::vector<ExactSum>& exact) const {
    const auto& sums = call.promote ? m.totals : m.sums;
    for (i64 r = 0; r < rows; ++r) {
      for (i64 j = 0; j < columns; ++j) {
        const i64 row = first_row + r, column = first + j;
        float x = static_cast<float>(sums[r][j / kProductLanes][j % kProductLanes]);
        if (call.adder == Adder::exact) x = exact[r * columns + j].rounded();
        put(row, column, x);
      }
    }
  }
};

// ---- products of engines on a CPU ----

// Return whether EngineTask computes a call.
bool is_engine(const ProductCall& call) {
  return call.adder >= Adder::mlx_cpu;
}

// The tasks of a call whose sums MLX or llama.cpp defines (sum_mlx_cpu, sum_ggml_avx2 and sum_ggml_avx2_repacked of the
// specification). A task computes one panel of columns for some rows; its decoded columns cover all of K.
struct EngineTask {
  static constexpr i64 kLanes = kProductLanes, kAtOnce = 4;  // kAtOnce: rows whose sums are computed at once, for speed
  const ProductCall& call;

  i64 panels() const { return (call.columns + kLanes - 1) / kLanes; }
  i64 count() const { return panels() * ((call.rows + kProductRows - 1) / kProductRows); }

  // Compute the tile of D that belongs to task `index`, and store it in call.out.
  void run(i64 index) const {
    const i64 first = index % panels() * kLanes, columns = std::min(kLanes, call.columns - first);
    const i64 first_row = index / panels() * kProductRows, rows = std::min(kProductRows, call.rows - first_row);
    const i64 blocks = call.length / call.b.block;
    std::vector<float> b(call.length * kLanes), scales(blocks * kLanes), a(kAtOnce * call.length);
    const float times = call.adder == Adder::mlx_cpu ? 1 : 2;  // llama.cpp doubles E2M1; Python has halved the scales
    for (i64 lane = 0; lane < columns; ++lane) {
      const u8* codes = static_cast<const u8*>(call.b.codes) + (first + lane) * call.b.codes_step;
      const u8* scale_codes = call.b.scales + (first + lane) * call.b.scales_step;
      for (i64 k = 0; k < call.length; ++k)
        b[k * kLanes + lane] = static_cast<float>(Row::element_at(call.b, codes, k).first) * times;
      for (i64 i = 0; i < blocks; ++i)
        scales[i * kLanes + lane] = static_cast<float>(call.b.scale_values[scale_codes[i]]);
    }
    std::vector<float> d(kAtOnce * (call.length / 32 + 1));
    for (i64 row = first_row; row < first_row + rows; row += kAtOnce) {
      const i64 used = std::min(kAtOnce, first_row + rows - row);
      for (i64 r = 0; r < used; ++r) {
        const u8* codes = static_cast<const u8*>(call.a.codes) + (row + r) * call.a.codes_step;
        for (i64 k = 0; k < call.length; ++k)
          a[r * call.length + k] = static_cast<float>(Row::element_at(call.a, codes, k).first);
        if (times == 2) quantize_q8_0(&a[r * call.length], &d[r * (call.length / 32)]);
      }
      float sums[kAtOnce][kLanes] = {};
      if (call.adder == Adder::mlx_cpu) {
        with_input_type(call.input, [&](auto in) { add_mlx<decltype(in)>(a.data(), b.data(), scales.data(), sums); });
      } else {
        for (i64 r = 0; r < used; ++r)
          add_ggml(&a[r * call.length], &d[r * (call.length / 32)], b.data(), scales.data(), sums[r]);
      }
      for (i64 r = 0; r < used; ++r)
        for (i64 lane = 0; lane < columns; ++lane) ProductTask{call}.put(row + r, first + lane, sums[r][lane]);
    }
  }

  // Add kAtOnce rows a times the columns b to `sums`, with every result rounded to the type In.
  template <class In>
  void add_mlx(const float* a, const float* b, const float* scales, float (*sums)[kLanes]) const {
    for (i64 i = 0; i < call.length / call.b.block; ++i) {
      float group[kAtOnce][kLanes] = {};
      for (i64 k = i * call.b.block; k < (i + 1) * call.b.block; ++k) {
        for (i64 r = 0; r < kAtOnce; ++r)
          for (int l = 0; l < kLanes; ++l)
            group[r][l] = round_to<In>(group[r][l] + round_to<In>(a[r * call.length + k] * b[k * kLanes + l]));
      }
      for (i64 r = 0; r < kAtOnce; ++r)
        for (int l = 0; l < kLanes; ++l) {
          const float scale = round_to<In>(scales[i * kLanes + l]);
          sums[r][l] = round_to<In>(sums[r][l] + round_to<In>(scale * group[r][l]));
        }
    }
  }

  // Replace the row x by its codes in Q8_0, and store the scale of each 32 elements in d.
  void quantize_q8_0(float* x, float* d) const {
    const auto larger = [](float p, float q) { return p > q ? p : q; };  // maxps: q if one of them is NaN
    for (i64 i = 0; i < call.length / 32; ++i) {
      float amax[8], *block = x + 32 * i;
      for (int j = 0; j < 8; ++j) amax[j] = std::fabs(block[j]);
      for (int j = 8; j < 32; ++j) amax[j % 8] = larger(amax[j % 8], std::fabs(block[j]));
      for (int j = 0; j < 4; ++j) amax[j] = larger(amax[j + 4], amax[j]);
      const float most = larger(larger(amax[0], amax[2]), larger(amax[1], amax[3]));
      const float inverse = most == 0 ? 0.0f : 127.0f / most;
      d[i] = round_to<Float16>(most / 127.0f);
      for (int j = 0; j < 32; ++j) {
        const float code = std::nearbyint(block[j] * inverse);
        block[j] = std::fabs(code) < 0x1p31f ? std::min(std::max(code, -128.0f), 127.0f) : -128.0f;
      }
    }
  }

  // Store the product of a row in Q8_0 (codes a, scales d) and the columns b in `sums`. Sums of integers are exact.
  void add_ggml(const float* a, const float* d, const float* b, const float* scales, float* sums) const {
    const i64 blocks = call.length / 32;
    const bool is_repacked = call.adder == Adder::ggml_avx2_repacked, is_mx = call.b.block == 32;
    const i64 paired = is_repacked ? 0 : is_mx ? blocks - blocks % 2 : blocks;
    float lanes[2][8][kLanes] = {};
    for (i64 i = 0; i < paired; ++i)
      for (i64 j = 0; j < 8; ++j) {
        const i64 k = 32 * i + 4 * j;
        add_integers<true>(a + k, b + k * kLanes, 4, d[i], scales + (is_mx ? i : 2 * i + j / 4) * kLanes,
                           lanes[is_mx ? i % 2 : 0][j]);
      }
    for (int l = 0; l < kLanes && paired; ++l) {
      float s[8];
      for (int j = 0; j < 8; ++j) s[j] = is_mx ? lanes[0][j][l] + lanes[1][j][l] : lanes[0][j][l];
      sums[l] = ((s[4] + s[0]) + (s[6] + s[2])) + ((s[5] + s[1]) + (s[7] + s[3]));
    }
    for (i64 i = paired; i < blocks; ++i)
      add_integers<false>(a + 32 * i, b + 32 * i * kLanes, 32, d[i], scales + i * kLanes, sums);
  }

  // In each lane, multiply `count` integers of a by those of b, and add their sum times d times the scale to `to`, by a
  // fused multiply-add. kWraps: whether -128 in `a` multiplies magnitudes of b, as it does after the instruction
  // psignb.
  template <bool kWraps>
  static void add_integers(const float* a, const float* b, int count, float d, const float* scale, float* to) {
    float sum[kLanes] = {};
    for (int k = 0; k < count; ++k) {
      const u32 kept = kWraps && a[k] == -128.0f ? 0x7FFFFFFFu : 0xFFFFFFFFu;
      for (int l = 0; l < kLanes; ++l) sum[l] += a[k] * float_of(bits_of(b[k * kLanes + l]) & kept);
    }
    for (int l = 0; l < kLanes; ++l) to[l] = __builtin_fmaf(sum[l], d * scale[l], to[l]);
  }
};

// The tasks of several calls, numbered one after the other, so that all threads can share them.
class ProductTasks {
  struct Part {
    const ProductCall* call;
    i64 end;  // the number of tasks of this call and of those before it
    void (*run)(const ProductCall&, i64);
  };
  std::vector<Part> parts_;

 public:
  // Add the tasks of a call. Task: the class that computes the call, such as ProductTask. The call is kept as a
  // pointer, so it must outlive this object.
  template <class Task>
  void add(const ProductCall& call) {
    const auto run_task = [](const ProductCall& product, i64 index) { Task{product}.run(index); };
    parts_.push_back({&call, count() + Task{call}.count(), run_task});
  }

  // Return the number of all tasks.
  i64 count() const { return parts_.empty() ? 0 : parts_.back().end; }

  // Compute the tile that belongs to task `index`, and store it in the `out` of its call.
  void run(i64 index) const {
    const auto is_before = [](i64 i, const Part& part) { return i < part.end; };
    const auto part = std::upper_bound(parts_.begin(), parts_.end(), index, is_before);
    part->run(*part->call, part == parts_.begin() ? index : index - (part - 1)->end);
  }
};

}  // namespace
