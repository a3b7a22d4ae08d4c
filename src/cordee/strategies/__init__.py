"""The strategies: one module for each row of the strategy table (`table.py`)."""
