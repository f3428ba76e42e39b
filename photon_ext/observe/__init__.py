"""What is going on: the meter, the cost model. Import the modules by name: each needs only what it uses."""
