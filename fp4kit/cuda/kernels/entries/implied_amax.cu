// implied_amax: find, for each stored tensor scale, an amax (largest magnitude) for which the recipe's tensor rule
// gives that scale. A given amax is kept if the rule gives the stored scale for it. Otherwise the amax is computed from
// the scale (rules/implied_amax.cuh). `a` holds the kernel's arguments: tensor_scale, tensor_amax (or nullptr), amax
// and their length.
#include "implied_amax.cuh"

// The arguments of implied_amax_kernel. "null" means that the pointer is nullptr in that case.
struct ImpliedAmaxArguments {
  const float* tensor_scale;
  const float* tensor_amax;  // null if not known
  float* amax;               // result; kUnknownAmax if no amax gives the scale
  i64 count;
};

// Store in a.amax an amax for each tensor scale of a.tensor_scale that `grid` assigns to this thread block. If
// a.tensor_amax is not null and the recipe's tensor rule gives the stored scale for its amax, that amax is stored.
// Otherwise the amax is computed from the scale, and is kUnknownAmax if no amax gives the scale. Original is the type
// of the array that was quantized, because some tensor rules round to it.
template <class R, class Original>
FP4KIT_DEVICE void imply_amaxes(const ImpliedAmaxArguments& a, Grid grid) {
  for (i64 i = first_item(grid); i < a.count; i += item_stride(grid)) {
    const float decode = a.tensor_scale[i], known = a.tensor_amax ? a.tensor_amax[i] : kUnknownAmax;
    const bool is_known = a.tensor_amax && same_scale(R::TensorRule::template scale<R, Original>(known).decode, decode);
    a.amax[i] = is_known ? known : implied_amax<R, Original>(decode);
  }
}

// Store in a.amax, for each tensor scale of a.tensor_scale, an amax for which the recipe gives this scale, or
// kUnknownAmax if there is none. A given amax in a.tensor_amax is kept if it gives the scale. The kernel is launched
// before dequantize_kernel if each row or block has a tensor scale, because finding the amax for every run would take
// longer than decoding the elements. The kernel is also launched before quantize_with_scales_kernel, which encodes with
// these amaxes. A thread takes one scale at a time. Launch with any number of thread blocks.
extern "C" __global__ void __launch_bounds__(kThreads) implied_amax_kernel(ImpliedAmaxArguments a) {
  imply_amaxes<R, Input>(a, whole_grid());
}
