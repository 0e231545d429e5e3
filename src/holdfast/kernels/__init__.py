"""Device code by family. Inside a family a backend is a file: reference, chunked, triton_*, hopper_*, cuda."""
