// Quantize a float32 matrix on a GPU with fp4kit's kernels and the CUDA driver API, and print the codes, the block
// scales and the tensor scale. The program needs neither Python nor fp4kit. Compile and run it with
//
//     python export_kernels.py sm_90 .
//     g++ -std=c++17 quantize_driver.cpp -I. -I"$CUDA_HOME/include" -l:libcuda.so.1 -o quantize
//     ./quantize
#include <cuda.h>

#include <cstdio>
#include <cstdlib>
#include <vector>

#include "kernels.h"

constexpr int kRows = 64, kColumns = 256, kBlock = 16;

void check(CUresult result) {
  if (result == CUDA_SUCCESS) return;
  const char* text = nullptr;
  cuGetErrorString(result, &text);
  std::fprintf(stderr, "CUDA: %s\n", text);
  std::exit(1);
}

CUfunction load(const char* file, const char* kernel) {
  CUmodule module;
  CUfunction function;
  check(cuModuleLoad(&module, file));
  check(cuModuleGetFunction(&function, module, kernel));
  return function;
}

// Launch a kernel with a grid of `grid` thread blocks. Its only parameter is the struct of arguments, by value.
template <class Arguments>
void launch(CUfunction function, unsigned grid, unsigned block, Arguments arguments) {
  void* parameters[] = {&arguments};
  check(cuLaunchKernel(function, grid, 1, 1, block, 1, 1, 0, nullptr, parameters, nullptr));
}

// Return `bytes` bytes of memory on the GPU, all zero.
CUdeviceptr allocate(size_t bytes) {
  CUdeviceptr memory;
  check(cuMemAlloc(&memory, bytes));
  check(cuMemsetD8(memory, 0, bytes));
  return memory;
}

void print(CUdeviceptr memory, size_t bytes) {
  std::vector<unsigned char> host(bytes);
  check(cuMemcpyDtoH(host.data(), memory, bytes));
  for (unsigned char byte : host) std::printf("%02x", byte);
  std::printf("\n");
}

int main() {
  CUdevice device;
  CUcontext context;
  check(cuInit(0));
  check(cuDeviceGet(&device, 0));
  check(cuDevicePrimaryCtxRetain(&context, device));
  check(cuCtxSetCurrent(context));

  std::vector<float> x(kRows * kColumns);
  for (int i = 0; i < kRows * kColumns; ++i) x[i] = static_cast<float>(i * 37 % 101 - 50) / 16;
  const CUdeviceptr elements = allocate(x.size() * sizeof(float));
  check(cuMemcpyHtoD(elements, x.data(), x.size() * sizeof(float)));

  fp4kit_tensor_amax find = FP4KIT_TENSOR_AMAX_ARGUMENTS;  // the sizes are filled in, all addresses are 0
  find.x = elements;
  find.amax = allocate(sizeof(float));
  fp4kit_quantize encode = FP4KIT_QUANTIZE_ARGUMENTS;
  encode.x = elements;
  encode.tensor_amax = find.amax;
  encode.packed = allocate(kRows * kColumns / 2);
  encode.scales = allocate(kRows * kColumns / kBlock);
  encode.tensor_scale = allocate(sizeof(float));

  launch(load("tensor_amax.cubin", FP4KIT_TENSOR_AMAX_KERNEL), FP4KIT_TENSOR_AMAX_GRID, FP4KIT_TENSOR_AMAX_BLOCK, find);
  launch(load("quantize.cubin", FP4KIT_QUANTIZE_KERNEL), FP4KIT_QUANTIZE_GRID, FP4KIT_QUANTIZE_BLOCK, encode);
  check(cuCtxSynchronize());

  print(encode.packed, kRows * kColumns / 2);
  print(encode.scales, kRows * kColumns / kBlock);
  print(encode.tensor_scale, sizeof(float));
  return 0;
}
