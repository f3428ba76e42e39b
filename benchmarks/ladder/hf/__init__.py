"""A Hugging Face model's decode loop, stage by stage."""
