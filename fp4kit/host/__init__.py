"""The driver of both host engines: outputs, stacks, layouts and experts around the specification or the compiled
engine.
"""
