"""dR of the fused backward pass: every token counted once, whatever the layout of the reset mask."""

from interpreted import interpret


def test_the_product_is_right_in_the_interpreter():
    interpret("kernels.dense.weights_grad_parity", "interpreted")
