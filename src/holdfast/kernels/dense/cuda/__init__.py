"""The whole time loop in one launch of CUDA C++."""
