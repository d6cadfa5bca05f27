from fp4kit.ops.dequantize import dequantize
from fp4kit.ops.fake_quantize import fake_quantize, fake_quantize_backward
from fp4kit.ops.quantize import quantize, quantize_both
from fp4kit.recipes import recipe, recipes
