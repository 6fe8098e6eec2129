"""A compiled model against onnxruntime. `comparison.compare` is the entry; nothing is imported here, since the child
processes of `side` must hold no more than what they measure."""
