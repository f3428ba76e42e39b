"""What records say: pure functions, which need neither a GPU nor torch to be tested."""
