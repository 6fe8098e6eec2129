"""Benchmarks against onnxruntime and against what the machine can do. Run them with nothing else running."""
