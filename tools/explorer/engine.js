"use strict";
// Calls fp4kit's CPU engine, compiled to WebAssembly (engine.cpp), for short matrices.

// Input types by name: the number of the type in the engine, and the array type of an element's bits.
const DTYPES = {
  float32: { input: 0, Bits: Uint32Array },
  float16: { input: 1, Bits: Uint16Array },
  bfloat16: { input: 2, Bits: Uint16Array },
};

const scratch = new DataView(new ArrayBuffer(8));

/** Return the bits of a number rounded to float32, to nearest even. */
function float32Bits(x) {
  scratch.setFloat32(0, x);
  return scratch.getUint32(0);
}

/** Return the float32 number with these bits. */
function float32Of(bits) {
  scratch.setUint32(0, bits);
  return scratch.getFloat32(0);
}

/** Return all finite numbers of a 16-bit type that are not negative, in ascending order; index = bits. */
const magnitudes16 = {};
function magnitudesOf(dtype) {
  if (!magnitudes16[dtype]) {
    const count = dtype === "float16" ? 0x7c00 : 0x7f80;
    magnitudes16[dtype] = Float64Array.from({ length: count }, (_, bits) => valueOf(bits, dtype));
  }
  return magnitudes16[dtype];
}

/** Return the number whose bits in `dtype` are given. */
function valueOf(bits, dtype) {
  if (dtype === "float32") return float32Of(bits);
  if (dtype === "bfloat16") return float32Of(bits << 16);
  const sign = bits & 0x8000 ? -1 : 1;
  const exponent = (bits >> 10) & 31;
  const mantissa = bits & 1023;
  if (exponent === 31) return mantissa ? NaN : sign * Infinity;
  return sign * (exponent ? 2 ** (exponent - 25) * (1024 + mantissa) : 2 ** -24 * mantissa);
}

/** Return the bits of a float64 number in `dtype`, rounded once, to nearest even. Too large numbers become infinite. */
function bitsOf(x, dtype) {
  if (dtype === "float32") return float32Bits(x);
  const isHalf = dtype === "float16";
  const infinity = isHalf ? 0x7c00 : 0x7f80;
  const sign = x < 0 || Object.is(x, -0) ? 0x8000 : 0;
  if (Number.isNaN(x)) return infinity + 64;
  const table = magnitudesOf(dtype);
  const size = Math.abs(x);
  const last = table.length - 1;
  const step = table[last] - table[last - 1];
  if (size >= table[last] + step / 2) return sign | infinity;
  let low = 0;
  let high = last;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (table[middle] <= size) low = middle;
    else high = middle;
  }
  if (size >= table[last]) return sign | last;
  const below = size - table[low];
  const above = table[high] - size;
  const nearest = below < above || (below === above && low % 2 === 0) ? low : high;
  return sign | nearest;
}

