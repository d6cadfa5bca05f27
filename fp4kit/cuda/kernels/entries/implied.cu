// The amaxes that dequantize decodes with where each row or block has a tensor scale: the known ones where they give their scales, else
// those that the scales imply (rules/implied.cuh). A search for each run of elements would take longer than the elements.
#include "implied.cuh"

struct Arguments {
  const float* tensor_scale;
  const float* tensor_amax;  // null where not known
  float* amax;               // kUnknownAmax where no amax gives the scale
  i64 count;
};

template <class R, class Original>
FP4KIT_DEVICE void imply_amaxes(const Arguments& a, Grid grid) {
  for (i64 i = first_item(grid); i < a.count; i += item_stride(grid)) {
    bool is_known;
    const TensorScale t = known_tensor_scale<R, Original>(a.tensor_scale, a.tensor_amax, i, is_known);
    a.amax[i] = is_known ? t.amax : implied_amax<R, Original>(t.decode);
  }
}

extern "C" __global__ void __launch_bounds__(kThreads) implied_kernel(Arguments a) { imply_amaxes<R, Input>(a, whole_grid()); }
