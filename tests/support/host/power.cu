// Test kernel of pow.cuh: raise each number to a power.
struct Arguments {
  const double* d;
  double* out;
  i64 count;
  double power;
};

extern "C" __global__ void power_kernel(Arguments a) {
  for (i64 i = first_item(whole_grid()); i < a.count; i += item_stride(whole_grid()))
    a.out[i] = power_of(a.d[i], a.power);
}
