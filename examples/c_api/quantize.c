// Quantize a float32 matrix with fp4kit's CPU engine, decode it, and print both. Compile it with
//
//     python recipe_header.py nvfp4-te > recipe.h
//     INCLUDE=$(python -c 'import fp4kit; print(fp4kit.get_include())')
//     LIBRARY=$(python -c 'import fp4kit; print(fp4kit.get_library())')
//     cc quantize.c -I. -I"$INCLUDE" "$LIBRARY" -o quantize
//
// On macOS, open the library with dlopen instead.
#include <fp4kit.h>
#include <math.h>
#include <stdio.h>

#include "recipe.h"

enum { ROWS = 4, COLUMNS = 64, CODES = COLUMNS * CODE_BITS / 8, TENSORS = TENSOR_STEP ? ROWS : 1 };

static signed char reciprocals[1 << 23];

int main(void) {
  if (fp4kit_api_version() != FP4KIT_API_VERSION) return 10;  // the library is from another version than the header
  float x[ROWS * COLUMNS], values[ROWS * COLUMNS], tensor_scale[TENSORS], tensor_amax[TENSORS], tensor[3 * TENSORS];
  uint8_t packed[ROWS * CODES], scales[ROWS * COLUMNS / BLOCK];
  for (int i = 0; i < ROWS * COLUMNS; ++i) x[i] = (float)(i * 37 % 101 - 50) / 16;
  for (int i = 0; i < TENSORS; ++i) tensor_scale[i] = tensor_amax[i] = 1;

  FILE* table = fopen("reciprocals.bin", "rb");
  if (!table || fread(reciprocals, 1, sizeof reciprocals, table) != sizeof reciprocals) return 11;
  fclose(table);
  fp4kit_set_reciprocals(reciprocals);

  fp4kit_encode_call encode = {0};
  encode.x = (fp4kit_matrix){NULL, ROWS, COLUMNS, COLUMNS, 1, 0};
  encode.tensor_step = TENSOR_STEP;
  encode.min_factor = MIN_FACTOR, encode.max_factor = MAX_FACTOR;
  encode.packed_step = CODES, encode.scales_step = COLUMNS / BLOCK;
  encode.tile_rows = 16, encode.tile_columns = 2048;
  encode.input = FP4KIT_FLOAT32;
  encode.block_rule = fp4kit_block_rule(BLOCK_RULE), encode.element = fp4kit_element(ELEMENT);
  encode.block = BLOCK, encode.block_rows = BLOCK_ROWS;
  const int32_t tensor_rule = fp4kit_tensor_rule(TENSOR_RULE);

  fp4kit_decode_call decode = {0};
  decode.row_step = TENSOR_STEP, decode.rows = ROWS, decode.columns = COLUMNS;
  decode.packed_step = CODES, decode.scales_step = COLUMNS / BLOCK, decode.out_step = COLUMNS;
  decode.tile_rows = 16, decode.tile_columns = 2048;
  decode.decoder = fp4kit_decoder(DECODER), decode.output = FP4KIT_FLOAT32, decode.block = BLOCK;
  // A negative index other than FP4KIT_NO_RULE: recipe.h is from another version of fp4kit than the library.
  if (encode.block_rule < FP4KIT_NO_RULE || tensor_rule < FP4KIT_NO_RULE || encode.element < 0 || decode.decoder < 0)
    return FP4KIT_WRONG_INDEX;

  int32_t status = fp4kit_quantize(&encode, x, NULL, packed, scales, tensor_scale, tensor_amax, tensor_rule, 1);
  if (!status) status = fp4kit_tensor_scales(tensor_rule, FP4KIT_FLOAT32, tensor_amax, TENSORS, tensor);
  if (!status) status = fp4kit_dequantize(&decode, packed, scales, tensor, values, 1);
  if (status) return status;  // FP4KIT_NO_RESULT and so on

  for (size_t i = 0; i < sizeof packed; ++i) printf("%02x", packed[i]);
  printf("\n");
  for (size_t i = 0; i < sizeof scales; ++i) printf("%02x", scales[i]);
  printf("\n");
  for (int i = 0; i < TENSORS; ++i) printf("%a ", tensor_scale[i]);
  printf("\n");
  for (int i = 0; i < ROWS * COLUMNS; ++i) printf("%a ", values[i]);
  printf("\n");
  return 0;
}
