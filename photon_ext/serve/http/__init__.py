"""What HTTP processes do: requests are checked, rendered and encoded; answers become text."""
