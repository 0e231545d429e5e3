"""The fuzzer: random calls of every op, held against float64 loops written from the equations. See docs/fuzzing.md."""
