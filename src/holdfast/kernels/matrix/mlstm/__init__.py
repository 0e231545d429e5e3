"""mLSTM: scalar decay with a normaliser and a stabiliser."""
