"""The scan of states between chunks, and its gradients."""
