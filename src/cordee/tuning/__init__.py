"""`cordee tune`: a search for the settings of a job that give the best result."""
