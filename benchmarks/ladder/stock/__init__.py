"""A plain PyTorch decode loop, stage by stage."""
