"""States of the segments of a sequence, and the scan over them."""
