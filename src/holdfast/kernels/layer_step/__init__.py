"""One token through a whole layer between its projections: convolution, gates, state, norm and output gate."""
