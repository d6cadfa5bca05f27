// The C API of fp4kit's CPU engine. fp4kit.get_include() returns the folder of this file, fp4kit.get_library() the path
// of the library for this processor, and fp4kit.engine_keys(recipe) the texts and numbers that describe a recipe.
// examples/c_api shows how to use them. Other functions of the library are not part of this API.
//
//   - Zero all structs first. Steps are distances of two rows, counted in elements of their array.
//   - A function that returns 1 has not computed a valid result: the matrix has elements or scales that only the Python
//     code computes, such as NaN and infinities.
//   - Rounding is to nearest even. The floating-point environment must be the default one, without flush to zero.
//   - Some recipes, such as those of FlashInfer, need fp4kit_set_reciprocals first. Once such a call came too early, it
//     and all later calls return 1 until the table is set.
//   - Functions may be called from several threads. Only one call at a time uses more threads than its own.
#pragma once
#include <stdint.h>

#define FP4KIT_API_VERSION 1  // changes if a struct or function changes so that programs must be compiled again

#ifdef __cplusplus
extern "C" {
#endif

enum { FP4KIT_FLOAT32, FP4KIT_FLOAT16, FP4KIT_BFLOAT16 };  // types of elements and values

// A matrix in memory. hadamard is the sign mask of a Hadamard transform of each 16 columns, or -1 for none.
// clang-format off
typedef struct { const void* data; int64_t rows, columns, row_step, column_step, hadamard; } fp4kit_matrix;
// clang-format on

// The arguments of fp4kit_quantize that do not change between matrices of one shape. Other fields stay 0.
//   x                        the shape and steps of the matrix; data is not read
//   tensor_step              1 if the recipe has one tensor scale per row, otherwise 0
//   min_factor, max_factor   the numbers of engine_keys
//   packed_step, scales_step bytes of a row of codes and of block scales
//   tile_rows, tile_columns  the part of the matrix that one thread takes at a time, of whole blocks and of a multiple
//                            of 32 columns: about 32768 elements, such as 16 rows of 2048 columns
//   input                    type of the elements
//   block_rule, element      indices from fp4kit_block_rule and fp4kit_element
//   block, block_rows        columns and rows of a block
// clang-format off
typedef struct {
  fp4kit_matrix x;
  const float *encode, *decode, *amax; int64_t tensor_step; const float *block_amax, *factors; int64_t block_step;
  float min_factor, max_factor; const uint8_t* random; int64_t random_step; const uint64_t* seed;
  int64_t stream_first, stream_stride; uint8_t *packed, *scales; int64_t packed_step, scales_step;
  uint8_t* needs_fallback; int64_t tile_rows, tile_columns;
  int32_t input, block_rule, element, block, block_rows, threads;
} fp4kit_encode_call;

// The arguments of fp4kit_dequantize that do not change between matrices of one shape. Other fields stay 0.
//   row_step                 1 if the recipe has one tensor scale per row, otherwise 0
//   rows, columns            the shape of the matrix of values
//   packed_step, scales_step, out_step  elements of a row of codes, of block scales and of values
//   tile_rows, tile_columns  as in fp4kit_encode_call
//   decoder                  index from fp4kit_decoder
//   output                   type of the values
//   block                    columns of a block
typedef struct {
  const uint8_t *packed, *scales; const float *encode, *decode, *amax; int64_t row_step, block_step;
  void* out; int64_t rows, columns, packed_step, scales_step, out_step; uint8_t* needs_fallback;
  int64_t tile_rows, tile_columns, tables_from; int32_t decoder, output, block, threads;
} fp4kit_decode_call;
// clang-format on

// Return the highest level that this processor can run: "base", "avx2" or "avx512".
const char* fp4kit_level(void);

// Return the digest of the sources of this library.
const char* fp4kit_digest(void);

// Return the index of a rule with the key from fp4kit.engine_keys, or -1 if there is no such rule. The key "" stands
// for a recipe without this rule, and gives -1.
int fp4kit_block_rule(const char* key);
int fp4kit_tensor_rule(const char* key);
int fp4kit_element(const char* key);
int fp4kit_decoder(const char* key);

// Keep a pointer to the table of 2^23 corrections that fp4kit.get_reciprocals() returns: by them, recipes of kernels
// with approximate reciprocals, such as FlashInfer's, compute the bits of an NVIDIA GPU. The table must stay in memory.
void fp4kit_set_reciprocals(const signed char* table);

// Quantize the matrix at x, of the shape and type in `call`. Return 0, or 1 if there is no valid result.
//   given          the tensor amax, or one per row; NULL to compute it
//   packed         output: codes, two per byte for 4-bit elements, the even column in the low bits; wider elements one
//                  per byte
//   scales         output: scale codes, one per block of a row, so a block of several rows has equal ones; NULL if they
//                  are not wanted
//   tensor_scale   output: the tensor scale, which multiplies on decode, or one per row; NULL if it is not wanted
//   tensor_amax    output: the tensor amax, or one per row; NULL if it is not wanted
//   tensor_rule    index from fp4kit_tensor_rule
//   threads        the largest number of threads to use
int32_t fp4kit_quantize(const fp4kit_encode_call* call, const void* x, const float* given, uint8_t* packed,
                        uint8_t* scales, float* tensor_scale, float* tensor_amax, int32_t tensor_rule, int32_t threads);

// Store in `tensor` three numbers for each of `count` tensor amaxes, which must be finite and not negative: first the
// numbers that multiply on encode, then the tensor scales, then the amaxes. They are 1 if tensor_rule is -1. `input` is
// the type of the elements.
void fp4kit_tensor_scales(int32_t tensor_rule, int32_t input, const float* tensor_amax, int64_t count, float* tensor);

// Decode codes and scales, and store the values in `out`. Return 0, or 1 if there is no valid result.
//   tensor   the numbers of fp4kit_tensor_scales, for one tensor amax or for one per row
int32_t fp4kit_dequantize(const fp4kit_decode_call* call, const uint8_t* packed, const uint8_t* scales,
                          const float* tensor, void* out, int32_t threads);

#ifdef __cplusplus
}
#endif
