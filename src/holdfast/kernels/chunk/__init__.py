"""The chunk primitives: intra_chunk and inter_chunk_scan."""
