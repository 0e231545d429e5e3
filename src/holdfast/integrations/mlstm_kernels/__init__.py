"""The mlstm_kernels package's PyTorch functions by Holdfast: its modules, names, arguments and layouts."""
