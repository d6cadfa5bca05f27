// The C API of fp4kit's CPU engine. fp4kit.get_include() returns the folder of this file, fp4kit.get_library() the path
// of the library for this processor, and fp4kit.engine_keys(recipe) the texts and numbers that describe a recipe.
// examples/c_api shows how to use them. Other functions of the library are not part of this API.
//
//   - Zero all structs first. Each call checks all numbers: a field that must be set and is 0 is an error. Steps are
//     distances of two rows, counted in elements of their array.
//   - Functions that return int32_t return FP4KIT_OK (0) or the reason why there is no valid result. After
//     FP4KIT_WRONG_INDEX, FP4KIT_WRONG_FIELD and FP4KIT_NULL_POINTER, nothing has been written.
//   - The size of arrays is not known, and an index of the same kind from another recipe is not noticed.
//   - Rounding is to nearest even. The floating-point environment must be the default one, without flush to zero.
//   - Some recipes, such as those of FlashInfer, need fp4kit_set_reciprocals first. Once such a call came too early, it
//     and all later calls return 1 until the table is set.
//   - Functions may be called from several threads. Only one call at a time uses more threads than its own.
#pragma once
#include <stdint.h>

#define FP4KIT_API_VERSION 2  // changes if a struct or function changes so that programs must be compiled again

#ifdef __cplusplus
extern "C" {
#endif

enum { FP4KIT_FLOAT32, FP4KIT_FLOAT16, FP4KIT_BFLOAT16 };  // types of elements and values

// Results of functions of keys that are no index. FP4KIT_NO_RULE is for the key "", which stands for a recipe without
// this rule. FP4KIT_UNKNOWN_KEY is for a key that this library does not have: it is misspelt, or from another version.
enum { FP4KIT_NO_RULE = -1, FP4KIT_UNKNOWN_KEY = -2 };

// Status codes, the results of functions that compute.
//   FP4KIT_OK            0: the result is valid
//   FP4KIT_NO_RESULT     only the Python code computes it: NaN, infinities, extreme scales; or a table is missing
//   FP4KIT_WRONG_INDEX   there is no rule, element, decoder or type with this number
//   FP4KIT_WRONG_FIELD   a number is out of range or does not divide another one, or a field that stays 0 is not 0
//   FP4KIT_NULL_POINTER  a pointer that must not be NULL is NULL
enum { FP4KIT_OK, FP4KIT_NO_RESULT, FP4KIT_WRONG_INDEX, FP4KIT_WRONG_FIELD, FP4KIT_NULL_POINTER };

// A matrix in memory. Rows and columns are 1 to 2^31. Steps are not 0, except the step of a single row or column.
// hadamard is 0 for no transform, or 1 + the 16-bit sign mask of a Hadamard transform of each 16 columns.
// clang-format off
typedef struct { const void* data; int64_t rows, columns, row_step, column_step, hadamard; } fp4kit_matrix;
// clang-format on

// The arguments of fp4kit_quantize that do not change between matrices of one shape. Other fields stay 0.
//   x                        the shape and steps of the matrix; data is not read
//   tensor_step              1 if the recipe has one tensor scale per row, otherwise 0
//   min_factor, max_factor   the numbers of engine_keys; max_factor is positive
//   packed_step, scales_step bytes of a row of codes and of block scales, or more
//   tile_rows, tile_columns  the part of the matrix that one thread takes at a time, of whole blocks and of a multiple
//                            of 32 columns: about 32768 elements, such as 16 rows of 2048 columns
//   input                    type of the elements
//   block_rule, element      indices from fp4kit_block_rule, which may be -1, and from fp4kit_element
//   block, block_rows        columns and rows of a block, the numbers of engine_keys. If the recipe has block scales,
//                            `block` divides the columns of the matrix
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
//   packed_step, scales_step, out_step  elements of a row of codes, of block scales and of values, or more
//   tile_rows, tile_columns  as in fp4kit_encode_call
//   decoder                  index from fp4kit_decoder
//   output                   type of the values
//   block                    columns of a block, the number of engine_keys
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

// Return the version of this library's C API. If it is not FP4KIT_API_VERSION, call no other function.
int32_t fp4kit_api_version(void);

// Return the index of a rule with the key from fp4kit.engine_keys, which is positive, FP4KIT_NO_RULE (-1) for the key
// "", or FP4KIT_UNKNOWN_KEY (-2).
int fp4kit_block_rule(const char* key);
int fp4kit_tensor_rule(const char* key);
int fp4kit_element(const char* key);
int fp4kit_decoder(const char* key);

// Keep a pointer to the table of 2^23 corrections that fp4kit.get_reciprocals() returns: by them, recipes of kernels
// with approximate reciprocals, such as FlashInfer's, compute the bits of an NVIDIA GPU. The table must stay in memory.
void fp4kit_set_reciprocals(const signed char* table);

// Quantize the matrix at x, of the shape and type in `call`.
//   given          the tensor amax, or one per row; NULL to compute it
//   packed         output: codes, two per byte for 4-bit elements, the even column in the low bits; wider elements one
//                  per byte
//   scales         output: scale codes, one per block of a row, so a block of several rows has equal ones; NULL if they
//                  are not wanted
//   tensor_scale   output: the tensor scale, which multiplies on decode, or one per row; NULL if it is not wanted
//   tensor_amax    output: the tensor amax, or one per row; NULL if it is not wanted
//   tensor_rule    index from fp4kit_tensor_rule, which may be -1
//   threads        the largest number of threads to use; numbers below 1 mean 1
int32_t fp4kit_quantize(const fp4kit_encode_call* call, const void* x, const float* given, uint8_t* packed,
                        uint8_t* scales, float* tensor_scale, float* tensor_amax, int32_t tensor_rule, int32_t threads);

// Store in `tensor` three numbers for each of `count` tensor amaxes, which must be finite and not negative: first the
// numbers that multiply on encode, then the tensor scales, then the amaxes. They are 1 if tensor_rule is -1. `input` is
// the type of the elements. `count` is 1 to 2^31.
int32_t fp4kit_tensor_scales(int32_t tensor_rule, int32_t input, const float* amax, int64_t count, float* tensor);

// Decode codes and scales, and store the values in `out`.
//   scales   the block scales; ignored if the recipe has none
//   tensor   the numbers of fp4kit_tensor_scales, for one tensor amax or for one per row
int32_t fp4kit_dequantize(const fp4kit_decode_call* call, const uint8_t* packed, const uint8_t* scales,
                          const float* tensor, void* out, int32_t threads);

#ifdef __cplusplus
}
#endif
