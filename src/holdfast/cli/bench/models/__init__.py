"""holdfast bench --suite models: whole language models, layers, host time and decoding, mixer by mixer."""
