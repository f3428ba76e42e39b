"""Pictures and files of a timeline."""
