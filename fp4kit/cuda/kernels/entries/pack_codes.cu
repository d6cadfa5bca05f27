// pack_codes and unpack_codes: convert 4-bit codes from one per byte to two per byte, and back. The code with the even
// index is in the low nibble (the low half of the byte). `a` holds the kernel's arguments: the arrays `in` and `out`,
// and the number of packed bytes.
#include "runs.cuh"

constexpr int kInFlight = 4;  // number of loads in flight per thread

// The arguments of pack_codes_kernel and unpack_codes_kernel.
struct PackArguments {
  const u8* in;
  u8* out;
  i64 bytes;  // number of bytes of packed codes
};

// Return 16 codes in packed form, 8 bytes of two codes each. `codes` holds one code per byte, in the low nibble; high
// nibbles are ignored.
FP4KIT_DEVICE u64 converted(const Chunk& codes) {
  u32 pairs[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const u32 low = codes.w[i] & 0x0F0F0F0Fu;
    pairs[i] = low | low >> 4;  // bytes 0 and 2 hold two codes each
  }
  return prmt(pairs[0], pairs[1], 0x6420u) | static_cast<u64>(prmt(pairs[2], pairs[3], 0x6420u)) << 32;
}

// Return 16 codes in unpacked form: one code per byte, in the low nibble, with high nibbles 0. `packed` holds two codes
// per byte.
FP4KIT_DEVICE Chunk converted(u64 packed) {
  Chunk codes;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const u32 doubled = prmt(static_cast<u32>(packed >> (16 * i)), 0u, 0x1100u);  // bytes 0, 0, 1, 1
    codes.w[i] = (doubled & 0x000F000Fu) | (doubled >> 4 & 0x0F000F00u);
  }
  return codes;
}

// Convert those of the `count` items at `from` that `grid` assigns to this thread block, and store the results at `to`.
// An item is 16 codes: a Chunk with one code per byte, which is packed to a u64, or a u64 with two codes per byte,
// which is unpacked to a Chunk. In and Out are these two types. Each thread loads several items before it uses the
// first one.
template <class In, class Out>
FP4KIT_DEVICE void convert_all(const u8* from, u8* to, i64 count, Grid grid) {
  const In* in = reinterpret_cast<const In*>(from);
  Out* out = reinterpret_cast<Out*>(to);
  const i64 stride = item_stride(grid);
  for (i64 start = first_item(grid); start < count; start += kInFlight * stride) {
    In loaded[kInFlight];
#pragma unroll
    for (int k = 0; k < kInFlight; ++k)
      if (start + k * stride < count) loaded[k] = in[start + k * stride];
#pragma unroll
    for (int k = 0; k < kInFlight; ++k)
      if (start + k * stride < count) out[start + k * stride] = converted(loaded[k]);
  }
}

// Pack the codes that `grid` assigns to this thread block, from a.in (one per byte) to a.out (two per byte). The output
// has a.bytes bytes. High nibbles of the input are ignored. If kAligned, both arrays begin at multiples of 16 bytes,
// and most codes are packed 16 at a time; otherwise two at a time.
template <bool kAligned>
FP4KIT_DEVICE void pack_codes(const PackArguments& a, Grid grid) {
  const i64 chunks = kAligned ? a.bytes / 8 : 0;
  convert_all<Chunk, u64>(a.in, a.out, chunks, grid);
  for (i64 i = 8 * chunks + first_item(grid); i < a.bytes; i += item_stride(grid))
    a.out[i] = static_cast<u8>((a.in[2 * i] & 15) | a.in[2 * i + 1] << 4);
}

// Unpack the codes that `grid` assigns to this thread block, from a.in (two per byte) to a.out (one per byte). The
// input has a.bytes bytes. High nibbles of the output are 0. If kAligned, both arrays begin at multiples of 16 bytes,
// and most codes are unpacked 16 at a time; otherwise two at a time.
template <bool kAligned>
FP4KIT_DEVICE void unpack_codes(const PackArguments& a, Grid grid) {
  const i64 chunks = kAligned ? a.bytes / 8 : 0;
  convert_all<u64, Chunk>(a.in, a.out, chunks, grid);
  for (i64 i = 8 * chunks + first_item(grid); i < a.bytes; i += item_stride(grid)) {
    a.out[2 * i] = a.in[i] & 15;
    a.out[2 * i + 1] = a.in[i] >> 4;
  }
}

// Pack the codes of a.in, one per byte, and store them in a.out, two per byte. High nibbles of the input are ignored.
// The kernel is launched for fp4kit.pack. A thread takes several items per step. Launch with any number of thread
// blocks.
extern "C" __global__ void __launch_bounds__(kThreads) pack_codes_kernel(PackArguments a) {
  pack_codes<kAligned>(a, whole_grid());
}

// Unpack the codes of a.in, two per byte, and store them in a.out, one per byte, with high nibbles 0. The kernel is
// launched for fp4kit.unpack. A thread takes several items per step. Launch with any number of thread blocks.
extern "C" __global__ void __launch_bounds__(kThreads) unpack_codes_kernel(PackArguments a) {
  unpack_codes<kAligned>(a, whole_grid());
}
