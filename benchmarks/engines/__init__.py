"""Engines to compare with, each behind the same small interface and run in a process of its own."""
