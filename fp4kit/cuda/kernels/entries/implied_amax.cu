// The amaxes of many stored tensor scales: the known ones where they give their scales, else those that the scales
// imply (rules/implied_amax.cuh). dequantize decodes with them where each row or block has a scale, since a search for
// each run of elements would take longer than the elements; codes under given scales are made with them.
#include "implied_amax.cuh"

struct ImpliedAmaxArguments {
  const float* tensor_scale;
  const float* tensor_amax;  // null where not known
  float* amax;               // kUnknownAmax where no amax gives the scale
  i64 count;
};

template <class R, class Original>
FP4KIT_DEVICE void imply_amaxes(const ImpliedAmaxArguments& a, Grid grid) {
  for (i64 i = first_item(grid); i < a.count; i += item_stride(grid)) {
    const float decode = a.tensor_scale[i], known = a.tensor_amax ? a.tensor_amax[i] : kUnknownAmax;
    const bool is_known = a.tensor_amax && same_scale(R::TensorRule::template scale<R, Original>(known).decode, decode);
    a.amax[i] = is_known ? known : implied_amax<R, Original>(decode);
  }
}

extern "C" __global__ void __launch_bounds__(kThreads) implied_amax_kernel(ImpliedAmaxArguments a) {
  imply_amaxes<R, Input>(a, whole_grid());
}
