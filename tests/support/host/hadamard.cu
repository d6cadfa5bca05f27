// Test kernel of hadamard.cuh: transform each run of 16 elements, and store whether its float32 sums were certain.
// If a check in the kernel fails, the kernel changes an element of its results, so the test's comparison fails.
struct Arguments {
  const void* x;  // runs x 16 elements
  void* y;        // their transforms
  void* columns;  // the same transforms, computed as two columns each
  u8* is_fast;    // per run: 1 if its float32 sums were certain, else 0
  i64 runs;       // number of runs, which is even
};

extern "C" __global__ void hadamard_kernel(Arguments a) {
  const Grid grid = whole_grid();
  using Bits = typename Input::Bits;
  for (i64 i = first_item(grid); i < a.runs; i += item_stride(grid)) {
    Run<Input, 16> x = read_run<Input, 16>(static_cast<const Bits*>(a.x) + 16 * i), y;
    u32 largest;
    if constexpr (sizeof(Bits) == 2) {
      a.is_fast[i] = hadamard_fast<kSignMask>(x, y, largest);
      if (i % 2 == 0) {
        const u16* pair = static_cast<const u16*>(a.x) + 16 * i;
        u16* out = static_cast<u16*>(a.columns) + 16 * i;
        u32 rows[16];
        for (int j = 0; j < 16; ++j) rows[j] = pair[j] | static_cast<u32>(pair[16 + j]) << 16;
        u32 inconclusive;
        const u32 both = hadamard_columns<kSignMask, Input>(rows, inconclusive);
        if (both != largest_pair<Input>(rows)) rows[0] ^= 1u;
        for (int j = 0; j < 2; ++j) {
          Run<Input, 16> column = read_run<Input, 16>(static_cast<const Bits*>(a.x) + 16 * (i + j)), fast;
          const bool is_conclusive = hadamard_fast<kSignMask>(column, fast, largest);
          if (!is_conclusive) hadamard_run<kSignMask>(column);
          for (int k = 0; k < 16; ++k)
            out[16 * j + k] = is_conclusive ? static_cast<u16>(rows[k] >> (16 * j))
                                            : static_cast<u16>(column.w[k / 2] >> (k % 2 * 16));
          if (is_conclusive == (inconclusive >> j & 1u)) out[16 * j] ^= 1u;
        }
      }
    }
    largest = hadamard_run<kSignMask>(x);
    store_words(static_cast<Bits*>(a.y) + 16 * i, x.w);
    if (largest != largest_bits_of(x)) static_cast<Bits*>(a.y)[16 * i] = 1;
  }
}
