"""One log decay a head: linear attention, RetNet, Lightning, simple GLA, SSD."""
