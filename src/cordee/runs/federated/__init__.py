"""Rounds of simulated clients: a coordinator that hands out clients, and resident workers that train them."""
