// Code that the grouped quantize kernels share. It handles tensors without elements, because their tensor scales must
// be written too.
#pragma once

#include "grouped.cuh"
#include "quantize.cuh"

// Return true if a tensor is empty. If it is, also store its tensor scales (unless R::kFake), because its quantize
// kernel would not. An empty tensor has 0 columns and as many rows as tensor scales.
template <class R, class In>
FP4KIT_DEVICE bool is_empty(const QuantizeArguments& a, Grid grid) {
  if (a.columns != 0) return false;
  if (!R::kFake && a.tensor_scale) {
    for (i64 i = first_item(grid); i < a.rows; i += item_stride(grid))
      store_tensor_scale(a, i, R::TensorRule::template scale<R, In>(amax_at(a.tensor_amax, i)));
  }
  return true;
}