/** Return the bytes of a text in Base64 that holds a gzip file, decompressed. */
async function decompressed(text) {
  const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

class Engine {
  /**
   * Load the engine. `wasm` and `reciprocals` are gzip files in Base64: the WebAssembly module, and the table of
   * rcp.approx.ftz.f32.
   */
  static async load(wasm, reciprocals) {
    const unused = () => 0; // for the functions by which the C library would write messages
    const system = { fd_close: unused, fd_seek: unused, fd_write: unused };
    const { instance } = await WebAssembly.instantiate(await decompressed(wasm), { wasi_snapshot_preview1: system });
    instance.exports._initialize();
    return new Engine(instance.exports, await decompressed(reciprocals));
  }

  constructor(functions, reciprocals) {
    this.functions = functions;
    this.indices = new Map();
    new Uint8Array(functions.memory.buffer, functions.reciprocals_at(), reciprocals.length).set(reciprocals);
  }

  /** Return the index of the entry with a key in one of the engine's tables, or -1 if the key is null. */
  index(table, key) {
    if (key === null) return -1;
    const name = `${table} ${key}`;
    if (!this.indices.has(name)) {
      const bytes = new TextEncoder().encode(`${key}\0`);
      new Uint8Array(this.functions.memory.buffer, this.functions.key_at(), bytes.length).set(bytes);
      const found = this.functions[table]();
      if (found < 0) throw new Error(`the engine has no ${table} ${key}`);
      this.indices.set(name, found);
    }
    return this.indices.get(name);
  }

  /** Return a copy of `length` items of the array of the engine whose address the function `at` returns. */
  copy(Type, at, length) {
    return new Type(this.functions.memory.buffer, this.functions[at](), length).slice();
  }

  /**
   * Quantize and dequantize a matrix.
   *
   * recipe: an item of RECIPES. dtype: a name in DTYPES. bits: the bits of the elements, row by row. amax: the tensor
   * amax, or null to compute it. Returns the packed codes, the bytes of the block scales (own.js: or the numbers), [encode
   * scale, decode scale, amax] of the tensor, and the bits of the values. Returns null if only fp4kit's specification
   * can compute them.
   */
  explore(recipe, dtype, bits, rows, columns, amax = null) {
    if (recipe.own) return exploreOwn(recipe, dtype, bits, amax);
    const { input, Bits } = DTYPES[dtype];
    const f = this.functions;
    const rule = this.index("block_rule", recipe.blockRule);
    const tensor = this.index("tensor_rule", recipe.tensorRule);
    const element = this.index("element", recipe.arithmetic);
    const decoder = this.index("decoder", recipe.decoders[dtype]);
    new Bits(f.memory.buffer, f.elements_at(), bits.length).set(bits);
    const [smallest, largest] = recipe.factors[dtype];
    const { block, blockRows, codeBits } = recipe;
    const sizes = [block, blockRows, codeBits];
    const given = amax === null ? -1 : amax;
    const infinite = largest === null ? Infinity : largest;
    if (f.explore(rule, tensor, element, decoder, input, ...sizes, smallest, infinite, rows, columns, given)) return null;
    const scales = rule < 0 ? 0 : rows * Math.ceil(columns / block); // blocks of several rows store their scale in each
    return {
      packed: this.copy(Uint8Array, "packed_at", (rows * columns * codeBits) / 8),
      scales: this.copy(Uint8Array, "scales_at", scales),
      tensor: this.copy(Float32Array, "tensor_at", 3),
      values: this.copy(Bits, "values_at", rows * columns),
    };
  }

  /**
   * Return the float32 values of all codes of a recipe under one block scale and the tensor scale of the last call of
   * explore. Return null if fp4kit's engine cannot decode under this scale.
   */
  valuesUnder(recipe, scale) {
    if (recipe.own) return ownValuesUnder(recipe, scale);
    const f = this.functions;
    const decoder = this.index("decoder", recipe.decoders.float32);
    const count = 2 ** recipe.elementBits;
    const columns = Math.max(count, recipe.block);
    const codes = Array.from({ length: columns }, (_, i) => i % count);
    const bytes = packedCodes(codes, recipe.codeBits);
    new Uint8Array(f.memory.buffer, f.packed_at(), bytes.length).set(bytes);
    new Uint8Array(f.memory.buffer, f.scales_at(), columns / recipe.block).fill(scale);
    if (f.decode_row(0, decoder, 0, recipe.block, recipe.codeBits, columns)) return null;
    return this.copy(Float32Array, "values_at", count);
  }
}

/** Return codes as bytes, with the first code in the lowest bits. */
function packedCodes(codes, codeBits) {
  const bytes = new Uint8Array((codes.length * codeBits) / 8);
  codes.forEach((code, i) => {
    for (let bit = 0; bit < codeBits; ++bit) {
      const place = i * codeBits + bit;
      bytes[place >> 3] |= ((code >> bit) & 1) << (place & 7);
    }
  });
  return bytes;
}

/** Return the codes that are stored in bytes; the inverse of packedCodes. */
function unpackedCodes(bytes, codeBits, count) {
  return Array.from({ length: count }, (_, i) => {
    let code = 0;
    for (let bit = 0; bit < codeBits; ++bit) {
      const place = i * codeBits + bit;
      code |= ((bytes[place >> 3] >> (place & 7)) & 1) << bit;
    }
    return code;
  });
}
