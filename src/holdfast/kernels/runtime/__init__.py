"""How a kernel is compiled, launched and replayed; knows no recurrence."""
