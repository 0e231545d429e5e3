"""On Hopper: what the delta rule beside a vector decay takes of each chunk, for all chunks at once."""
