"""From pre-activations to decays, betas and the stabiliser."""
