"""What `compare_checkouts.py` is made of: two checkouts side by side, what both do with the same jobs, how fast."""
