// implied_amax: the amaxes of many stored tensor scales. An amax that is known and gives its scale is kept; otherwise
// the one that the scale implies is found (rules/implied_amax.cuh). dequantize uses them if each row or block has a
// scale, because a search per run would take longer than the elements. quantize_with_scales encodes with them.
#include "implied_amax.cuh"

// Arguments of the kernel.
struct ImpliedAmaxArguments {
  const float* tensor_scale;
  const float* tensor_amax;  // null if not known
  float* amax;               // result; kUnknownAmax if no amax gives the scale
  i64 count;
};

// Find the amax of each tensor scale.
template <class R, class Original>
FP4KIT_DEVICE void imply_amaxes(const ImpliedAmaxArguments& a, Grid grid) {
  for (i64 i = first_item(grid); i < a.count; i += item_stride(grid)) {
    const float decode = a.tensor_scale[i], known = a.tensor_amax ? a.tensor_amax[i] : kUnknownAmax;
    const bool is_known = a.tensor_amax && same_scale(R::TensorRule::template scale<R, Original>(known).decode, decode);
    a.amax[i] = is_known ? known : implied_amax<R, Original>(decode);
  }
}

// Launch with any grid.
extern "C" __global__ void __launch_bounds__(kThreads) implied_amax_kernel(ImpliedAmaxArguments a) {
  imply_amaxes<R, Input>(a, whole_grid());
}
