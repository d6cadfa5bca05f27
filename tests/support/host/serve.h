// The main loop of a test program: launches kernels as its standard input asks, until that ends. See README.md.
//
//   request   uint32 kernel, grid, threads, descending, bytes of the arguments, number of arrays; the arguments;
//             for each pointer: uint32 array that holds it (none: the arguments), uint32 array that it points to,
//             uint64 offset in bytes; for each array: uint64 misalignment, uint64 bytes; then the arrays
//   answer    one byte, and the arrays afterwards
#pragma once

#include <unistd.h>

#include <vector>

#include "host.h"

using Launch = void (*)(const unsigned char* arguments, size_t bytes, unsigned grid, unsigned threads, bool descending);

template <class Arguments, void (*kKernel)(Arguments)>
void launch(const unsigned char* bytes, size_t size, unsigned grid, unsigned threads, bool descending) {
  if (size != sizeof(Arguments)) host_fail("the launcher's arguments and the kernel's have different sizes");
  Arguments arguments;
  std::memcpy(&arguments, bytes, size);
  host_launch(kKernel, arguments, grid, threads, descending);
}

#ifdef HOST_LIBRARY
#include "library.h"
#else
[[noreturn]] inline void host_stop(const char* message) {
  std::fprintf(stderr, "%s\n", message);
  std::exit(1);
}

inline void host_read(void* to, size_t bytes) {
  if (bytes && std::fread(to, 1, bytes, stdin) != bytes) host_fail("the request ends early");
}

struct HostRequest {
  unsigned kernel, grid, threads, descending, bytes, pointers, arrays;
};
struct HostPointer {
  unsigned holder, target;
  unsigned long long offset;
};
struct HostArray {
  unsigned long long misalignment, bytes;
};
constexpr unsigned kInArguments = ~0u;

// One allocation of exactly the array's size an array, so that the address sanitizer sees one byte too many.
inline void host_serve(const Launch* launches, const HostRequest& request) {
  unsigned char arguments[4096];  // as many as a kernel can have
  if (request.bytes > sizeof arguments) host_fail("the arguments are too large");
  std::vector<HostPointer> pointers(request.pointers);
  std::vector<HostArray> arrays(request.arrays);
  std::vector<unsigned char*> memory(request.arrays);
  host_read(arguments, request.bytes);
  host_read(pointers.data(), request.pointers * sizeof(HostPointer));
  host_read(arrays.data(), request.arrays * sizeof(HostArray));
  for (unsigned i = 0; i < request.arrays; ++i) {
    memory[i] = static_cast<unsigned char*>(std::malloc(arrays[i].misalignment + arrays[i].bytes));
    host_read(memory[i] + arrays[i].misalignment, arrays[i].bytes);
  }
  for (const HostPointer& p : pointers) {
    unsigned char* data = memory[p.target] + arrays[p.target].misalignment;
    unsigned char* holder = p.holder == kInArguments ? arguments : memory[p.holder] + arrays[p.holder].misalignment;
    std::memcpy(holder + p.offset, &data, sizeof data);
  }
  alarm(60);  // seconds; launches take milliseconds
  launches[request.kernel](arguments, request.bytes, request.grid, request.threads, request.descending);
  alarm(0);
  std::fputc(1, stdout);
  for (unsigned i = 0; i < request.arrays; ++i) {
    std::fwrite(memory[i] + arrays[i].misalignment, 1, arrays[i].bytes, stdout);
    std::free(memory[i]);
  }
  std::fflush(stdout);
}

// argv[1]: file of the reciprocal table.
inline int host_main(int argc, char** argv, const Launch* launches) {
  static signed char table[1 << 23];
  std::FILE* file = argc > 1 ? std::fopen(argv[1], "rb") : nullptr;
  if (!file || std::fread(table, 1, sizeof table, file) != sizeof table) host_fail("no table of reciprocals");
  std::fclose(file);
  host_reciprocal_table = table;
  HostRequest request;
  while (std::fread(&request, sizeof request, 1, stdin) == 1) host_serve(launches, request);
  return 0;
}
#endif
