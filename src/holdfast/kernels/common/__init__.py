"""What the families truly share: the backend protocol, sequence packing, checkpointed recomputation."""
