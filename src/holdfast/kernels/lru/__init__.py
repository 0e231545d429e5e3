"""What stands around the scan of a linear recurrent unit: its gates, and the GeLU branch beside it."""
