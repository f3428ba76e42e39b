"""A layer as data: its weights, its projections, attention, MLP, and the block of both."""
