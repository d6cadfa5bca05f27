// search_amaxes: for each amax of a tensor, an expert, a row or a block, find the multiple of the amax that gives the
// smallest loss. The loss is a sum of powers of rounding errors, or the largest rounding error. If there is one amax
// per block, the kernels treat each block as a row. `a` holds the arguments of the kernels: the arrays, their sizes and
// the multiples to try.
//
// The losses of elements are added in float64, as in reference/search.py: from the first element of a row to the
// last, and then from the first row to the last. Therefore one thread sums a whole row for one multiple, and
// neighboring threads sum the same row for the next multiples. Then a warp sums the losses of all rows that share an
// amax, with one multiple per thread.
#include "exact_path.cuh"
#include "fake.cuh"
#include "search_losses.cuh"

// The arguments of row_losses_kernel and least_losses_kernel. "null" means that the pointer is nullptr in that case.
struct SearchAmaxesArguments {
  const void* x;             // rows x columns elements
  const float* amax;         // the amaxes to search, one per rows_of_amax rows
  const float* tensor_amax;  // the amaxes of the tensor scale, one per rows_of_tensor rows, if the recipe has both
                             // block scales and a tensor scale
  const float* weights;      // one weight per column of `parts` consecutive rows (null without weights)
  const float* multiples;    // the candidates: the amax is multiplied by them
  double* losses;            // rows x count losses, for the multiples first ... first + count - 1
  double* least;             // for each amax: the smallest loss of the multiples tried so far
  float* out;                // for each amax: the amax times the multiple with that loss
  i64 rows, columns, rows_of_amax, rows_of_tensor, parts, first, count;
  double power;  // the exponent p of losses |d|^p
};

// The rule that quantizes and decodes elements for a given amax, in recipes without a fake quantizer of their own.
//
// - with_amax returns the rule for an amax. If the recipe has block scales, this is the amax of a block, and the tensor
//   scale is computed from *tensor_amax. Otherwise it is the amax from which the tensor scale is computed.
// - value_of returns the value to which element x is quantized. partner() returns the other element of the pair of x,
//   in formats whose elements lie in pairs.
template <class R, bool kOwn>
struct Values {
  Factor factor;
  typename R::DecodeRule::Scale scale;

  FP4KIT_DEVICE Values with_amax(float amax, const float* tensor_amax) {
    if constexpr (R::kHasScales) {
      const TensorScale t = tensor_scale_of<R, Float32>(tensor_amax, 0, 0, 0);
      const u32 code = R::BlockRule::template code<R, Float32>(amax, t);
      return {factor_of<R, Float32>(code, amax, t), R::DecodeRule::template scale<R>(code, t)};
    }
    const TensorScale t = R::TensorRule::template scale<R, Float32>(amax);
    return {factor_of_code<R, Float32>(0u, t), R::DecodeRule::template scale<R>(0u, t)};
  }
  template <class Partner>
  FP4KIT_DEVICE_MEMBER float value_of(float x, const Partner& partner) const {
    return exact_value<R>(exact_code_beside<R, Float32>(x, partner, factor, 0u), scale);
  }
};

// The rule that quantizes and decodes elements for a given amax, by the recipe's own fake quantizer.
template <class R>
struct Values<R, true> {
  FakeScale scale;

  FP4KIT_DEVICE Values with_amax(float amax, const float*) {
    return {R::FakeRule::template scale<R, Float32>(1.0f, amax)};
  }
  template <class Partner>
  FP4KIT_DEVICE_MEMBER float value_of(float x, const Partner&) const {
    return R::FakeRule::template value<R, Float32>(x, scale);
  }
};

// Combine the losses a and b of two sets of elements. Return the larger of the two if the objective is `largest`,
// otherwise their sum. The result is NaN if a or b is NaN.
template <Objective kObjective>
FP4KIT_DEVICE double combined_loss(double a, double b) {
  if constexpr (kObjective == Objective::largest) return a > b || a != a ? a : b;
  return a + b;
}

// Return the loss of one element from its residual y (its rounding error): |y|^power if the objective is `powers`, y^2
// if it is `squares`, and |y| otherwise. If kWeighted, the loss is multiplied by the number at the address `weight`,
// the weight of the element's column; otherwise `weight` is not read.
template <Objective kObjective, bool kWeighted>
FP4KIT_DEVICE double loss_of_element(double y, const float* weight, double power) {
  const double size = y < 0.0 ? -y : y;
  const double term = kObjective == Objective::powers    ? power_of(size, power)
                      : kObjective == Objective::squares ? size * size
                                                         : size;
  return kWeighted ? static_cast<double>(*weight) * term : term;
}

