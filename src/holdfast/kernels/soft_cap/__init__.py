"""cap * tanh(x / cap)."""
