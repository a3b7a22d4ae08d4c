"""Random jobs, run by every strategy and compared with the single run."""
