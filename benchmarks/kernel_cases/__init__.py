"""The ops of a decode step as cases to time: operands of a model's shapes, what torch does with the
same, and a check of the result."""
