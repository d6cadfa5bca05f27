// Test kernel of search_loss_bounds.cuh. For each block i of x, store the lower bounds of the losses of eight scales,
// whose codes are first[i] to first[i] + 7. Only the first i % 8 + 1 of them count as candidates.
struct Arguments {
  const float *x, *reciprocals;
  const u32* first;
  u32* out;
  i64 count;
};

extern "C" __global__ void bounds_kernel(Arguments a) {
  __shared__ LossBounds bounds;
  make_bounds<ScaleFormat>(bounds);
  __syncthreads();
  for (i64 i = first_item(whole_grid()); i < a.count; i += item_stride(whole_grid())) {
    SearchBlock<false> block;
    load_run<Float32, kSearchBlockSize, true>(a.x + i * kSearchBlockSize, block.a);
    const EightBounds sums = bounds_of(block, a.first[i], static_cast<u32>(i % 8 + 1), a.reciprocals[i], bounds);
    for (int j = 0; j < 4; ++j) {
      a.out[8 * i + j] = sums.pairs[j] & 0xFFFFu;
      a.out[8 * i + j + 4] = sums.pairs[j] >> 16;
    }
  }
}
