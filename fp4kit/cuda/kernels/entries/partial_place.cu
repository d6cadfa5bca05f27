// partial_place: copy codes from the gathered messages of other processes, which have computed them, to the matrices of
// codes. Only the codes that each sender owns are copied. A thread copies one run (kRun codes) at a time. R may be any
// recipe with the right number of bits per code. `a` holds the arguments for one sender: its message, the matrix and
// the elements that it owns.
#include "grouped.cuh"
#include "partial.cuh"

// The arguments of grouped_partial_place_kernel.
struct PartialPlaceArguments {
  const u8* from;  // the received codes; run i of the matrix is run from_at + i of this array
  u8* to;          // the codes of the matrices; run i of the matrix becomes run to_at + i
  i64 start, end;  // elements of the matrix that the sender owns
  i64 from_at, to_at;
};

// Copy codes that one process has sent from its message (a.from) to the matrix of codes (a.to): those that `grid`
// assigns to this thread block. Only the codes of elements a.start ... a.end - 1 of the matrix, which the sender owns,
// are copied; no other bit changes. A run has kWords words of codes.
template <int kWords>
FP4KIT_DEVICE void partial_place(const PartialPlaceArguments& a, Grid grid) {
  const u32 last = static_cast<u32>((a.end + kRun - 1) / kRun), stride = static_cast<u32>(item_stride(grid));
  const Range whole = whole_runs(a.start, a.end);
  for (u32 i = static_cast<u32>(a.start / kRun + first_item(grid)); i < last; i += stride) {
    u32 words[kWords];
    const u64* from = reinterpret_cast<const u64*>(a.from + (a.from_at + i) * sizeof words);
#pragma unroll
    for (int j = 0; j < kWords; j += 2) {
      const u64 pair = from[j / 2];
      words[j] = static_cast<u32>(pair);
      words[j + 1] = static_cast<u32>(pair >> 32);
    }
    u8* out = a.to + (a.to_at + i) * sizeof words;
    const i64 p = static_cast<i64>(i) * kRun;
    if (whole.has(i)) {
      store_words(out, words);
    } else {
      store_owned(out, words, a.start - p, a.end - p);
    }
  }
}

constexpr int kWords = kRun * R::Element::kStoredBits / 32;  // number of words of codes per run

// For each sender of the group, copy the codes that it owns from its message to its matrix of codes. Other codes do not
// change. The kernel is launched after the processes have exchanged their codes. A thread block takes one piece at a
// time. Launch with any number of thread blocks.
extern "C" __global__ void __launch_bounds__(kThreads)
    grouped_partial_place_kernel(Group<PartialPlaceArguments> group) {
  for_each_piece(group, [](const PartialPlaceArguments& a, Grid grid, bool) { partial_place<kWords>(a, grid); });
}
