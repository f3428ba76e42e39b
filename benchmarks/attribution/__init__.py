"""What two steps in flight gain: served loads, a log of their steps, a prediction, and its
check."""
