"""The plant."""
