"""Plan quantization-aware training (QAT) whose trained values are the values that a converted checkpoint serves.

plan.py chooses the weights and the groups that share an amax, by the rules of the converter. table.py prints the plan.
fp4kit.torch and fp4kit.jax apply it.
"""
