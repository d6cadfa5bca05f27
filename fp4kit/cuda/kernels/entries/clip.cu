// clip: the backward pass of fake_quantize with a clip mask. `out` gets `grad` where |x| <= amax, compared in float32,
// and +0 elsewhere. If x or amax is NaN, `out` gets +0. `a` holds the kernel's arguments: the arrays grad, x, amax and
// out, and their sizes. Each amax applies to a.covered consecutive elements. A run is the neighboring elements that a
// thread loads at once.
#include "runs.cuh"

// The number of elements of a run. They are 16 bytes of the wider of the two types, so that a warp loads and stores
// whole lines of it.
template <class In, class GradIn>
constexpr int kClipRun = sizeof(typename In::Bits) + sizeof(typename GradIn::Bits) == 4 ? 8 : 4;

// The arguments of clip_kernel.
struct ClipArguments {
  const void* grad;    // count elements of the gradient's type, contiguous
  const void* x;       // count elements of x's type
  const float* amax;   // one amax per `covered` consecutive elements
  void* out;           // count elements of the gradient's type
  i64 count, covered;  // all elements, and elements per amax
};

// Change a run in place: set an element to +0 if its flag in `inside` is false. The other elements keep their bits.
template <class In, int kRun>
FP4KIT_DEVICE void mask_run(Run<In, kRun>& run, const bool (&inside)[kRun]) {
#pragma unroll
  for (int i = 0; i < run.kWords; ++i) {
    if constexpr (sizeof(typename In::Bits) == 4) {
      run.w[i] = inside[i] ? run.w[i] : 0u;
    } else {
      run.w[i] &= (inside[2 * i] ? 0x0000FFFFu : 0u) | (inside[2 * i + 1] ? 0xFFFF0000u : 0u);
    }
  }
}

// Store the clipped gradients of elements `first` ... `last` - 1 in a.out, one at a time. The clipped gradient is the
// gradient, with its bits unchanged, if |x| is at most the amax for the element. Otherwise it is +0, also if x or the
// amax is NaN.
template <class In, class GradIn>
FP4KIT_DEVICE void clip_elements(const ClipArguments& a, i64 first, i64 last) {
  i64 index = first / a.covered, next = (index + 1) * a.covered;
  for (i64 i = first; i < last; ++i) {
    if (i == next) {
      ++index;
      next += a.covered;
    }
    const bool inside = magnitude_of(In::widen(static_cast<const typename In::Bits*>(a.x)[i])) <= a.amax[index];
    const typename GradIn::Bits grad = static_cast<const typename GradIn::Bits*>(a.grad)[i];
    static_cast<typename GradIn::Bits*>(a.out)[i] = inside ? grad : typename GradIn::Bits{};
  }
}

// Store in a.out the clipped gradients of the whole runs that `grid` assigns to this thread block. The clipped gradient
// is the gradient, with its bits unchanged, if |x| is at most the amax, and otherwise +0 (also for NaN). Elements after
// the last whole run are left out.
//
// All arrays must begin at multiples of 16 bytes, and all elements of a run must have the same amax. A thread takes one
// run at a time, because loading several runs before using the first was slower.
template <class In, class GradIn>
FP4KIT_DEVICE void clip_runs(const ClipArguments& a, Grid grid) {
  constexpr int kRun = kClipRun<In, GradIn>;
  const i64 runs = a.count / kRun, covered_runs = a.covered >= a.count ? runs : a.covered / kRun;
  for (i64 run = first_item(grid); run < runs; run += item_stride(grid)) {
    const Run<In, kRun> x = read_run<In, kRun>(static_cast<const typename In::Bits*>(a.x) + run * kRun);
    Run<GradIn, kRun> grad = read_run<GradIn, kRun>(static_cast<const typename GradIn::Bits*>(a.grad) + run * kRun);
    const float amax = a.amax[covered_runs == runs ? 0 : quotient(run, covered_runs, runs)];
    bool inside[kRun];
#pragma unroll
    for (int i = 0; i < kRun; ++i) inside[i] = magnitude_of(element(x, i)) <= amax;
    mask_run<GradIn>(grad, inside);
    store_words(static_cast<typename GradIn::Bits*>(a.out) + run * kRun, grad.w);
  }
}

// Store in a.out the clipped gradients of the elements that `grid` assigns to this thread block: the gradient if |x| is
// at most the amax, and otherwise +0 (also for NaN). If kAligned, all arrays must begin at multiples of 16 bytes;
// clip_runs then stores the whole runs, unless a run has elements with different amaxes. clip_elements stores all other
// elements.
template <class In, class GradIn, bool kAligned>
FP4KIT_DEVICE void clip_gradient(const ClipArguments& a, Grid grid) {
  constexpr i64 kRun = kClipRun<In, GradIn>;
  i64 done = 0;
  if (kAligned && (a.covered >= a.count || a.covered % kRun == 0)) {
    clip_runs<In, GradIn>(a, grid);
    done = a.count / kRun * kRun;
  }
  for (i64 first = done + first_item(grid) * kRun; first < a.count; first += item_stride(grid) * kRun)
    clip_elements<In, GradIn>(a, first, minimum(first + kRun, a.count));
}

// Copy a.grad to a.out, but store +0 instead of the gradient wherever |x| exceeds the amax for the element, or x or the
// amax is NaN. The kernel is launched for fp4kit.fake_quantize_backward. A thread takes one run at a time. Launch with
// any number of thread blocks.
extern "C" __global__ void __launch_bounds__(kThreads) clip_kernel(ClipArguments a) {
  clip_gradient<Input, Gradient, kAligned>(a, whole_grid());
}
