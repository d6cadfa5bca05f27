// The Hadamard transform of each run of 16 elements, and whether sums in float32 told it: for tests of hadamard.cuh alone.
struct Arguments {
  const void* x;  // runs x 16 elements
  void* y;        // their transforms
  u8* is_short;   // one a run
  i64 runs;
};

extern "C" __global__ void hadamard_kernel(Arguments a) {
  const Grid grid = whole_grid();
  using Bits = typename Input::Bits;
  for (i64 i = first_item(grid); i < a.runs; i += item_stride(grid)) {
    Run<Input, 16> x = read_run<Input, 16>(static_cast<const Bits*>(a.x) + 16 * i), y;
    if constexpr (sizeof(Bits) == 2) a.is_short[i] = hadamard_short<kSignMask>(x, y);
    hadamard_run<kSignMask>(x);
    store_words(static_cast<Bits*>(a.y) + 16 * i, x.w);
  }
}
