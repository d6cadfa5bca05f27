// Stand in for the library of the CUDA driver (libcuda.so.1), for programs that load and launch kernels by it. What a
// program loads in place of a cubin is a text: the path of a library of kernels (library.h), the number of the kernel
// in it, and the bytes of the kernel's arguments. Memory of the GPU is memory of the program.
#include <cuda.h>
#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <sstream>

struct CUfunc_st {
  const char* (*launch)(unsigned, const unsigned char*, size_t, unsigned, unsigned, bool, unsigned char);
  unsigned number;
  size_t bytes;
};

CUresult cuInit(unsigned) {
  return CUDA_SUCCESS;
}
CUresult cuDeviceGet(CUdevice* device, int) {
  return *device = 0, CUDA_SUCCESS;
}
CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice) {
  return *context = nullptr, CUDA_SUCCESS;
}
CUresult cuCtxSetCurrent(CUcontext) {
  return CUDA_SUCCESS;
}
CUresult cuCtxSynchronize() {
  return CUDA_SUCCESS;
}
CUresult cuGetErrorString(CUresult, const char** text) {
  return *text = "the launch failed", CUDA_SUCCESS;
}

CUresult cuMemAlloc(CUdeviceptr* memory, size_t bytes) {
  *memory = reinterpret_cast<CUdeviceptr>(std::aligned_alloc(256, (bytes + 255) / 256 * 256));
  return CUDA_SUCCESS;
}
CUresult cuMemsetD8(CUdeviceptr memory, unsigned char value, size_t count) {
  return std::memset(reinterpret_cast<void*>(memory), value, count), CUDA_SUCCESS;
}
CUresult cuMemcpyHtoD(CUdeviceptr to, const void* from, size_t bytes) {
  return std::memcpy(reinterpret_cast<void*>(to), from, bytes), CUDA_SUCCESS;
}
CUresult cuMemcpyDtoH(void* to, CUdeviceptr from, size_t bytes) {
  return std::memcpy(to, reinterpret_cast<void*>(from), bytes), CUDA_SUCCESS;
}

CUresult cuModuleLoadData(CUmodule* module, const void* text) {
  static signed char no_reciprocals[1];
  auto* function = new CUfunc_st;
  std::string path;
  std::istringstream(static_cast<const char*>(text)) >> path >> function->number >> function->bytes;
  void* library = dlopen(path.c_str(), RTLD_NOW);
  if (!library) return CUDA_ERROR_INVALID_IMAGE;
  char* arguments[] = {reinterpret_cast<char*>(no_reciprocals)};
  reinterpret_cast<int (*)(int, char**)>(dlsym(library, "main"))(0, arguments);
  function->launch = reinterpret_cast<decltype(function->launch)>(dlsym(library, "host_launch_here"));
  *module = reinterpret_cast<CUmodule>(function);
  return CUDA_SUCCESS;
}
CUresult cuModuleLoad(CUmodule* module, const char* file) {
  std::stringstream text;
  text << std::ifstream(file).rdbuf();
  return cuModuleLoadData(module, text.str().c_str());
}
CUresult cuModuleGetFunction(CUfunction* function, CUmodule module, const char*) {
  return *function = reinterpret_cast<CUfunction>(module), CUDA_SUCCESS;
}

CUresult cuLaunchKernel(CUfunction f, unsigned grid, unsigned, unsigned, unsigned block, unsigned, unsigned, unsigned,
                        CUstream, void** parameters, void**) {
  const auto* arguments = static_cast<const unsigned char*>(parameters[0]);
  const char* stopped = f->launch(f->number, arguments, f->bytes, grid, block, false, 0xEE);
  if (stopped) std::fprintf(stderr, "a kernel was stopped: %s\n", stopped);
  return stopped ? CUDA_ERROR_LAUNCH_FAILED : CUDA_SUCCESS;
}
