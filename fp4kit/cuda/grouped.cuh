// A group: the same operation on many tensors in one launch.
//
// Device memory holds one Member for each tensor, and behind them one Part for each piece of the work. A piece belongs to one tensor
// and is about as large as any other, so thread blocks have equal work whatever the sizes of the tensors, and what a thread block
// prepares for a tensor (its scale, a table of factors) serves the whole piece.
#pragma once

#include "types.cuh"

template <class Arguments>
struct Member {
  Arguments arguments;  // of the kernel that does the same for one tensor
  u32 parts;            // pieces of this tensor
  u32 aligned;          // whether its runs are: what kAligned says of one tensor
};

struct Part { u32 member, index; };

template <class Arguments>
struct Group {
  const Member<Arguments>* members;
  i64 count, parts;
};

// body(arguments, grid, aligned) of every piece; the same in all threads of a block, so bodies may have barriers.
template <class Arguments, class Body>
FP4KIT_DEVICE void for_each_part(const Group<Arguments>& group, Body body) {
  __shared__ Member<Arguments> member;  // as near as a kernel's own arguments, without the registers
  const Part* parts = reinterpret_cast<const Part*>(group.members + group.count);
  constexpr int kWords = sizeof(member) / sizeof(u64);
  for (i64 i = blockIdx.x; i < group.parts; i += gridDim.x) {
    const Part part = parts[i];
    const u64* words = reinterpret_cast<const u64*>(group.members + part.member);
    if (threadIdx.x < kWords) reinterpret_cast<u64*>(&member)[threadIdx.x] = words[threadIdx.x];
    __syncthreads();
    body(member.arguments, Grid{part.index, member.parts}, member.aligned != 0u);
    __syncthreads();  // before the next piece uses the same shared memory
  }
}
