"""What a layer does to the delta rule's inputs before the kernel."""
