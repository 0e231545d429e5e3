"""What the tests of the MLX front end stand on: Metal on a CPU, mlx's generated source, the float64 oracle."""