// Compute the loss of each row of a.x for a.count multiples of its amax, starting with multiple number a.first, and
// store it in a.losses (rows x count). The loss of a row combines the losses of its elements in order. It may be NaN.
template <class R, class In, Objective kObjective, bool kOwn, bool kWeighted>
FP4KIT_DEVICE void put_row_losses(const SearchAmaxesArguments& a) {
  for (i64 i = first_item(whole_grid()); i < a.rows * a.count; i += item_stride(whole_grid())) {
    const i64 row = i / a.count, multiple = a.first + i % a.count;
    const auto* x = static_cast<const typename In::Bits*>(a.x) + row * a.columns;
    const auto values = Values<R, kOwn>::with_amax(amax_at(a.amax, row / a.rows_of_amax) * a.multiples[multiple],
                                                   a.tensor_amax + row / a.rows_of_tensor);
    const float* weights = a.weights + row % a.parts * a.columns;
    double total = 0.0;
    for (i64 j = 0; j < a.columns; ++j) {
      const float element = In::widen(x[j]);
      const auto partner = [=] { return In::widen(x[j ^ 1]); };
      const double residual = static_cast<double>(element) - static_cast<double>(values.value_of(element, partner));
      const double loss = loss_of_element<kObjective, kWeighted>(residual, weights + j, a.power);
      total = j == 0 ? loss : combined_loss<kObjective>(total, loss);
    }
    a.losses[i] = total;
  }
}

// A multiple, given by its index, and its loss. A NaN loss is never the smallest.
struct BestMultiple {
  double loss;
  i64 multiple;
  // Replace this multiple and its loss by `other` if that has the smaller loss, or has an equal loss and comes first. A
  // NaN loss of `other` is never smaller.
  FP4KIT_DEVICE_MEMBER void keep_better(BestMultiple other) {
    if (other.loss < loss || (other.loss == loss && other.multiple < multiple)) *this = other;
  }
};

// For each amax, find the multiple with the smallest loss, and store the amax times that multiple in a.out and the loss
// in a.least. The losses of the rows that share an amax are combined. If several multiples have the smallest loss, the
// first one is taken.
//
// If a.first is not 0, earlier launches have tried other multiples; then a.out changes only if a multiple of this
// launch has a smaller loss than those. If a.first is 0 and no loss is below infinity (NaN is not), the first multiple
// is taken, with an infinite loss.
template <Objective kObjective>
FP4KIT_DEVICE void put_least(const SearchAmaxesArguments& a) {
  __shared__ BestMultiple all[kThreads];
  const u32 lane = threadIdx.x % 32u;
  const double infinity = float_of(kInfinityBits);
  for (i64 amax = first_item(whole_grid()) / 32; amax < a.rows / a.rows_of_amax;
       amax += item_stride(whole_grid()) / 32) {
    BestMultiple least = {a.first ? a.least[amax] : infinity, -1};
    for (i64 k = lane; k < a.count; k += 32) {
      const double* losses = a.losses + amax * a.rows_of_amax * a.count + k;
      double total = losses[0];
#pragma unroll 4
      for (i64 row = 1; row < a.rows_of_amax; ++row) total = combined_loss<kObjective>(total, losses[row * a.count]);
      if (total < least.loss) least = {total, a.first + k};
    }
    all[threadIdx.x] = least;
    __syncwarp();
    if (lane == 0u) {
      for (u32 i = 1u; i < 32u; ++i) least.keep_better(all[threadIdx.x + i]);
      if (least.multiple >= 0 || a.first == 0)
        a.out[amax] = amax_at(a.amax, amax) * a.multiples[least.multiple < 0 ? 0 : least.multiple];
      a.least[amax] = least.loss;
    }
    __syncwarp();
  }
}

constexpr Objective kObjective = objective_of(kMagnitudes, kLargest, kPowers);

// Compute the loss of each row of a.x for a.count multiples of its amax, and store it in a.losses. This is the first of
// two launches of a search; least_losses_kernel then reads a.losses. A thread processes one row with one multiple at a
// time. Launch with any number of thread blocks.
extern "C" __global__ void __launch_bounds__(kThreads) row_losses_kernel(SearchAmaxesArguments a) {
  put_row_losses<R, Input, kObjective, kOwn, kWeighted>(a);
}
// Combine a.losses over the rows that share an amax, and store the amax times the multiple with the smallest loss in
// a.out, and that loss in a.least. If a.first is not 0, a.out and a.least change only if this loss is smaller than the
// loss in a.least. This is the second launch of a search, after row_losses_kernel. A warp processes one amax at a time.
// Launch with any number of thread blocks.
extern "C" __global__ void __launch_bounds__(kThreads) least_losses_kernel(SearchAmaxesArguments a) {
  put_least<kObjective>(a);
}
