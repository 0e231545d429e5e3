"""In Triton: the chunks of vector decay, their inverses, and a pass each way with the state in registers."""
