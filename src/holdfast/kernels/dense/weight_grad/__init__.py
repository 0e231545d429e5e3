"""dR, after the time loop."""
